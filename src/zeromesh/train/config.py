"""The configuration of a training run: one TOML file, overridden by path from the command line.

Each class is one table of the file. Unknown keys are errors; everything is validated once, and frozen after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from zeromesh.cluster import Cluster, find_cluster
from zeromesh.errors import ConfigError, MeshError
from zeromesh.strategy import Layout, Plan, Strategy, layouts_of
from zeromesh.train.document import nearest_key, read_document
from zeromesh.train.resize import mesh_text, resize_mesh

AUTO = "auto"
ALL = "all"

MOST = 2**31
"""Of any count: what tensors and the host's libraries number with 32 bits."""

MOST_THREADS = 4096
LONGEST_S = 365 * 24 * 3600.0

Count = Annotated[int, Field(gt=0, lt=MOST)]
CountOrNone = Annotated[int, Field(ge=0, lt=MOST)]
DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A table of the file: no unknown keys, no changes after validation. It goes to local processes as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


class RunConfig(Section):
    """Where and how long.

    Args:
        directory: receives metrics.jsonl, the tokenizer and the checkpoints.
        steps: optimizer steps in all.
        trackers: where else metrics go: "tensorboard" and "wandb" (offline), under the directory.
        page: leave a page of curves and memory, run.html, in the directory.
        export: receives the model at the end as transformers' `from_pretrained` loads it, or the adapters alone as
            PEFT's does, with the tokenizer.
        seed: decides the initial weights, which sample is used at which step, and what each rank drops out.
        device: "cpu", the type of an accelerator as torch names it ("cuda"), or "auto", which takes the accelerator of
            this machine where there is one. Each rank must have one of its own.
        threads: of torch for each rank on the host; by default the cores divided by the local ranks.
        timeout_s: how long a collective may take before the run ends with an error.
    """

    directory: Path
    steps: Count
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    page: bool = True
    export: Path | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = Field(default="auto", pattern=r"^[a-z]+$")
    threads: Annotated[int, Field(gt=0, le=MOST_THREADS)] | None = None
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)


class ModelConfig(Section):
    """What to train: `config` to begin with random values, `pretrained` to go on with a model's.

    Args:
        config: a Hugging Face config file, or the same as a table with `model_type`. The size of the vocabulary is
            the tokenizer's where it is left out.
        pretrained: a Hugging Face model's directory, with safetensors files; no code in it is run.
        trainable: "all", "lora:RANK" (PEFT's adapters on every linear layer of the blocks, all else frozen), or
            patterns of names of parameters, the others frozen.
        chat_template: a file in Jinja for records of messages. Default: the tokenizer's own.
        activation_checkpointing: what the backward computes again of the blocks' activations: "none", "full" (all), or
            "selective" (all but the outputs of attention and of every second matrix product).
    """

    config: Path | dict[str, Any] | None = None
    pretrained: Path | None = None
    trainable: str | tuple[str, ...] = ALL
    chat_template: Path | None = None
    activation_checkpointing: Literal["none", "selective", "full"] = "none"

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _by_flag(cls, value: object) -> object:
        """What the key was before there was a third choice."""
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("trainable")
    @classmethod
    def _known(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple):
            if not value:
                raise ValueError('no pattern would leave nothing to train: "all", "lora:RANK", or a list of patterns')
        elif value != ALL and not re.fullmatch(r"lora:[1-9]\d{0,5}", value):
            raise ValueError('must be "all", "lora:RANK", as in "lora:16", or a list of patterns of parameter names')
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError(
                "a model is needed: either model.config, to begin with random values, or model.pretrained, the "
                "directory of one to go on with"
            )
        return self

    @property
    def lora_rank(self) -> int:
        """Of the adapters; 0 for none."""
        named = isinstance(self.trainable, str) and self.trainable.startswith("lora:")
        return int(str(self.trainable).removeprefix("lora:")) if named else 0

    @property
    def recomputes(self) -> bool:
        return self.activation_checkpointing != "none"


class DataConfig(Section):
    """What to learn from.

    Args:
        files: globs; `{stdlib}` stands for the directory of Python's own standard library. Files that end in .jsonl or
            .parquet hold records, as do directories that `datasets` has saved; all others are text.
        exclude: patterns of whole paths to leave out, where `*` matches across directories: "*/site-packages/*".
        seq_len: tokens a sequence.
        tokenizer: "bytes", "bpe:SIZE" (trained on the training files at the start), a tokenizer.json, or a directory
            with a Hugging Face tokenizer. Default: that of model.pretrained, else "bytes".
        holdout: fraction kept for evaluation: of the files, or of the records where all files hold such, chosen by a
            hash of the file's name and of the record's number.
        validation: globs of files to evaluate on instead; nothing else is held out then.
        documents: "joined": one stream of tokens, cut every seq_len. "apart": whole documents side by side in a
            sequence, none of which attends to another; a longer one is cut off. Default: apart where records have
            answers, else joined.
        answers_only: of records with answers (`completion`, an assistant's messages), learn these alone.
    """

    files: tuple[str, ...] = Field(min_length=1)
    exclude: tuple[str, ...] = ()
    seq_len: Count
    tokenizer: str = Field(default="", pattern=r"^(|bytes|bpe:\d+|.+\.json|.*/.*)$")
    holdout: float = Field(default=0.05, ge=0, lt=1)
    validation: tuple[str, ...] = ()
    documents: Literal["joined", "apart"] | None = None
    answers_only: bool = True

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.validation) or self.holdout > 0


class BatchConfig(Section):
    """How much at once.

    Args:
        global_sequences: sequences a step, over all ranks.
        micro: sequences a rank works on at once.
    """

    global_sequences: Count
    micro: Count


class OptimizerConfig(Section):
    """AdamW with a warm-up and a decay of the learning rate, and clipping of the gradient's global norm.

    Args:
        lr: the highest learning rate.
        betas, eps, weight_decay: AdamW's; parameters of fewer than two dimensions are not decayed.
        schedule: "cosine" falls to `final_lr_ratio` times lr at the last step, "constant" stays.
        warmup_steps: steps over which the learning rate rises linearly from 0.
        clip_norm: longest gradient; 0 and inf do not clip.
    """

    lr: float = Field(gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: CountOrNone = 0
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    clip_norm: float = Field(default=1.0, ge=0, allow_inf_nan=True)


class EvalConfig(Section):
    """Loss on held-out text.

    Args:
        every: steps between evaluations, and one after the last step; 0 never evaluates.
        sequences: of the held-out files, the same ones each time.
    """

    every: CountOrNone = 0
    sequences: Count = 64


class SamplesConfig(Section):
    """What the model writes, to watch it learn.

    Args:
        every: steps between samples, and one after the last step; 0 never writes any.
        prompts: texts to go on from; on a model with a chat template, each the user's message.
        tokens: at most so many are written after each.
    """

    every: CountOrNone = 0
    prompts: tuple[str, ...] = ()
    tokens: Count = 64


class CheckpointConfig(Section):
    """When to save, and what to start from.

    Args:
        every: steps between checkpoints; 0 never saves.
        keep: newest checkpoints to keep.
        keep_every: checkpoints of steps that this divides are kept for good; 0 keeps none.
        resume: "auto" takes the newest complete one in the run's directory, "never" starts anew, a path takes that one.
    """

    every: CountOrNone = 0
    keep: Count = 2
    keep_every: CountOrNone = 0
    resume: str = "auto"


class FaultsConfig(Section):
    """What to do when something goes wrong.

    Args:
        nonfinite: what becomes of a step whose loss or gradient norm is NaN or infinite: "stop", "skip" or "rollback",
            as `zeromesh.train.nonfinite` says.
        nonfinite_in_a_row: of these, at most so many without a good step between.
        nonfinite_in_all: at most so many in the whole run.
        digest_every: steps between comparisons of what several ranks hold alike; 0 never compares. With it, each
            checkpoint is compared before it is made.
        restarts: how often local processes are started again after one was killed or failed; torchrun has its own
            (--max-restarts).
        resize: run on as many ranks as the launcher has started, with the mesh re-sized, instead of calling another
            number than the mesh's an error.
    """

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    nonfinite_in_a_row: Count = 3
    nonfinite_in_all: Count = 20
    digest_every: CountOrNone = 100
    restarts: CountOrNone = 0
    resize: bool = False


class DtypeConfig(Section):
    """Dtypes of compute and parameters on the wire, gradients on the wire, their sums, and the optimizer's copy."""

    param: DtypeName = "fp32"
    reduce: DtypeName | None = None
    grad: DtypeName = "fp32"
    master: DtypeName = "fp32"


class TrainConfig(Section):
    """A whole run.

    Args:
        strategy: in zeromesh's notation, the name of a preset, a plan that `zeromesh plan -o` wrote (FILE.json), whose
            other choices the file must repeat, or "auto": the planner chooses at every start.
        mesh: sizes by axis name, outermost axis first, as torch's DeviceMesh has them.
        cluster: what "auto" plans for: a preset, or a file (`zeromesh clusters`); its levels are the mesh's axes, and
            the mesh says their sizes.
    """

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

    @field_validator("strategy")
    @classmethod
    def _of_plan(cls, strategy: str) -> str:
        if not strategy.endswith(".json"):
            return strategy
        return str(Plan.load(strategy).strategy)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval.every and not self.data.holds_out:
            raise ValueError(
                "eval.every needs something to evaluate on: set data.holdout to a fraction above 0, or name files in "
                "data.validation"
            )
        if self.samples.every and not self.samples.prompts:
            raise ValueError("samples.every needs samples.prompts, the texts to go on from")
        if self.strategy == AUTO and self.cluster is None:
            raise ValueError(
                'strategy = "auto" needs a cluster to plan for: cluster = "FILE.toml", or a preset\'s name'
            )
        for key, needs in (("nonfinite", self.faults.nonfinite == "rollback"), ("restarts", self.faults.restarts > 0)):
            if needs and not self.checkpoint.every:
                value = getattr(self.faults, key)
                raise ValueError(f"faults.{key} = {value!r} needs checkpoints to go back to: set checkpoint.every")
        return self

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.mesh.values())

    @property
    def micro_batches(self) -> int:
        """Of a step on each rank; those of some ranks may be empty."""
        return -(-self.batch.global_sequences // (self.world * self.batch.micro))

    def on_world(self, world: int, *, asker: str = "the launcher started {world} processes") -> Self:
        """The configuration for the number of ranks that there are.

        Args:
            world: how many.
            asker: who says so, for the message.

        Raises:
            MeshError: it is not the mesh's, and `faults.resize` is off, or the strategy fits no mesh of that size.
        """
        if self.world == world:
            return self
        if not self.faults.resize:
            raise MeshError(
                f"mesh {mesh_text(self.mesh)} has {self.world} ranks, but {asker.format(world=world)};"
                f" start {self.world}, or change the mesh, as in --set mesh.{next(iter(self.mesh))}=..., or let it be"
                f" re-sized with --set faults.resize=true"
            )
        resized = resize_mesh(self.mesh, world, None if self.strategy == AUTO else self.strategy)
        return self.model_copy(update={"mesh": resized})

    def hardware(self) -> Cluster:
        """The cluster that "auto" plans for, and that a rehearsal is timed on, of the mesh's sizes.

        Raises:
            ClusterError: there is none of that name, or it has other levels than the mesh has axes.
        """
        assert self.cluster is not None
        return find_cluster(self.cluster).sized(self.mesh)

    def chosen(self) -> Strategy:
        """The strategy, with its parts.

        Raises:
            NotationError: it does not parse.
        """
        return Strategy.parse(self.strategy, list(self.mesh)[::-1])

    def layouts(self) -> dict[str, Layout]:
        """The strategy resolved on the mesh, under "", and those of parts.

        Raises:
            NotationError, MeshError: the strategy does not parse, or does not fit the mesh.
        """
        return layouts_of(self.chosen(), tuple(reversed(self.mesh.items())), {})


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a TOML file, with `key.path=value` overrides applied.

    Relative paths in the file are relative to the file's directory, those in overrides to the current one; the result
    has absolute paths.

    Raises:
        ConfigError: unreadable, not TOML, an unknown key (names the nearest valid one), an invalid value, or a plan
            that was made for other choices than the file's.
        NotationError, MeshError: the strategy does not parse or does not fit the mesh.
        ClusterError: "auto", and the cluster cannot be read or does not fit the mesh.
    """
    document = read_document(path, overrides, is_path=_is_path)
    try:
        config = TrainConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from None
    if document["strategy"].endswith(".json"):
        _require_as_planned(config, document["strategy"])
    if config.strategy == AUTO:
        config.hardware()
    else:
        for layout in config.layouts().values():
            layout.require_runnable()
    return config


def _require_as_planned(config: TrainConfig, path: str) -> None:
    """A plan's time and memory hold for its own choices alone: raises ConfigError where the run makes others."""
    plan, dtypes = Plan.load(path), config.dtypes
    if plan.parallel is not None:
        raise ConfigError(
            f"the plan {path} cuts the model by {plan.parallel}, and a run shards over data-parallel ranks alone: plan "
            "without, or shard a model that is cut so yourself (zm.shard)"
        )
    choices: list[tuple[str, object, object]] = [
        ("mesh", mesh_text(dict(reversed(plan.mesh))), mesh_text(config.mesh)),
        ("batch.micro", plan.micro_batch, config.batch.micro),
        ("micro-batches of a step, from batch.global_sequences", plan.micro_batches, config.micro_batches),
        ("data.seq_len", plan.seq_len, config.data.seq_len),
        ("model.activation_checkpointing", plan.recompute, config.model.activation_checkpointing),
        ("dtypes.param", plan.param_dtype, dtypes.param),
        ("dtypes.reduce", plan.reduce_dtype or plan.param_dtype, dtypes.reduce or dtypes.param),
        ("dtypes.grad", plan.grad_dtype, dtypes.grad),
        ("dtypes.master", plan.master_dtype, dtypes.master),
    ]
    others = [f"{key} = {own} (planned: {planned})" for key, planned, own in choices if planned not in (None, own)]
    if others:
        raise ConfigError(
            f"the plan {path} was made for other choices than this run's: {', '.join(others)}. Set them as planned, "
            f"plan anew, or give the strategy itself, {plan.strategy}, to which no prediction is tied"
        )


def valid_keys(section: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of every key that a file may have."""
    for name, field in section.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from valid_keys(nested, f"{prefix}{name}.")
        else:
            yield prefix + name


def _is_path(key: str, value: str) -> bool:
    """Whether a text value of this key names a file or directory."""
    return (
        key in ("run.directory", "run.export", "data.files", "data.validation")
        or key in ("model.config", "model.pretrained", "model.chat_template")
        or (key in ("data.tokenizer", "strategy") and value.endswith(".json"))
        or (key == "data.tokenizer" and "/" in value)
        or (key == "cluster" and (value.endswith(".toml") or "/" in value))
        or (key == "checkpoint.resume" and value not in ("auto", "never") and "://" not in value)
    )


def _explain(path: Path, error: ValidationError) -> str:
    """One message for everything that is wrong, each with its key and what to do."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}; {nearest_key(key, list(valid_keys()))}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing{_purpose(key)}")
        elif not key:
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}; got {item['input']!r}")
    return f"{path}: " + "\n  ".join(dict.fromkeys(lines))


def _purpose(key: str) -> str:
    field: FieldInfo | None = TrainConfig.model_fields.get(key)
    if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        required = [name for name, inner in field.annotation.model_fields.items() if inner.is_required()]
        return f"; add a table [{key}] with at least {', '.join(required)}"
    return "; set it in the file or with --set"
