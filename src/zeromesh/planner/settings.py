"""Choices besides the layout: micro-batches, recomputation, and degrees of parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeromesh.errors import InputError
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import Parallel
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.evaluate import Candidate, Evaluator
from zeromesh.planner.time_bound import ComputeSeconds
from zeromesh.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A micro-batch and a recomputation, with the time and memory that they take under any layout."""

    bounds: Bounds
    parallel: Parallel
    micro_batch: int
    micro_batches: int
    recomputation: Recomputation
    activation_bytes: float
    extra_bytes: float  # activations and overhead

    @cached_property
    def compute(self) -> ComputeSeconds:
        return self.bounds.micro_batch_s(self.micro_batch, self.recomputation)

    def candidate(self, strategy: Strategy, bound_s: float) -> Candidate:
        return Candidate(
            strategy=strategy,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            recomputation=self.recomputation,
            parallel=self.parallel,
            bound_s=bound_s,
        )

    @property
    def least_s(self) -> float:
        """Least seconds of a step, under any layout."""
        return self.micro_batches * self.compute.total + self.compute.idle


def settings_of(bounds: Bounds, of_memory: Bounds, parallel: Parallel) -> Iterator[Setting]:
    """The settings of a workload, with a model divided by `parallel`; the bounds are those of `Evaluator.bounds`."""
    workload = bounds.workload
    for recomputation in workload.recomputations():
        for micro_batch, micro_batches in workload.splits(bounds.cluster.world, parallel):
            activations = of_memory.activation_bytes(micro_batch, recomputation)
            overhead = bounds.constants.overhead_bytes(
                messages=bounds.cluster.messages,
                communicators=bounds.mechanics.communicators * sum(size > 1 for _, size in bounds.cluster.axes),
                dynamic_bytes=activations,
            )
            yield Setting(
                bounds=bounds,
                parallel=parallel,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recomputation=recomputation,
                activation_bytes=activations,
                extra_bytes=activations + overhead,
            )


def _least_s(fitted: Sequence[Setting]) -> float:
    """Seconds that no setting's step is shorter than, computed from few of them: a larger micro-batch takes less time
    per token, but leaves a pipeline idle for longer, and recomputation only adds time."""
    least, largest = float("inf"), 0
    for recomputation in sorted({one.recomputation for one in fitted}, key=list(Recomputation).index):
        sizes = [one for one in fitted if one.recomputation is recomputation]
        small, large = (pick(sizes, key=lambda one: one.micro_batch) for pick in (min, max))
        if large.micro_batch > largest:  # otherwise a setting that recomputes less is at least as fast
            largest = large.micro_batch
            least = min(least, large.micro_batches * large.compute.total + small.compute.idle)
    return least


def screened(evaluator: Evaluator, *, hosted: bool = False) -> list[tuple[Parallel, float]]:
    """Degrees to search, each with seconds that none of its steps is shorter than, shortest first.

    If all degrees are given, these. Otherwise those that divide the model, and that may fit if all state is sharded
    over all ranks (or, if `hosted`, lies in the host's memory). If none may fit, the degrees that need least memory,
    for the message. Raises InputError if no choice divides the model.
    """
    choices = list(evaluator.workload.parallels(evaluator.cluster.world))
    if len(choices) == 1:
        evaluator.division(choices[0])
        return [(choices[0], 0.0)]
    fitting: list[tuple[Parallel, float]] = []
    least: tuple[float, Parallel] | None = None
    refused: InputError | None = None
    for parallel in choices:
        try:
            bounds, of_memory = evaluator.bounds(parallel=parallel)
            settings = list(settings_of(bounds, of_memory, parallel))
        except InputError as error:
            refused = refused or error  # the error of the smallest degrees, which names the given ones
            continue
        state = 0.0 if hosted else of_memory.least_bytes
        sizes = [state + setting.extra_bytes for setting in settings]
        if least is None or min(sizes) < least[0]:
            least = min(sizes), parallel
        fitted = [one for one, size in zip(settings, sizes, strict=True) if size <= evaluator.limit_bytes]
        if fitted:
            fitting.append((parallel, _least_s(fitted)))
    if least is None:
        assert refused is not None  # there is a choice, and it was refused
        raise refused
    return sorted(fitting, key=lambda pair: pair[1]) or [(least[1], 0.0)]
