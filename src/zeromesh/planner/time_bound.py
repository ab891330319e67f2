"""Lower bounds on step time, vectorised over layouts.

Each axis has a lane for gathers and one for reductions, and a lane is serial: [Note: Lanes] of
`zeromesh.schedule.lanes`. All symbols but M, w and s are seconds:

    M      micro-batches of a step                    C          all compute
    U, R   gathers and reductions of a micro-batch    F, B       refresh and boundary of a step
    B_l    use of the links of level l                E_g, E_r   first gathers, last reductions

U, R, F and B are those of the lane that takes longest. If parameters or gradients are sharded, blocks share slots
(`PREFETCH`, `reduce_slots`): a block's gather begins when the gather of the block before has ended, and so with
reductions. Then U and R are at least the sums of the blocks' chains. The first computation waits for the gathers E_g,
and the reductions E_r are of the unit whose gradient comes last: nothing can hide these two. So communication is under
way for at least

    A = max(M * U + E_r, F + E_r, M * R + E_g, B + E_g, max over levels of B_l)

seconds. Copies to the host and copies from it are such bounds too.

While a collective runs, computation loses a share of each second (`zeromesh.cost.contention`), and all of it while a
kernel adds reduced gradients to the accumulated ones. For a share w of its seconds, at least, each unit waits for
memory; then it also loses the bandwidth that the collective takes. L is the loss over all collectives, without those
that run while computation waits, and without the adding kernels of E_r. While computation waits for E_g nothing is
reduced yet, and while it waits for E_r nothing is gathered any more, so at most one lane of each axis is at work. With
s the share that these lanes take,

    step >= max(A, C + L + E * (1 - s)),    E = E_g + E_r

There is an order, too. The first forward ends after every unit is refreshed and gathered, or stepped on in the host's
memory (h). No reduction starts before the first backward does, and no boundary before the last one does. f and b are
the seconds of a micro-batch's forward and backward, G_f and G_b of the gathers in each. g is of gathers that may be
done before a later forward begins (`PREFETCH` + 1 blocks, and units with a slot of their own):

    step >= max(f, F, G_f, h) + max(M * R, (M - 1) * (f' + b') + max(b', R, B)) + optimizer
    f' = max(f, G_f - g),    b' = max(b, G_b)

A backward's gathers and reductions slow it down by L_b. Of that, L' is by reductions that may end after it
(`reduce_slots` blocks, and units with a slot of their own). So the second maximum is also at least

    (M - 1) * f' + M * (b + L_b) - (M - 1) * L' + E_r * (1 - s)

In a pipeline, a rank's idle seconds are added. If an engine has one queue for several kinds of transfers, these follow
each other: U, F, R, B and E are then sums over a layout's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto

import numpy as np
import numpy.typing as npt

from zeromesh.schedule.transfer import Operation
from zeromesh.simulator.computation import MicroBatchSeconds
from zeromesh.strategy import Stage

Floats = npt.NDArray[np.float64]


class Row(IntEnum):
    """Rows of a table, in seconds but for the last."""

    GATHER_MICRO = 0  # of a lane, per micro-batch and per step
    GATHER_STEP = auto()
    REDUCE_MICRO = auto()
    REDUCE_STEP = auto()
    FORWARD = auto()  # all gathers of a forward
    REDUCE_LATE = auto()  # reductions that may end after their backward
    UNSHARD_EDGE = auto()  # of the root, and of the unit that runs first if that is a single one
    REFRESH_EDGE = auto()
    REDUCE_EDGE = auto()
    BOUNDARY_EDGE = auto()
    UNSHARD_FIRST = auto()  # of the chains of one of these two
    REFRESH_ROOT = auto()
    REDUCE_FIRST = auto()
    BOUNDARY_ROOT = auto()
    GATHER_BLOCKS = auto()  # of the chains of blocks: per micro-batch, of a forward, of those that may come before it
    REDUCE_BLOCKS = auto()
    FORWARD_BLOCKS = auto()
    AHEAD = auto()
    BUSY_MICRO = auto()  # of the level's links, per micro-batch and per step
    BUSY_STEP = auto()
    MEMORY_MICRO = auto()  # of the device's memory, per micro-batch and per step
    MEMORY_STEP = auto()
    # The largest share of a collective during which a kernel adds to the accumulated gradient, if a micro-batch's last
    # reduction is over that axis.
    ADDING = auto()


LOST_ROWS = Row.UNSHARD_EDGE
"""The number of first rows whose collectives slow computation down."""

APART_ROWS = Row.UNSHARD_FIRST
"""The number of first rows that are of lanes: the longest part of a layout counts, if each part has its own lanes."""

LANE_ROWS = Row.BUSY_MICRO
"""The number of first rows that are of lanes or of chains, whose parts follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """Seconds of the layouts of a block, along each array's last axis."""

    lanes: Floats  # the first `LANE_ROWS` rows
    busy: Floats  # use of each level's links, per micro-batch and per step
    lost: Floats  # loss of computation beside each of the first `LOST_ROWS` rows, without loss of bandwidth
    moved: Floats  # use of the device's memory, per micro-batch and per step
    moving: float  # the largest share of its bandwidth that collectives on all levels take
    edge: Floats  # s, without loss of bandwidth
    copied: Floats  # copies down and copies up, per micro-batch and per step; empty without the host
    stepped: Floats  # h

    def first(self, count: int) -> TimeBound:
        return replace(
            self,
            lanes=self.lanes[:, :count],
            busy=self.busy[:, :, :count],
            lost=self.lost[:, :count],
            moved=self.moved[:, :count],
            edge=self.edge[:count],
            copied=self.copied[:, :, :count],
            stepped=self.stepped[:count],
        )

    def at(self, micro_batches: int, compute: ComputeSeconds, optimizer_s: Floats) -> Floats:
        """The bound for a number of micro-batches and the seconds of one's compute."""
        lanes = self.lanes
        # The root is the first to be gathered and the last to be reduced. In a lane one of the two edge units waits for
        # the other, and one kind of transfers waits for the chain of the other kind.
        edge_gather = np.maximum(
            lanes[Row.REFRESH_ROOT] + lanes[Row.UNSHARD_EDGE], lanes[Row.REFRESH_EDGE] + lanes[Row.UNSHARD_FIRST]
        )
        edge_reduce = np.maximum(
            lanes[Row.REDUCE_FIRST] + lanes[Row.BOUNDARY_EDGE], lanes[Row.REDUCE_EDGE] + lanes[Row.BOUNDARY_ROOT]
        )
        micro_gather, micro_reduce, gathers = (
            np.maximum(lanes[lane], lanes[chains])
            for lane, chains in (
                (Row.GATHER_MICRO, Row.GATHER_BLOCKS),
                (Row.REDUCE_MICRO, Row.REDUCE_BLOCKS),
                (Row.FORWARD, Row.FORWARD_BLOCKS),
            )
        )
        gather, refresh = micro_batches * micro_gather, lanes[Row.GATHER_STEP]
        reduce, boundary = micro_batches * micro_reduce, lanes[Row.REDUCE_STEP]
        active = np.maximum(np.maximum(gather, refresh) + edge_reduce, np.maximum(reduce, boundary) + edge_gather)
        for micro, step in (*self.busy, *self.copied):
            active = np.maximum(active, micro_batches * micro + step)
        compute_s = micro_batches * compute.total + compute.idle + optimizer_s
        # While the device waits or is idle anyway nothing slows it down, and the edges may be hidden.
        waits, later, lost = micro_batches * compute.waiting + compute.idle, micro_batches - 1, self.lost
        micro, step = lost[:2] + lost[2:4] + compute.moving * self.moved
        edge = self.edge + compute.moving * self.moving
        slowed = np.maximum(0.0, micro_batches * micro + step + (edge_gather + edge_reduce) * (1 - edge) - waits)
        within = lost[Row.GATHER_MICRO] - lost[Row.FORWARD] + lost[Row.REDUCE_MICRO]
        within = micro_batches * within - later * lost[Row.REDUCE_LATE] + lost[Row.REDUCE_STEP]
        within = np.maximum(0.0, within + edge_reduce * (1 - edge) - waits)
        forward = np.maximum(compute.forward, lanes[Row.FORWARD_BLOCKS] - lanes[Row.AHEAD])
        backward = np.maximum(compute.backward, lanes[Row.GATHER_BLOCKS] - lanes[Row.FORWARD_BLOCKS])
        last = np.maximum.reduce([backward, micro_reduce, boundary]) + later * (forward + backward)
        last = np.maximum(last, later * forward + micro_batches * compute.backward + within) + compute.idle
        first = np.maximum.reduce([np.full_like(refresh, compute.forward), refresh, gathers, self.stepped])
        in_order = first + np.maximum(reduce, last) + optimizer_s
        return np.asarray(np.maximum(np.maximum(active, in_order), compute_s + slowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """Seconds of one micro-batch. `waiting`: in both passes, for collectives inside of units. `idle`: of a step, in a
    pipeline. `moving` is w."""

    forward: float
    backward: float
    waiting: float = 0.0
    idle: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Results shared by the bounds of one workload on one cluster, for one set of constants. `seconds` has those of all
    kinds of ranks, by degrees, micro-batch and recomputation; `tables` are by the divided cluster and by transfers."""

    seconds: dict[tuple[object, ...], list[MicroBatchSeconds]] = field(default_factory=dict)
    tables: dict[tuple[object, ...], dict[int, list[float]]] = field(default_factory=dict)


def operations(stage: Stage) -> Iterator[tuple[Operation, bool]]:
    """The operations that an axis of `stage` sends, and whether every micro-batch: the README's table of stages."""
    if stage.shards_params:
        yield "all_gather", True
    if stage.shards_states and not stage.shards_params:
        yield "all_gather", False
    if stage.shards_states:
        yield "reduce_scatter", stage.shards_grads
    else:
        yield "all_reduce", False
