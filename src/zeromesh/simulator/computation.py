"""The computation of a unit, with the collectives that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from zeromesh.cost.collective import CollectiveCost, Operation, one_after_another
from zeromesh.cost.compute import ComputeModel, UnitSeconds
from zeromesh.cost.transfer import TransferModel
from zeromesh.model.spec import CollectiveSpec, UnitSpec
from zeromesh.parallel import Parallel
from zeromesh.schedule.buffer_layout import BufferLayout
from zeromesh.schedule.step import Phase
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.simulator.division import Division, Part
from zeromesh.simulator.network import Work
from zeromesh.simulator.workload import FixedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The computation of one unit in one micro-batch."""

    seconds: UnitSeconds
    within: dict[Phase, tuple[Work, ...]]  # collectives of tp, cp, ep and pp, one after another

    @classmethod
    def of(
        cls, spec: UnitSpec, division: Division, compute: ComputeModel, transfers: TransferModel, work: FixedWorkload
    ) -> Computation:
        seconds = compute.unit(
            spec, tokens=work.micro_batch_tokens, seq_len=work.seq_len, recomputation=work.recomputation
        )
        phases: dict[Phase, Sequence[CollectiveSpec]] = {
            "forward": [one for one in spec.collectives if not one.backward],
            "recompute": spec.recomputed_collectives(work.recomputation),
            "backward": [one for one in spec.collectives if one.backward and spec.returned],
        }
        within = {phase: tuple(_works(found, division, transfers, work)) for phase, found in phases.items()}
        return cls(seconds=seconds, within=within)

    def compute_s(self, phase: Phase) -> float:
        """Seconds of the device's own computation."""
        seconds: float = getattr(self.seconds, phase)
        return seconds

    def collecting(self, seconds: float) -> Computation:
        """Returns a copy whose backward ends with `seconds` for collecting gradients."""
        return replace(self, seconds=self.seconds.collecting(seconds))

    def waiting_s(self, phase: Phase) -> float:
        """Seconds that the computation waits if nothing else uses the links."""
        return sum(work.cost.seconds for work in self.within[phase])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSeconds:
    """Seconds of one micro-batch on one rank, including the waits inside units."""

    forward: float
    backward: float  # including recomputation
    waiting: float  # part of forward and backward
    weights: float  # part of the backward that only gradients of weights need

    @classmethod
    def of(cls, units: Iterable[tuple[int, Computation]]) -> MicroBatchSeconds:
        """Adds up units, each with its number."""
        every = list(units)

        def summed(value: Callable[[Computation], float]) -> float:
            return sum(count * value(one) for count, one in every)

        forward = summed(lambda one: one.waiting_s("forward"))
        backward = summed(lambda one: one.waiting_s("recompute") + one.waiting_s("backward"))
        return cls(
            forward=forward + summed(lambda one: one.seconds.forward),
            backward=backward + summed(lambda one: one.seconds.recompute + one.seconds.backward),
            waiting=forward + backward,
            weights=summed(lambda one: one.seconds.weights),
        )

    @property
    def total(self) -> float:
        return self.forward + self.backward


def collecting_seconds(buffers: Iterable[BufferLayout], compute: ComputeModel, *, alone: bool) -> tuple[float, float]:
    """Seconds for copying a unit's gradients from autograd to where they are reduced: in the first micro-batch, and in
    later ones, which add them to the accumulator unless it waits in a slot. The first is never longer. `alone`: there
    are no later micro-batches, see [Note: Alone] of `zeromesh.schedule.buffer_layout`.
    """
    first = later = 0.0
    for placed in buffers:
        buffer = placed.buffer
        if not buffer.trainable:
            continue
        made, held = ITEM_BYTES[buffer.param_dtype], ITEM_BYTES[placed.collected_dtype(alone=alone)]
        copied = compute.gradients(buffer.numel * (made + held))
        first += copied
        added = compute.gradients(buffer.numel * (made + 2 * held), added=True)
        later += copied if placed.waits else max(copied, added)
    return first, later


def idle_seconds(division: Division, ranks: Sequence[MicroBatchSeconds]) -> list[float]:
    """Idle seconds of a step while other pipeline ranks compute, by kind of pipeline rank."""
    counts = [part.count for part in division.parts]
    total = sum(count * one.total for count, one in zip(counts, ranks, strict=True))
    weights = sum(count * one.weights for count, one in zip(counts, ranks, strict=True))
    return [division.parallel.bubble_s(total - one.total, weights - one.weights) for one in ranks]


def held_bytes(part: Part, parallel: Parallel, work: FixedWorkload, micro_batches: int) -> float:
    """Activations of the micro-batches that a pipeline rank has in flight, without the one that it computes."""
    others = parallel.in_flight(part.rank, micro_batches) - 1
    one = part.model.saved_activation_bytes(work.seq_len, work.recomputation)
    return max(0.0, others) * work.micro_batch_tokens * one


def _works(
    collectives: Sequence[CollectiveSpec], division: Division, transfers: TransferModel, workload: FixedWorkload
) -> Iterator[Work]:
    """Yields one work for each axis. Between an axis's collectives lies computation alone, in any order."""
    by_axis: dict[str, list[CollectiveCost]] = {}
    for one in collectives:
        numel = round(one.elements * workload.micro_batch_tokens)
        cost = transfers.joint(division.axes(one.axis), cast("Operation", one.operation), numel, workload.param_dtype)
        by_axis.setdefault(one.axis, []).extend([cost] * one.times)
    for axis, costs in by_axis.items():
        whole = one_after_another(*costs)
        yield Work("collectives", (axis,), whole, (whole.sent_bytes,))
