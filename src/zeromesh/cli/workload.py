"""The common options of `plan` and `simulate`, each declared once."""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from zeromesh.errors import InputError, one_of
from zeromesh.progress import progress
from zeromesh.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from zeromesh.cluster.cluster import Cluster
    from zeromesh.model.spec import ModelSpec
    from zeromesh.planner.evaluate import Choice
    from zeromesh.planner.like import Calibration
    from zeromesh.planner.workload import Workload
    from zeromesh.simulator.result import Simulation

MODEL = "A preset (llama-7b, ...), a Hugging Face config.json of any architecture, or package.module:function."
LIKE = (
    "Calibrate the device's rate by a measured run of this model on these devices: a metrics.jsonl, a Trainer's "
    "trainer_state.json, a directory with one of them, or tokens per second."
)
_batch, _cluster, _parallel, in_output = (
    functools.partial(typer.Option, rich_help_panel=heading)
    for heading in ("Model and batch", "Cluster", "Parallelism beside data", "Output")
)


def _tokens(text: str) -> int:
    try:
        return parse_count(text)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


_count = functools.partial(_batch, parser=_tokens, metavar="TOKENS")
Json = Annotated[bool, in_output("--json", help="Print JSON.")]
STRATEGY = (
    "a stage per axis, innermost first, as in node=3,cluster=1; a preset such as zero3; or a file: a plan, or a "
    "configuration of DeepSpeed, accelerate, FSDP or torchtitan."
)
EMIT = "Print the layout as a configuration of fsdp2, deepspeed, megatron-lm, megatron-fsdp or torchtitan."


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The options of both commands."""

    model: Annotated[str, _batch(help=MODEL)]
    cluster: Annotated[str, _cluster(help="A preset (see `zeromesh clusters`) or a TOML file.")]
    seq_len: Annotated[int, _count(help="Tokens per sequence.")]
    global_batch_tokens: Annotated[int, _count(help="Tokens per step over all devices: 4194304, 4M or 4Mi.")]
    world: Annotated[int, _cluster(help="Number of devices, filling inner levels first; 0: the whole cluster.")] = 0
    micro_batch: Annotated[int, _batch(help="Sequences per device and micro-batch; 0: the planner chooses.")] = 0
    trainable: Annotated[str, _batch(help="Trained parameters: all, a fraction of every tensor, or lora:RANK.")] = "all"
    kernels: Annotated[str, _batch(help="Fused kernels of the model: eager, compiled, liger or megatron.")] = "eager"
    products: Annotated[
        str, _batch(help="Dtype of the blocks' matrix products: fp8 or mxfp8 (--engine fsdp); empty: the activations'.")
    ] = ""
    grad_dtype: Annotated[str, _batch(help="Dtype of the accumulated gradient: fp32 or bf16.")] = "fp32"
    optimizer: Annotated[
        str, _batch(help="Optimizer: adamw, or muon (for the blocks' matrices, with adamw for the rest).")
    ] = "adamw"
    ownership: Annotated[str, _batch(help="AdamW steps on slices, or on whole tensors (owners).")] = "slices"
    activation_checkpointing: Annotated[
        str, _batch(help="Recomputation of activations: none, selective, full or auto.")
    ] = "auto"
    tp: Annotated[int, _parallel(help="Degree of tensor parallelism (innermost ranks).")] = 1
    cp: Annotated[int, _parallel(help="Degree of context parallelism.")] = 1
    pp: Annotated[int, _parallel(help="Degree of pipeline parallelism (outermost ranks).")] = 1
    ep: Annotated[int, _parallel(help="Degree of expert parallelism.")] = 1
    pp_schedule: Annotated[str, _parallel(help="Pipeline schedule: gpipe, 1f1b, interleaved or zero-bubble.")] = "1f1b"
    pp_chunks: Annotated[int, _parallel(help="Stages per pipeline rank; 0: 2 if interleaved, else 1.")] = 0
    sequence_parallel: Annotated[
        bool,
        _parallel(
            "--sequence-parallel/--no-sequence-parallel",
            help="With --tp, shard norms and residuals along the sequence.",
        ),
    ] = True
    memory_margin: Annotated[float, _cluster(help="Fraction of the device's memory to leave free.")] = 0.08
    host_memory: Annotated[str, _cluster(help="Host memory of one machine, as in 128GB; overrides the cluster's.")] = ""
    engine: Annotated[str, _cluster(help="Engine whose step is predicted: zeromesh, fsdp, deepspeed or amsp.")] = (
        "zeromesh"
    )
    like: Annotated[str, _cluster(help=LIKE)] = ""
    like_strategy: Annotated[str, _cluster(help="Layout of the run in --like; default: this command's layout.")] = ""
    as_json: Json = False
    report: Annotated[Path | None, in_output(help="Write a self-contained HTML page.")] = None
    output: Annotated[
        Path | None, in_output("-o", "--output", help="Write the plan to a file for `zeromesh train` and `zm.shard`.")
    ] = None
    emit: Annotated[str, in_output(help=EMIT)] = ""

    def load(self) -> tuple[ModelSpec, Cluster]:
        """Returns the model and the cluster, with only the ranks in use. Raises InputError for invalid options."""
        from zeromesh.cluster.catalogue import find_cluster
        from zeromesh.model.load import load_model
        from zeromesh.model.shape import CAST_BYTES, KERNELS
        from zeromesh.planner.emit import EMITTERS
        from zeromesh.simulator.mechanics import find_engine

        if not 0.0 <= self.memory_margin < 1.0:
            raise InputError(f"--memory-margin must lie in [0, 1), got {self.memory_margin}")
        if self.emit:
            check_choice("--emit", self.emit, tuple(EMITTERS))
        find_engine(self.engine)
        found = find_cluster(self.cluster)
        if self.world:
            found = found.take(self.world)
        if self.host_memory:
            found = replace(found, host_memory_bytes=parse_bytes(self.host_memory))
        check_choice("--kernels", self.kernels, tuple(KERNELS))
        if self.products:
            check_choice("--products", self.products, tuple(CAST_BYTES))
        kernels = replace(KERNELS[self.kernels], products=self.products)
        dtype = found.device.matrix_dtype
        with progress("reading the model"):
            model = load_model(self.model, seq_len=self.seq_len, trainable=self.trainable, dtype=dtype, kernels=kernels)
        for sentence in model.assumed:
            tell(f"{model.name}: {sentence}", sys.stderr)
        return model, found

    def otherwise(self, spec: ModelSpec, hardware: Cluster, work: Workload, chosen: Choice) -> Iterator[str]:
        """Yields sentences on the same choice with two blocks at once, if axes can share these and that is faster; and
        with compiled kernels, if kernels are eager."""
        from zeromesh.cost.constants import default_constants
        from zeromesh.model.load import with_kernels
        from zeromesh.model.shape import KERNELS
        from zeromesh.planner.evaluate import Evaluator

        evaluator = Evaluator(
            model=spec,
            cluster=hardware,
            workload=work,
            engine=self.engine,
            constants=default_constants(),
            memory_margin=self.memory_margin,
        )
        strategy = chosen.candidate.strategy
        sharded = sum(axis.stage.shards_params or axis.stage.shards_grads for axis in strategy.axes)
        if sharded > 1 and strategy.prefetch == 1 and not evaluator.mechanics.queues:
            candidates = (replace(chosen.candidate, strategy=replace(strategy, prefetch=count)) for count in (1, 2))
            one, two = (evaluator.estimate(candidate) for candidate in candidates)
            if evaluator.fits(two) and two.step_s < 0.99 * one.step_s:
                less, more_gb = 1 - two.step_s / one.step_s, (two.memory_bytes - one.memory_bytes) / 1e9
                yield (
                    f"with two blocks gathered ahead, and two reduced at once (;prefetch=2), the step would take "
                    f"{two.step_s:.4g} s, {less:.1%} less, and {more_gb:.3g} GB more memory"
                )
        if self.kernels == "eager" and not self.products:
            evaluator = replace(evaluator, model=with_kernels(spec, KERNELS["compiled"]))
            step_s = evaluator.estimate(chosen.candidate).step_s
            less = 1 - step_s / chosen.simulation.step_s
            yield f"kernels are eager; compiled blocks (--kernels compiled) would take {step_s:.4g} s, {less:.1%} less"

    @property
    def degrees(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}

    def workload(self, cluster: Cluster, degrees: Mapping[str, int | None]) -> Workload:
        """Returns the workload of one step, in the device's matrix dtype. A degree of None is searched."""
        from zeromesh.model.spec import Recomputation
        from zeromesh.parallel import SCHEDULES
        from zeromesh.planner.workload import Workload
        from zeromesh.simulator.workload import OPTIMIZERS, OWNERSHIPS

        check_choice("--grad-dtype", self.grad_dtype, ("fp32", "bf16"))
        check_choice("--optimizer", self.optimizer, OPTIMIZERS)
        check_choice("--ownership", self.ownership, OWNERSHIPS)
        check_choice("--pp-schedule", self.pp_schedule, SCHEDULES)
        for name, degree in degrees.items():
            if degree is not None and degree < 1:
                raise InputError(f"--{name} must be at least 1, got {degree}")
        if self.pp_chunks < 0:
            raise InputError(f"--pp-chunks must be at least 1 (0: as the schedule needs), got {self.pp_chunks}")
        recomputation = self.activation_checkpointing
        check_choice("--activation-checkpointing", recomputation, ("none", "selective", "full", "auto"))
        if self.micro_batch < 0:
            raise InputError(f"--micro-batch must be at least 1 (0: the planner's choice), got {self.micro_batch}")
        same = ("seq_len", "global_batch_tokens", "grad_dtype", "optimizer", "ownership", "pp_schedule")
        return Workload(
            micro_batch=self.micro_batch or None,
            recomputation=None if recomputation == "auto" else Recomputation(recomputation),
            param_dtype=cluster.device.matrix_dtype,
            pp_chunks=self.pp_chunks or (2 if self.pp_schedule == "interleaved" else 1),
            sequence_parallel=self.sequence_parallel,
            **{name: getattr(self, name) for name in same} | dict(degrees),
        )

    def calibrated(self, spec: ModelSpec, hardware: Cluster, work: Workload, strategy: str) -> Calibration:
        """Returns the calibration by the run of `--like`, which had the layout `strategy`."""
        from zeromesh.planner.like import calibrate, read_run

        def predict(cluster: Cluster) -> Simulation:
            return self.simulated(spec, cluster, work, strategy).simulation

        return calibrate(hardware, read_run(self.like, work.global_batch_tokens), strategy, predict)

    def simulated(self, spec: ModelSpec, hardware: Cluster, work: Workload, strategy: str) -> Choice:
        """Returns the best choice of everything that is left open, for a strategy or a file with one."""
        from zeromesh.planner.fixed import simulate_choices
        from zeromesh.planner.foreign import read_strategy
        from zeromesh.strategy import Strategy

        rest = hardware.cut(inner=self.tp, outer=self.pp)
        parsed = Strategy.parse(read_strategy(strategy, rest.axes), [name for name, _ in hardware.axes])
        options = {"engine": self.engine, "memory_margin": self.memory_margin}
        return simulate_choices(spec, hardware, work, parsed, **options)[0]  # type: ignore[arg-type]  # of two kinds


def described(command: Callable[..., None]) -> Callable[..., None]:
    """Turns a command whose parameter `given` is a `Described` into one with all of its options."""
    shared = get_type_hints(Described, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=shared[field.name],
        )
        for field in fields(Described)
    ]
    rest = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, each in own.items() if name != "given"]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        given = Described(**{name: options.pop(name) for name in shared})
        command(given=given, **options)

    signature = inspect.Signature([*parameters, *rest])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it, and the annotations
    run.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return run


def check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raises InputError unless `value` is one of `known`."""
    if value not in known:
        raise InputError(f"{option} must be {one_of(value, known)}")


def check_top(top: int) -> None:
    """Raises InputError unless there is something to list."""
    if top < 1:
        raise InputError(f"--top must be at least 1, got {top}")


def tell(text: str, stream: TextIO) -> None:
    """Prints lines. If `stream` is a terminal, no word is broken at its edge."""
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
        )
        text = "\n".join("\n".join(wrapped) for wrapped in lines)
    print(text, file=stream)


def write(path: Path, text: str) -> None:
    """Writes a file that the user asked for. Raises InputError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
