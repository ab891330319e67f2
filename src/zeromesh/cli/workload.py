"""The options that `plan` and `simulate` share, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.errors import InputError, nearest

if TYPE_CHECKING:
    from zeromesh.cluster import Cluster
    from zeromesh.model import ModelSpec
    from zeromesh.planner import Calibration, Workload
    from zeromesh.simulator import Simulation

Model = Annotated[
    str,
    typer.Option(
        help="A preset (llama-7b, ...), a Hugging Face config.json of any architecture, or package.module:function."
    ),
]
ClusterName = Annotated[str, typer.Option("--cluster", help="A preset (see `zeromesh clusters`) or a TOML file.")]
World = Annotated[int, typer.Option(help="Devices to use, inner levels filled first; 0: all of the cluster.")]
SeqLen = Annotated[int, typer.Option(help="Tokens in a sequence.")]
GlobalBatchTokens = Annotated[int, typer.Option(help="Tokens of one step, all devices together.")]
MicroBatch = Annotated[int, typer.Option(help="Sequences per device and micro-batch; 0: the planner's choice.")]
Trainable = Annotated[str, typer.Option(help="all, a fraction of every tensor, or lora:RANK.")]
GradDtype = Annotated[str, typer.Option(help="Of the accumulated gradient: fp32 or bf16.")]
Checkpointing = Annotated[str, typer.Option(help="none, selective, full or auto.")]
Margin = Annotated[float, typer.Option(help="Share of the device's memory to leave free.")]
Engine = Annotated[str, typer.Option(help="Whose mechanics: zeromesh, fsdp, deepspeed or amsp.")]
Optimizer = Annotated[str, typer.Option(help="adamw, or muon for the blocks' matrices and adamw for the rest.")]
Ownership = Annotated[str, typer.Option(help="What adamw steps on: slices, or whole tensors of owners.")]
Tp = Annotated[int, typer.Option("--tp", help="Ranks that share each layer (tensor parallel), the innermost.")]
Cp = Annotated[int, typer.Option("--cp", help="Ranks that share each sequence (context parallel).")]
Pp = Annotated[int, typer.Option("--pp", help="Ranks that share the layers (pipeline), the outermost.")]
Ep = Annotated[int, typer.Option("--ep", help="Ranks that share the experts.")]
PpSchedule = Annotated[str, typer.Option(help="Of the pipeline: gpipe, 1f1b, interleaved or zero-bubble.")]
PpChunks = Annotated[int, typer.Option(help="Stages that one rank of a pipeline holds; 0: 2 if interleaved, else 1.")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel/--no-sequence-parallel", help="With tp: norms and residuals too.")
]
Like = Annotated[
    str,
    typer.Option(
        help="A run of this model on these devices, whose measured step sets the device's rate: a metrics.jsonl, a "
        "Trainer's trainer_state.json, a directory of either, or tokens a second."
    ),
]
LikeStrategy = Annotated[str, typer.Option(help="The layout that --like's run had.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, for train and shard.")]


def load(
    model: str, cluster: str, world: int, seq_len: int, trainable: str, param_dtype: str | None = None
) -> tuple[ModelSpec, Cluster]:
    """The model and the cluster that the options name, the cluster cut to the world."""
    from zeromesh.cluster import find_cluster
    from zeromesh.model import load_model

    found = find_cluster(cluster)
    if world:
        found = found.take(world)
    dtype = param_dtype or found.device.matrix_dtype
    return load_model(model, seq_len=seq_len, trainable=trainable, dtype=dtype), found


def workload(
    cluster: Cluster,
    seq_len: int,
    tokens: int,
    micro_batch: int,
    grad_dtype: str,
    checkpointing: str,
    optimizer: str = "adamw",
    ownership: str = "slices",
    *,
    degrees: Mapping[str, int | None],
    pp_schedule: str = "1f1b",
    pp_chunks: int = 0,
    sequence_parallel: bool = True,
) -> Workload:
    """The workload that the options describe; compute is in the device's own matrix dtype."""
    from zeromesh.model import Recomputation
    from zeromesh.model.parallel import SCHEDULES
    from zeromesh.planner import Workload
    from zeromesh.simulator.workload import OPTIMIZERS, OWNERSHIPS

    check_choice("--grad-dtype", grad_dtype, ("fp32", "bf16"))
    check_choice("--optimizer", optimizer, OPTIMIZERS)
    check_choice("--ownership", ownership, OWNERSHIPS)
    check_choice("--pp-schedule", pp_schedule, SCHEDULES)
    for name, degree in degrees.items():
        if degree is not None and degree < 1:
            raise InputError(f"--{name} must be at least 1, got {degree}")
    if pp_chunks < 0:
        raise InputError(f"--pp-chunks must be at least 1 (0: as the schedule needs), got {pp_chunks}")
    check_choice("--activation-checkpointing", checkpointing, ("none", "selective", "full", "auto"))
    if micro_batch < 0:
        raise InputError(f"--micro-batch must be at least 1 (0: the planner's choice), got {micro_batch}")
    return Workload(
        seq_len=seq_len,
        global_batch_tokens=tokens,
        micro_batch=micro_batch or None,
        recomputation=None if checkpointing == "auto" else Recomputation(checkpointing),
        param_dtype=cluster.device.matrix_dtype,
        grad_dtype=grad_dtype,
        optimizer=optimizer,
        ownership=ownership,
        tp=degrees["tp"],
        cp=degrees["cp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
        pp_schedule=pp_schedule,
        pp_chunks=pp_chunks or (2 if pp_schedule == "interleaved" else 1),
        sequence_parallel=sequence_parallel,
    )


def calibrated(
    run: str,
    spec: ModelSpec,
    hardware: Cluster,
    work: Workload,
    strategy: str,
    *,
    engine: str,
    memory_margin: float,
) -> Calibration:
    """What `--like RUN` says of the cluster's device, whose layout was `strategy`."""
    from zeromesh import planner
    from zeromesh.strategy import Strategy

    parsed = Strategy.parse(strategy, [name for name, _ in hardware.axes])

    def predict(cluster: Cluster) -> Simulation:
        choices = planner.simulate_choices(spec, cluster, work, parsed, engine=engine, memory_margin=memory_margin)
        return choices[0].simulation

    return planner.calibrate(hardware, planner.read_run(run, work.global_batch_tokens), strategy, predict)


def check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raises InputError unless `value` is one of `known`."""
    if value not in known:
        raise InputError(f"{option} must be one of {', '.join(known)}, got {value!r}: {nearest(value, known)}")


def check_top(top: int) -> None:
    """Raises InputError unless there is something to list."""
    if top < 1:
        raise InputError(f"--top must be at least 1, got {top}")


def check_margin(margin: float) -> None:
    """Raises InputError unless some memory is left to use."""
    if not 0.0 <= margin < 1.0:
        raise InputError(f"--memory-margin must lie in [0, 1), got {margin}")


def write(path: Path, text: str) -> None:
    """Writes a file that the user asked for; raises InputError where that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
