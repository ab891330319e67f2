"""Lower bounds on step time, vectorised over layouts.

Each axis has a lane for gathers and one for reductions, and a lane is serial: [Note: Lanes] of
`zeromesh.schedule.lanes`. With M micro-batches and C the seconds of all compute, let U and R be what a micro-batch
gathers and reduces, F and B what the step's refresh and its boundary take, each in the lane that takes longest. Where
parameters or gradients are sharded, a block's gather begins when that of the block before has ended, and so does its
reduction, since they share slots (`PREFETCH`, `reduce_slots`): U and R are at least the sums of the blocks' chains. Let
B_l be what keeps the links of level l busy, E_g the gathers that the first computation waits for, E_r the reductions of
the unit whose gradient comes last: nothing can hide these two.
Communication is then under way for at least

    A = max(M * U + E_r, F + E_r, M * R + E_g, B + E_g, max over levels of B_l)

seconds; so are the copies to the host, or those from it.

While a collective runs, computation loses a share of each second (`zeromesh.cost.contention`), and all of it while a
kernel adds what was reduced to the accumulated gradient. Where it waits for memory, for a share w of each unit's
seconds at least, it loses what the collective moves there too. Over all collectives that is L, less what runs while
computation waits, and less those kernels of E_r. It waits for E_g, when nothing is reduced yet, and for E_r, when
nothing is gathered any more, so that one lane of each axis is at work at the most; with s what those take,

    step >= max(A, C + L + E * (1 - s)),    E = E_g + E_r

Nor does the first forward end before every unit is refreshed and gathered, or stepped on in the host's memory in h
seconds, a reduction start before the first backward has, or the boundary before the last one. With f and b the seconds
of one micro-batch's forward and backward, G_f of a forward's gathers, G_b of a backward's, and g of those that may be
there before a later forward begins (`PREFETCH` + 1 blocks, and units with a slot of their own),

    step >= max(f, F, G_f, h) + max(M * R, (M - 1) * (f' + b') + max(b', R, B)) + optimizer
    f' = max(f, G_f - g),    b' = max(b, G_b)

A backward's gathers and its own reductions slow it down, but for L' of those that end after it (`reduce_slots` blocks,
and units with a slot of their own): with L_b of all of them, the second maximum is also at least

    (M - 1) * f' + M * (b + L_b) - (M - 1) * L' + E_r * (1 - s)

In a pipeline a rank's idle seconds come between.

An engine with a queue for several kinds has them one after the other there, so that U, F, R, B and E are sums over a
layout's parts.
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
    """Rows of a table, in seconds: of a lane per micro-batch and per step; of all gathers of a forward; of reductions
    that may end after their backward; of the root together with the unit that runs first, if it is one; of the chains
    of one of the two; of the chains of blocks, per micro-batch, of a forward and of those that may come before it; of
    the level's links and of the device's memory, per micro-batch and per step. The last row is a share instead: the
    most of a collective in which the kernel runs that adds to the accumulated gradient, if a micro-batch's last
    reduction is over that axis."""

    GATHER_MICRO = 0
    GATHER_STEP = auto()
    REDUCE_MICRO = auto()
    REDUCE_STEP = auto()
    FORWARD = auto()
    REDUCE_LATE = auto()
    UNSHARD_EDGE = auto()
    REFRESH_EDGE = auto()
    REDUCE_EDGE = auto()
    BOUNDARY_EDGE = auto()
    UNSHARD_FIRST = auto()
    REFRESH_ROOT = auto()
    REDUCE_FIRST = auto()
    BOUNDARY_ROOT = auto()
    GATHER_BLOCKS = auto()
    REDUCE_BLOCKS = auto()
    FORWARD_BLOCKS = auto()
    AHEAD = auto()
    BUSY_MICRO = auto()
    BUSY_STEP = auto()
    MEMORY_MICRO = auto()
    MEMORY_STEP = auto()
    ADDING = auto()


LOST_ROWS = Row.UNSHARD_EDGE
"""How many rows have collectives that slow computation down."""

APART_ROWS = Row.UNSHARD_FIRST
"""How many rows are of lanes, of which the longest part counts where each has lanes of its own."""

LANE_ROWS = Row.BUSY_MICRO
"""With the rows of chains, whose parts follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """Seconds of the layouts of a block, which are along each array's last axis."""

    lanes: Floats  # rows as named above
    busy: Floats  # by level, of its links, per micro-batch and per step
    lost: Floats  # of computation, beside each of the first rows, without those lost to memory
    moved: Floats  # of memory, per micro-batch and per step
    moving: float  # of memory, the most that collectives on all levels have
    edge: Floats  # s, without seconds lost to memory
    copied: Floats  # if anything lies on the host, of copies down and of those up, per micro-batch and per step
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
        # The root comes first where parameters are gathered, and last where gradients are reduced. In a lane one of the
        # two waits for the other, and one kind of transfers waits for the chain of the other kind.
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
        # While the device waits or is idle anyway, nothing slows it down, and the edges may hide.
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
    """Seconds of one micro-batch. `waiting`: of both passes, for collectives inside of units; `idle`: of a step, in a
    pipeline; `moving`: w."""

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
    """State shared by the bounds of one workload on parts of one cluster, for one set of constants: `seconds` of all
    kinds of ranks, by degrees, micro-batch and recomputation; `tables` by the rest of the cluster and by transfers."""

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
