"""Training steps of a small Llama: measured with the engine's recorder, and predicted from a probe.

The prediction is the planner's, from the model and the probed cluster. It uses no time of the steps that it predicts.
Recording costs up to a tenth of a step on CPU. So steps are timed without the recorder, which only tells how a step
divides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.errors import InputError, nearest, one_of
from zeromesh.measure.work import DTYPES, SHAPES, Work
from zeromesh.model.spec import ModelSpec
from zeromesh.model.transformer import build
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.trace import Event, Trace

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's batch of a step."""

    model: str = "7M"  # a name of `work.SHAPES`
    dtype: str = "fp32"  # of compute and of both wires; masters and sums are fp32
    sequences: int = 2  # of one micro-batch
    tokens: int = 64
    micro_batches: int = 1  # of a step

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
        return build(SHAPES[self.model], dtype=self.dtype)

    @property
    def work(self) -> Work:
        """The work that a probe measures for this batch."""
        return Work.of(self.spec, dtypes=(self.dtype,), sequences=self.sequences, tokens=self.tokens)


# Measuring, on every rank ---------------------------------------------------------------------------------------------


class Training:
    """The model of a batch, sharded, and its steps on this rank."""

    def __init__(self, ranks: Ranks, batch: Batch, strategy: str) -> None:
        import torch

        import zeromesh as zm
        from zeromesh.measure.llama import make_llama

        self._ranks = ranks
        dtype = {"fp32": None, "bf16": torch.bfloat16}[batch.dtype]
        model = make_llama(batch.model).to(ranks.device)
        self.model = zm.shard(model, ranks.mesh, strategy, param_dtype=dtype)
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
        """Returns the seconds of `count` steps, one after the other, without those of `before`, called before each."""
        seconds = []
        for _ in range(count):
            before()
            start = time.perf_counter()
            self.step()
            self._ranks.settle_stream()
            seconds.append(time.perf_counter() - start)
        return seconds

    def recorded(self, count: int, before: Callable[[], object] = lambda: None) -> tuple[Trace, ...]:
        """Returns traces of `count` steps in steady state. `before` is called before each."""
        import zeromesh as zm

        with zm.record_trace(self.model) as recording:
            for _ in range(count + 1):
                before()
                self.step()
        return recording.steps[1:]


def measure_round(
    training: Training, *, steps: int, recorded: int, mark: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Measures steps of a model that has taken at least one, so that the engine knows the order of its units. Times
    `steps` steps, then records `recorded` further ones. `mark` is called before and after everything, while no step
    runs.

    Returns seconds of each timed step, waits of each recorded one and bytes that a rank sends by axis. These are means
    over the ranks, which wait for each other and so take the same time in the long run. Also model state in bytes, this
    rank's events by recorded step, and the number of steps between the marks.
    """
    import torch.distributed as dist

    import zeromesh as zm
    from zeromesh.engine.api import engine_of

    engine_of(training.model).at_rest(follow=True)  # refreshes of the last step would be counted
    dist.barrier()
    mark()
    with zm.traffic_report(training.model, micro_batches=len(training.data)) as traffic:
        step_s = training.timed(steps + 1)[1:]  # the first one waits for no refresh, since none is under way
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
        "steps": steps + 1 + (recorded + 1 if recorded else 0),
    }


def _means(values: Iterable[float]) -> list[float]:
    import torch
    import torch.distributed as dist

    found = torch.tensor([*values], dtype=torch.float64)
    dist.all_reduce(found)
    means: list[float] = (found / dist.get_world_size()).tolist()
    return means


def to_json(trace: Trace) -> dict[str, Any]:
    """Converts a trace for a result file; `from_json` is its inverse."""
    return {"label": trace.label, "events": [asdict(event) for event in trace.events]}


def from_json(data: Mapping[str, Any]) -> Trace:
    return Trace(label=data["label"], events=tuple(Event(**event) for event in data["events"]))


# Predicting -----------------------------------------------------------------------------------------------------------


def planned(strategy: str, cluster: Cluster, batch: Batch, *, record: bool = False) -> Simulation:
    """Simulates the step that `measure_round` measures, as the planner predicts it on the probed cluster."""
    workload = FixedWorkload(
        seq_len=batch.tokens,
        global_batch_tokens=batch.sequences * batch.tokens * batch.micro_batches * cluster.world,
        micro_batch=batch.sequences,
        param_dtype=batch.dtype,
    )
    return simulate(batch.spec, cluster, strategy, workload, record=record)


def median_step(traces: Sequence[Trace]) -> Trace:
    """Returns the trace whose step is the (lower) median."""
    return sorted(traces, key=lambda trace: trace.step_s)[(len(traces) - 1) // 2]
