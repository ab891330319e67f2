"""A plan: a strategy with its choices, as a value that the planner writes and the engine and the trainer accept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from zeromesh.errors import InputError, MeshError, short_repr
from zeromesh.files.users import parse_json, read_text
from zeromesh.parallel import Parallel
from zeromesh.strategy.stage import DTYPE_FIELDS, dtype_name
from zeromesh.strategy.strategy import Strategy

Recompute = Literal["none", "selective", "full"]


def settle_dtypes(owner: object) -> None:
    """Replaces the dtypes of a plan or a workload by our names. With fp64 parameters, gradients and masters are fp64
    too, as in the engine.

    Raises:
        InputError: models do not compute in one of these dtypes.
    """
    for field in DTYPE_FIELDS:
        object.__setattr__(owner, field, dtype_name(getattr(owner, field), field))
    if getattr(owner, "param_dtype") == "fp64":  # noqa: B009  # mypy knows nothing of it
        for field in ("grad_dtype", "master_dtype"):
            object.__setattr__(owner, field, "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy with the choices that belong to it.

    Args:
        strategy: strategy on the mesh's axes.
        mesh: (axis name, size), innermost first.
        micro_batch: sequences per device and micro-batch.
        micro_batches: micro-batches per step.
        recompute: activation checkpointing of the blocks.
        seq_len: tokens per sequence; None if unknown.
        param_dtype, reduce_dtype, grad_dtype, master_dtype: fp64, fp32, bf16 or fp16; None for the engine's defaults.
        parallel: degrees of tensor, context, pipeline and expert parallelism; None without.
        predicted: the planner's figures for this plan, as `zeromesh simulate --json` prints them.

    Raises:
        InputError: an unknown dtype or recomputation, or a count below 1.
    """

    strategy: Strategy
    mesh: tuple[tuple[str, int], ...]
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    seq_len: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_dtype: str | None = None
    master_dtype: str | None = None
    parallel: Parallel | None = None
    predicted: dict[str, Any] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        settle_dtypes(self)
        for name in ("micro_batch", "micro_batches", "seq_len"):
            count = getattr(self, name)
            if count is None and name == "seq_len":
                continue
            if not isinstance(count, int) or count < 1:
                raise InputError(f"{name} of a plan must be a whole number of at least 1; got {count!r}")
        if self.recompute not in get_args(Recompute):
            raise InputError(f"recompute of a plan must be {', '.join(get_args(Recompute))}; got {self.recompute!r}")

    def to_json(self) -> str:
        """The plan as a JSON object; `from_json` is its inverse."""
        fields = asdict(self) | {"strategy": str(self.strategy), "mesh": dict(self.mesh)}
        return json.dumps({"zeromesh_plan": 1} | fields, indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Reads a plan that `to_json` wrote.

        Raises:
            InputError: not a plan of ours, or a field is missing or unknown; names `source`.
        """
        try:
            data = parse_json(text, where=source, hint="; not a zeromesh plan: write one with `zeromesh plan -o`")
            version = data.pop("zeromesh_plan")
            if version != 1:
                raise InputError(f"{source}: plan format must be 1; got {version}")
            data["strategy"] = Strategy.parse(data["strategy"])
            data["parallel"] = Parallel(**data["parallel"]) if data.get("parallel") else None
            data["mesh"] = tuple((name, int(size)) for name, size in data["mesh"].items())
            return cls(**data)
        except (OverflowError, AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{source}: not a zeromesh plan ({error}); write one with `zeromesh plan -o`") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file written by `zeromesh plan -o`."""
        return cls.from_json(read_text(path, kind="a plan"), source=str(path))

    def on_axes(self, axes: Sequence[tuple[str, int]]) -> Strategy:
        """The strategy for a mesh. Planned axes of one rank are left out where the mesh lacks them.

        Raises:
            MeshError: an axis has another size than it was planned for.
        """
        planned, sizes = dict(self.mesh), dict(axes)
        others = [f"{name}={size} (planned: {planned[name]})" for name, size in axes if planned.get(name, size) != size]
        if others:
            raise MeshError(
                f"the plan was made for another mesh; this mesh has {', '.join(others)}: plan for it, or give only the "
                f"plan's strategy, {self.strategy}"
            )
        terms = [term for term in self.strategy.axes if term.name in sizes or planned.get(term.name) != 1]
        return replace(self.strategy, axes=tuple(terms)) if terms else self.strategy

    def require(self, choices: Mapping[str, tuple[object, object]], *, where: str) -> None:
        """Raises InputError if a run makes other choices than this plan, whose figures hold for its own alone.

        Args:
            choices: by name, the planned value (None for open) and the run's.
            where: the plan's file.
        """
        if self.parallel is not None:
            raise InputError(
                f"the plan {where} divides the model by {self.parallel}, but zeromesh train only shards over "
                "data-parallel ranks: plan without these degrees, or divide the model yourself and call zm.shard"
            )
        others = [f"{name} = {own} (planned: {has})" for name, (has, own) in choices.items() if has not in (None, own)]
        if others:
            raise InputError(
                f"the plan {where} does not match this run: {', '.join(others)}. Set them as planned, plan again, or "
                f"give only the plan's strategy, {self.strategy}"
            )
