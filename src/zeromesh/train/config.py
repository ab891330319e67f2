"""The configuration of a run: one TOML file, overridden by path from the command line.

Each class is one table of the file; docs/training.md explains each key. Unknown keys are errors. Everything is
validated once, and frozen then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.errors import MeshError
from zeromesh.integrations.elastic import mesh_text, resize_mesh
from zeromesh.planner.foreign import is_file, read_file
from zeromesh.settings import read_settings
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import layouts_of
from zeromesh.strategy.plan import Plan

AUTO = "auto"

_MOST = 2**31  # tensors and the host's libraries number with 32 bits
Count = Annotated[int, Field(gt=0, lt=_MOST)]
CountOrNone = Annotated[int, Field(ge=0, lt=_MOST)]
DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A table of the file. It goes to local processes as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


class RunConfig(Section):
    directory: Path
    steps: Count
    page: bool = True
    export: Path | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = Field(default="auto", pattern=r"^[a-z]+$")
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    timeout_s: float = Field(default=600.0, gt=0, le=365 * 24 * 3600.0)


class ModelConfig(Section):
    config: Path | dict[str, Any] | None = None
    pretrained: Path | None = None
    trainable: str | tuple[str, ...] = "all"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"

    @field_validator("trainable")
    @classmethod
    def _known(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError('no pattern would leave nothing to train: "all", "lora:RANK", or a list of patterns')
        if isinstance(value, str) and value != "all" and not re.fullmatch(r"lora:[1-9]\d{0,5}", value):
            raise ValueError('must be "all", "lora:RANK", as in "lora:16", or a list of patterns of parameter names')
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError(
                "give either model.config, to start from random values, or model.pretrained, to start from its values"
            )
        return self


class DataConfig(Section):
    files: tuple[str, ...] = Field(min_length=1)
    exclude: tuple[str, ...] = ()
    seq_len: Count
    tokenizer: str = Field(default="", pattern=r"^(|bytes|bpe:\d+|.+\.json|.*/.*)$")
    holdout: float = Field(default=0.05, ge=0, lt=1)
    validation: tuple[str, ...] = ()

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.validation) or self.holdout > 0


class BatchConfig(Section):
    global_sequences: Count
    micro: Count


class OptimizerConfig(Section):
    lr: float = Field(gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: CountOrNone = 0
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    clip_norm: float = Field(default=1.0, ge=0, allow_inf_nan=True)


class EvalConfig(Section):
    every: CountOrNone = 0
    sequences: Count = 64


class SamplesConfig(Section):
    every: CountOrNone = 0
    prompts: tuple[str, ...] = ()
    tokens: Count = 64


class CheckpointConfig(Section):
    every: CountOrNone = 0
    keep: Count = 2
    keep_every: CountOrNone = 0
    resume: str = AUTO


class FaultsConfig(Section):
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    nonfinite_in_a_row: Count = 3
    nonfinite_in_all: Count = 20
    digest_every: CountOrNone = 100
    restarts: CountOrNone = 0
    resize: bool = False


class DtypeConfig(Section):
    param: DtypeName = "fp32"
    reduce: DtypeName | None = None
    grad: DtypeName = "fp32"
    master: DtypeName = "fp32"

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.grad != self.master:
            raise ValueError("AdamW takes gradients in its masters' dtype: set dtypes.grad and dtypes.master alike")
        return self

    def options(self) -> dict[str, Any]:
        """By the names of `zm.shard`'s options."""
        return {f"{name}_dtype": dtype for name, dtype in self}


class TrainConfig(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    strategy: str
    mesh: dict[str, Count] = Field(min_length=1)
    eval: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    cluster: str | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    dtypes: DtypeConfig = DtypeConfig()

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, tables: Any) -> Any:
        """Reads a strategy that is a file. Another library's file also gives keys that the run's file leaves out."""
        if not (isinstance(tables, dict) and is_file(str(tables.get("strategy")))):
            return tables
        found = read_file(Path(tables["strategy"]))
        if isinstance(found, Plan):
            return tables | {"strategy": str(found.strategy)}
        mesh = tuple(tables["mesh"].items())[::-1] if isinstance(tables.get("mesh"), dict) else ()
        made: dict[str, Any] = {"mesh": dict(reversed(found.mesh))} if found.mesh else {}
        for key, value in found.keys.items():
            table, _, name = key.rpartition(".")
            if not table.startswith("-") and table:
                made.setdefault(table, {})[name] = value
        own = {name: value | tables[name] for name, value in made.items() if isinstance(tables.get(name), dict)}
        own |= {"mesh": tables["mesh"]} if mesh else {}
        return made | tables | own | {"strategy": found.strategy(mesh)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = self.faults
        if self.eval.every and not self.data.holds_out:
            held_out = "set data.holdout to a fraction above 0, or name files in data.validation"
            raise ValueError(f"eval.every needs something to evaluate on: {held_out}")
        if self.samples.every and not self.samples.prompts:
            raise ValueError("samples.every needs samples.prompts, the texts to continue")
        if self.strategy == AUTO and self.cluster is None:
            raise ValueError('strategy = "auto" needs a cluster to plan for: cluster = "FILE.toml", or a preset')
        if not self.checkpoint.every and (faults.nonfinite == "rollback" or faults.restarts):
            key = "restarts" if faults.restarts else "nonfinite"
            needs = "needs checkpoints to go back to: set checkpoint.every"
            raise ValueError(f"faults.{key} = {getattr(faults, key)!r} {needs}")
        return self

    @property
    def tokenizer(self) -> str:
        return self.data.tokenizer or str(self.model.pretrained or "bytes")

    @property
    def world(self) -> int:
        return prod(self.mesh.values())

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank; some may be empty."""
        return -(-self.batch.global_sequences // (self.world * self.batch.micro))

    def on_world(self, world: int, *, asker: str = "the launcher started {world} processes") -> Self:
        """The configuration for `world` ranks, which `asker` has asked for. Raises MeshError if the mesh has another
        number and `faults.resize` is off, or the strategy fits no such mesh."""
        if self.world == world:
            return self
        if not self.faults.resize:
            raise MeshError(
                f"mesh {mesh_text(self.mesh)} has {self.world} ranks, but {asker.format(world=world)}; start as many,"
                f" change the mesh (--set mesh.{next(iter(self.mesh))}=...), or let it be re-sized (faults.resize=true)"
            )
        resized = resize_mesh(self.mesh, world, None if self.strategy == AUTO else self.strategy)
        return self.model_copy(update={"mesh": resized})

    def hardware(self) -> Cluster:
        """The cluster that "auto" plans for, and that a rehearsal is timed on, in the mesh's sizes. Raises ClusterError
        if there is none of that name, or its levels are not the mesh's axes."""
        assert self.cluster is not None
        return find_cluster(self.cluster).sized(self.mesh)

    def layouts(self) -> dict[str, Layout]:
        """The strategy resolved on the mesh, under "", and those of parts. Raises NotationError or MeshError if it does
        not parse, or does not fit the mesh."""
        return layouts_of(Strategy.parse(self.strategy, list(self.mesh)[::-1]), tuple(reversed(self.mesh.items())), {})


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a TOML file, with `key.path=value` overrides applied; its paths are absolute. Raises
    ConfigError or InputError as `read_settings`, or if a plan was made for other choices than the file's;
    NotationError, MeshError or ClusterError if strategy or cluster cannot be read, or do not fit the mesh."""
    config, tables = read_settings(path, overrides, TrainConfig, is_path=_is_path)
    if is_file(tables["strategy"]) and isinstance(plan := read_file(Path(tables["strategy"])), Plan):
        _require_as_planned(config, plan, tables["strategy"])
    if config.strategy == AUTO:
        config.hardware()
    else:
        for layout in config.layouts().values():
            layout.require_runnable()
    return config


_PATHS = {"run.directory", "run.export", "data.files", "data.validation", "model.config", "model.pretrained"}


def _is_path(key: str, value: str) -> bool:
    return (
        key in _PATHS
        or (key == "strategy" and is_file(value))
        or (key == "data.tokenizer" and ("/" in value or value.endswith(".json")))
        or (key == "cluster" and ("/" in value or value.endswith(".toml")))
        or (key == "checkpoint.resume" and value != AUTO and "://" not in value)
    )


def _require_as_planned(config: TrainConfig, plan: Plan, where: str) -> None:
    own = config.dtypes
    choices: dict[str, tuple[object, object]] = {
        "mesh": (mesh_text(dict(reversed(plan.mesh))), mesh_text(config.mesh)),
        "batch.micro": (plan.micro_batch, config.batch.micro),
        "micro-batches of a step, from batch.global_sequences": (plan.micro_batches, config.micro_batches),
        "data.seq_len": (plan.seq_len, config.data.seq_len),
        "model.activation_checkpointing": (plan.recompute, config.model.activation_checkpointing),
        "dtypes.param": (plan.param_dtype, own.param),
        "dtypes.reduce": (plan.reduce_dtype or plan.param_dtype, own.reduce or own.param),
        "dtypes.grad": (plan.grad_dtype, own.grad),
        "dtypes.master": (plan.master_dtype, own.master),
    }
    plan.require(choices, where=where)
