"""Training steps of a small Llama: measured by the engine's recorder, and predicted from a probe.

What the prediction is fed: the schedule that the engine has made, the probed cluster, and seconds of each unit, which
every rank measures by training the same model for itself at the same time as all others (no link is used, all cores are
shared as in training). Never a time that the predicted steps have taken.

Recording costs a CPU step up to a tenth. So steps are timed without the recorder; it only says how a step divides.

[Note: Slowest] Ranks that share cores do not get equal parts of them, and whoever has ended leaves the rest to the
others. Training waits for the slowest. So all ranks start each timed step together, and units are given the seconds
that add up to the slowest rank's step. The mean rank's, or a unit's median, is a fifth less: four ranks on two cores.
In steps of several micro-batches ranks drift further apart: four to a step cost the slowest a tenth more each than one
does (fp32; bf16 a quarter), as they do in training where nothing is sent between them. The difference of steps of one
and of three hides that, and predicted worse: a median error of 12.5 % where this has 6 % (fp32) and 6 to 10 % (bf16).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zeromesh.cluster import Cluster
from zeromesh.errors import InputError, nearest, one_of
from zeromesh.measure.replay import Compute, Replayed, read_schedule, replay, schedule_json
from zeromesh.measure.shapes import SHAPES
from zeromesh.measure.work import Work
from zeromesh.model import ModelSpec
from zeromesh.model.transformer import build
from zeromesh.schedule import BUCKET_BYTES
from zeromesh.trace import Event, Trace

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks

DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a rank trains on in a step.

    Args:
        model: a name of `shapes.SHAPES`.
        dtype: of compute and of both wires; masters and sums are fp32.
        sequences, tokens: of one micro-batch.
        micro_batches: of a step.
    """

    model: str = "7M"
    dtype: str = "fp32"
    sequences: int = 2
    tokens: int = 64
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise InputError(f"unknown model size {self.model!r}; {nearest(self.model, SHAPES)}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be {one_of(self.dtype, DTYPES)}")
        for name in ("sequences", "tokens", "micro_batches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def spec(self) -> ModelSpec:
        """The model as the planner has it."""
        return build(SHAPES[self.model].transformer, dtype=self.dtype)

    @property
    def work(self) -> Work:
        """What a probe measures of it."""
        return Work.of(self.spec, dtypes=(self.dtype,), sequences=self.sequences, tokens=self.tokens)


# Measuring, on every rank ---------------------------------------------------------------------------------------------


class Training:
    """The model of a batch, sharded, and its steps on this rank.

    Args:
        ranks: all of them.
        batch: what is trained.
        strategy: how it is sharded; None: not at all, each rank for itself.
    """

    def __init__(self, ranks: Ranks, batch: Batch, strategy: str | None) -> None:
        import torch

        import zeromesh as zm
        from zeromesh.measure.llama import make_llama

        self._ranks = ranks
        mesh = ranks.mesh if strategy is not None else alone(ranks)
        dtype = {"fp32": None, "bf16": torch.bfloat16}[batch.dtype]
        model = make_llama(batch.model).to(ranks.device)
        # Alone it is cut as finely as it can be, so that seconds are known of every part that is joined elsewhere.
        bucket_bytes = 0 if strategy is None else BUCKET_BYTES
        self.model = zm.shard(model, mesh, strategy or "node=0", param_dtype=dtype, bucket_bytes=bucket_bytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(ranks.rank)
        shape = (batch.sequences, batch.tokens)
        vocab = SHAPES[batch.model].vocab
        self.data = [
            torch.randint(0, vocab, shape, generator=generator).to(ranks.device) for _ in range(batch.micro_batches)
        ]

    def step(self) -> None:
        import zeromesh as zm
        from zeromesh.measure.llama import loss_of

        for index, ids in enumerate(self.data):
            with zm.accumulate(self.model, last=index == len(self.data) - 1):
                (loss_of(self.model, ids) / len(self.data)).backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, count: int, before: Callable[[], object] = lambda: None) -> list[float]:
        """Seconds of `count` steps, one after the other; `before` is called before each and not counted."""
        seconds = []
        for _ in range(count):
            before()
            start = time.perf_counter()
            self.step()
            self._ranks.settle_stream()
            seconds.append(time.perf_counter() - start)
        return seconds

    def recorded(self, count: int, before: Callable[[], object] = lambda: None) -> tuple[Trace, ...]:
        """Traces of `count` steps in steady state; `before` is called before each."""
        import zeromesh as zm

        with zm.record_trace(self.model) as recording:
            for _ in range(count + 1):
                before()
                self.step()
        return recording.steps[1:]


def alone(ranks: Ranks) -> Any:
    """A mesh of this rank: it trains for itself, on its share of what all have."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    own = torch.tensor([ranks.rank])
    return DeviceMesh(ranks.device.type, own, mesh_dim_names=("node",), _init_backend=False)


def measure_round(
    training: Training, *, steps: int, recorded: int, mark: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Measures steps of a model that has taken at least one, in which the engine has learnt the order of its units.

    Args:
        training: on every rank.
        steps, recorded: how many are timed, and recorded after them.
        mark: called before and after all of them, while no step is under way.

    Returns:
        Seconds of each timed step, waits of each recorded one and bytes that a rank sends by axis (all means over the
        ranks, which wait for each other and so take the same time in the long run), model state in bytes, this rank's
        events by recorded step, the schedule, and how many steps lie between the marks.
    """
    import torch.distributed as dist

    import zeromesh as zm
    from zeromesh.engine.api import engine_of

    engine_of(training.model).at_rest()  # refreshes of the last step before would be counted
    dist.barrier()
    mark()
    with zm.traffic_report(training.model, micro_batches=len(training.data)) as traffic:
        step_s = training.timed(steps + 1)[1:]  # the first waits for no refresh, since none is under way
    traces = training.recorded(recorded) if recorded else ()
    mark()
    lines = traffic.lines(steps + 1)
    memory = zm.memory_report(training.model, training.optimizer)
    return {
        "step_s": _means(step_s),
        "exposed_s": _means(trace.seconds(kind="wait") for trace in traces),
        "sent_bytes": dict(zip([x.axis for x in lines], _means(x.sent_bytes for x in lines), strict=True)),
        "memory_bytes": {line.kind: (line.predicted_bytes, line.allocated_bytes) for line in memory},
        "traces": [to_json(trace) for trace in traces],
        "schedule": schedule_json(engine_of(training.model).schedule),
        "steps": steps + 1 + (recorded + 1 if recorded else 0),
    }


def _means(values: Iterable[float]) -> list[float]:
    """Of each, over the ranks."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([*values], dtype=torch.float64)
    dist.all_reduce(found)
    means: list[float] = (found / dist.get_world_size()).tolist()
    return means


def measure_compute(ranks: Ranks, batch: Batch, *, steps: int) -> dict[str, Any]:
    """Seconds of each unit, each rank training for itself while all others do: [Note: Slowest].

    Returns:
        Seconds of one micro-batch by phase and unit, of the optimizer's step, the elements it covers, and the seconds
        in which all ranks agree on a few words.
    """
    import torch
    import torch.distributed as dist

    from zeromesh.engine.api import engine_of

    training = Training(ranks, batch, None)
    units = [unit.name for unit in engine_of(training.model).schedule.units]
    for _ in range(2):
        training.step()
    slowest = torch.tensor(training.timed(steps, dist.barrier), dtype=torch.float64)
    sums = [_by_unit(trace, batch.micro_batches) for trace in training.recorded(steps, dist.barrier)]
    keys = [(phase, unit) for phase in ("forward", "backward") for unit in units]
    keys += [("optimizer", ""), ("wait", "")]
    found = torch.tensor([[one.get(key, 0.0) for key in keys] for one in sums], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(found)
    shares = found.mean(dim=0)
    times = torch.tensor([1.0 if name in ("optimizer", "wait") else batch.micro_batches for name, _ in keys])
    step_s = statistics.median(slowest.tolist())
    seconds = dict(zip(keys, (shares * step_s / (shares * times).sum()).tolist(), strict=True))
    return {
        "forward": {unit: seconds["forward", unit] for unit in units},
        "backward": {unit: seconds["backward", unit] for unit in units},
        # Casts of updated parameters, which nobody else waits for, are part of what a step costs a rank.
        "optimizer_s": seconds["optimizer", ""] + seconds["wait", ""],
        "elements": sum(p.numel() for p in training.model.parameters()),
        "agreement_s": _agreement_s(ranks, sum(1 for _ in training.model.parameters())),
    }


def _agreement_s(ranks: Ranks, words: int) -> float:
    """Seconds in which all ranks agree on a few words, as the engine does at the end of each last backward."""
    import torch
    import torch.distributed as dist

    seconds = []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(words + 4, dtype=torch.int32, device=ranks.device), dist.ReduceOp.MAX)
        ranks.settle()
        seconds.append(time.perf_counter() - start)
    found = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _by_unit(trace: Trace, micro_batches: int) -> dict[tuple[str, str], float]:
    """Seconds by (phase, unit): of one micro-batch, but for the optimizer and the waits, which are a step's."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for event in trace.events:
        if event.kind == "wait":
            found["wait", ""] += event.seconds
        elif event.kind == "compute":
            share = 1 if event.name == "optimizer" else micro_batches
            found[event.name, event.unit or ""] += event.seconds / share
    return found


def to_json(trace: Trace) -> dict[str, Any]:
    """A trace for a result file; `from_json` is its inverse."""
    return {"label": trace.label, "events": [asdict(event) for event in trace.events]}


def from_json(data: Mapping[str, Any]) -> Trace:
    return Trace(label=data["label"], events=tuple(Event(**event) for event in data["events"]))


# Predicting -----------------------------------------------------------------------------------------------------------


def compute_of(found: Mapping[str, Any]) -> Compute:
    """What `measure_compute` has found, for the simulator."""
    return Compute(
        forward=found["forward"],
        backward=found["backward"],
        optimizer_s=found["optimizer_s"],
        elements=found["elements"],
        agreement_s=found["agreement_s"],
    )


def predict(schedule: Mapping[str, Any], cluster: Cluster, batch: Batch, compute: Mapping[str, Any]) -> Replayed:
    """The step that `measure_round` measures: its schedule on the probed cluster, with what `measure_compute` found."""
    return replay(read_schedule(schedule), cluster, compute_of(compute), micro_batches=batch.micro_batches)


def median_step(traces: Sequence[Trace]) -> Trace:
    """The trace whose step is the (lower) median."""
    return sorted(traces, key=lambda trace: trace.step_s)[(len(traces) - 1) // 2]
