"""A model's units in the form that the schedule needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from zeromesh.errors import ModelError, NotationError
from zeromesh.model.spec import ModelSpec, UnitKind, UnitSpec
from zeromesh.schedule.unit import FlatBuffer, HostShare, Role, Unit, joined_name, neighbours
from zeromesh.simulator.division import EXPERTS, NOTHING
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy.parts import belongs, require_known


def schedule_units(
    model: ModelSpec,
    workload: FixedWorkload,
    bucket_bytes: int = 0,
    parts: Sequence[str] = (),
    shares: Mapping[str, int] = MappingProxyType({}),
) -> tuple[tuple[Unit, ...], tuple[tuple[UnitSpec, ...], ...]]:
    """Returns the units that the engine would cut `model` into, root first, each with the descriptions of its contents:
    one unit of the model, or several neighbours, joined up to `bucket_bytes`. There is a root even if it holds nothing,
    since it is open during the whole step.

    Args:
        model: a model whose tensors have the same names as in the engine.
        bucket_bytes: 0 joins nothing.
        parts: names of parts that have layouts of their own.
        shares: by part (the model's under ""), the percentage of its tensors that takes the host's stage.

    Raises:
        NotationError: nothing belongs to a part, or a part is a class, which descriptions of tensors do not know.
        ModelError: a tensor would be in two parts.
    """
    _require_known(model, parts)
    pairs = list(_pairs(model, workload, parts, shares))
    if pairs[0][1].kind is not UnitKind.ROOT:
        pairs.insert(0, (Unit(name="", role=Role.RESIDENT, buffers=()), NOTHING))
    units, specs = [unit for unit, _ in pairs], [spec for _, spec in pairs]
    joined, groups = join_units(units, bucket_bytes)
    return tuple(joined), tuple(tuple(specs[index] for index in group) for group in groups)


def _require_known(model: ModelSpec, parts: Sequence[str]) -> None:
    for part in parts:
        if part.startswith("<"):
            raise NotationError(
                f"part {part} is the modules of a class, and a simulation knows their names alone: give a pattern of "
                f"those, as in *.embed_tokens"
            )
    tensors = (f"{name}.{tensor.name}" for spec in model.units for name in _names(spec) for tensor in spec.tensors)
    if parts:
        require_known(parts, {module: "" for name in tensors for module in _modules_around(name.lstrip("."))})


def _names(spec: UnitSpec) -> list[str]:
    """The names of the modules that `spec` describes."""
    return [f"{spec.name.removesuffix('.0')}.{index}" for index in range(spec.count)] if spec.count > 1 else [spec.name]


def _pairs(
    model: ModelSpec, workload: FixedWorkload, parts: Sequence[str], shares: Mapping[str, int]
) -> Iterator[tuple[Unit, UnitSpec]]:
    trained = sum(spec.count * t.num_elements for spec in model.units for t in spec.tensors if t.trainable)
    share = HostShare(shares.get("", 100), trained) if shares else None
    for spec in sorted(model.units, key=lambda spec: spec.kind is not UnitKind.ROOT):
        role = Role.BLOCK if spec.kind is UnitKind.BLOCK else Role.RESIDENT
        buffers = _buffers(spec, workload, {})
        for name in _names(spec):
            if parts or share:
                homes = {t.name: _part_around(f"{name}.{t.name}".lstrip("."), parts) for t in spec.tensors}
                buffers = _buffers(spec, workload, homes, share)
            yield Unit(name=name, role=role, buffers=buffers), spec


def _buffers(
    spec: UnitSpec, workload: FixedWorkload, homes: Mapping[str, str], share: HostShare | None = None
) -> tuple[FlatBuffer, ...]:
    sizes: Counter[tuple[str, bool, str, bool]] = Counter()
    for tensor in spec.tensors:
        part = EXPERTS if tensor.ep > 1 else homes.get(tensor.name, "")
        on_device = share is not None and share.stays(tensor.num_elements * tensor.trainable)
        sizes[part, tensor.trainable, tensor.dtype or workload.param_dtype, on_device] += tensor.num_elements
    return tuple(
        FlatBuffer(
            numel=numel,
            param_dtype=dtype,
            master_dtype=workload.master_dtype if trainable else None,
            grad_dtype=workload.grad_dtype,
            reduce_dtype=workload.reduce_dtype or dtype,
            part=part,
            on_device=on_device,
        )
        for (part, trainable, dtype, on_device), numel in sizes.items()
    )


def _part_around(parameter: str, parts: Iterable[str]) -> str:
    """The part that a parameter with this qualified name is in, judged by names only; "" for none."""
    modules = _modules_around(parameter)
    found = [part for part in parts if any(belongs(part, module, "") for module in modules)]
    if len(found) > 1:
        raise ModelError(
            f"{parameter} belongs to the parts {' and '.join(found)}, but can have only one layout: change their "
            f"patterns so that only one matches"
        )
    return found[0] if found else ""


def _modules_around(parameter: str) -> list[str]:
    """The qualified names of the modules around a parameter, the root's "" first."""
    steps = parameter.split(".")
    return [".".join(steps[:depth]) for depth in range(len(steps))]


def join(units: Sequence[Unit]) -> Unit:
    """Joins neighbours into one unit. Buffers that differ only in length become one."""
    if len(units) == 1:
        return units[0]
    numels: dict[FlatBuffer, int] = {}
    for unit in units:
        for buffer in unit.buffers:
            kind = replace(buffer, numel=0)
            numels[kind] = numels.get(kind, 0) + buffer.numel
    buffers = tuple(replace(kind, numel=numel) for kind, numel in numels.items())
    return Unit(name=joined_name([unit.name for unit in units]), role=units[0].role, buffers=buffers)


def join_units(units: Sequence[Unit], bucket_bytes: int) -> tuple[list[Unit], list[list[int]]]:
    """Joins units. Returns the resulting units, root first, and which of `units` each one stands for."""
    groups = neighbours(units, bucket_bytes)
    return [join([units[index] for index in group]) for group in groups], groups
