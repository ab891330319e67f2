"""Lower bounds on step time, vectorised over layouts.

Each kind of transfer has a lane, and a lane is serial (see `zeromesh.simulator.mechanics`). With M micro-batches and C
the seconds of all compute, let U and R be what a micro-batch gathers and reduces, F and B what the step's refresh and
its boundary take, each in its lane, B_l what keeps the links of level l busy, E_g the gathers that the first
computation waits for, E_r the reductions of the unit whose gradient comes last: nothing can hide these two.
Communication is then under way for at least

    A = max(M * U + E_r, F + E_r, M * R + E_g, B + E_g, max over levels of B_l)

seconds; so are the copies to the host, or those from it. Nor do the lanes overlap at will. Gathers for a forward end
before that forward does, and the reductions of a backward begin after it has begun, so U and R meet only in backwards,
where gathers take G_b, and where reductions spill into the next micro-batch's forward. A lane never idles while it has
work, so at most

    S = r + g + (n - 1) * max(0, r + g - b) + the reductions of units that are no blocks

spills, for n blocks whose backward computes for b seconds, whose reduction takes r and whose backward gather g, which
may take links away. So also A >= M * (U + R - G_b) - (M - 1) * S.

While a collective runs, computation loses a share of each second (`zeromesh.cost.contention`), and all of it while a
kernel adds what was reduced to the accumulated gradient. Where it waits for memory, for a share w of each unit's
seconds at least, it loses what the collective moves there too. Over all collectives that is L, less what runs while
computation waits, and less those kernels of E_r. It waits for E_g, when nothing is reduced yet, and for E_r, when
nothing is gathered any more, so that two lanes are at work at the most; with s what those two take,

    step >= max(A, C + L + E * (1 - s) + W),    E = E_g + E_r

Every later micro-batch waits again for its first gathers, E_m. The next unit's gather, of g_2 seconds, is behind them
in its lane, and its reduction, r_2, ahead of E_r: they hide under what the unit between computes, f_1 and b_1, alone.
With s' what two lanes and those kernels take,

    W = (M - 1) * E_m * (1 - s') + M * max(0, g_2 * (1 - s') - f_1) + max(0, r_2 * (1 - s') - b_1)

Nor does the first forward end before every unit is refreshed and gathered, or stepped on in the host's memory in h
seconds, a reduction start before the first backward has, or the boundary before the last one. Gathers run ahead of a
forward or backward by no more than the units that have a place to land, a. With f and b the seconds of one
micro-batch's forward and backward, G_f = U - G_b,

    f' = max(f, G_f - a),   b' = max(b, G_b - a)
    step >= max(f, F, G_f, f_l, h) + max(M * R, (M - 1) * (f' + b') + max(b', R, B, b_l - a)) + optimizer

where f_l is for how long the refresh and the gathers of the first forward keep the links of level l busy, and b_l those
of the last backward with its reductions. In a pipeline a rank's idle seconds come between.

Where a collective takes neighbouring levels at once (`collective=ho_ring`), a chain takes at least as long as its
longest one: U, F, R, B and E are then taken over the longest part of each layout instead of over all; what may spill
stays.
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
    """Rows of a table, in seconds: of a lane per micro-batch and per step; of the root in each lane, and of the unit
    that runs first if it is one; of the unit after that, per micro-batch; of all gathers of a backward, of those that
    may be done before their phase, of one block's, of one block's reduction and of the other units'; of the level's
    links, per micro-batch and per step, in the first forward and in the last backward; of the device's memory, per
    micro-batch and per step; and, no seconds, what the kernel that adds to the accumulated gradient takes at most of a
    collective, if a micro-batch's last reduction is over that axis."""

    GATHER_MICRO = 0
    GATHER_STEP = auto()
    REDUCE_MICRO = auto()
    REDUCE_STEP = auto()
    UNSHARD_ROOT = auto()
    REFRESH_ROOT = auto()
    UNSHARD_FIRST = auto()
    REFRESH_FIRST = auto()
    REDUCE_ROOT = auto()
    BOUNDARY_ROOT = auto()
    REDUCE_FIRST = auto()
    BOUNDARY_FIRST = auto()
    UNSHARD_SECOND = auto()
    REDUCE_SECOND = auto()
    GATHER_BACK = auto()
    AHEAD = auto()
    BLOCK_GATHER = auto()
    BLOCK_REDUCE = auto()
    OTHER_REDUCE = auto()
    BUSY_MICRO = auto()
    BUSY_STEP = auto()
    BUSY_FIRST = auto()
    BUSY_LAST = auto()
    MEMORY_MICRO = auto()
    MEMORY_STEP = auto()
    ADDING = auto()


MICRO_AND_STEP = np.array([Row.GATHER_MICRO, Row.GATHER_STEP])
"""Rows of the lanes of gathers; those of reductions lie two behind."""

OVERLAPPING = slice(Row.GATHER_MICRO, Row.REDUCE_SECOND + 1)
"""Rows of which the longest part counts where levels overlap."""

SUMMED = slice(OVERLAPPING.stop, Row.BUSY_MICRO)
"""The other rows of the lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """Seconds of the layouts of a block.

    Args:
        lanes: rows as named above, by layout.
        busy: by level, seconds of its links per micro-batch, per step, in the first forward and in the last backward.
        lost: L, per micro-batch and per step, by layout, without what is moved through memory.
        moved: that, in seconds of memory.
        moving: of memory, what collectives on all levels have at most.
        edge: s, by layout, without that.
        late: s', by layout, without that.
        copied: if anything lies on the host, seconds of copies down and of those up, per micro-batch and per step.
        stepped: h.
    """

    lanes: Floats
    busy: Floats
    lost: Floats
    moved: Floats
    moving: float
    edge: Floats
    late: Floats
    copied: Floats
    stepped: Floats

    def first(self, count: int) -> TimeBound:
        """The bound of the first `count` layouts."""
        return replace(
            self,
            lanes=self.lanes[:, :count],
            busy=self.busy[:, :, :count],
            lost=self.lost[:, :count],
            moved=self.moved[:, :count],
            edge=self.edge[:count],
            late=self.late[:count],
            copied=self.copied[:, :, :count],
            stepped=self.stepped[:count],
        )

    def at(self, micro_batches: int, compute: ComputeSeconds, optimizer_s: Floats) -> Floats:
        """The bound for a number of micro-batches and the seconds of one's compute."""
        lanes = self.lanes
        # The root's second transfer goes beside the first one of the other unit: each kind has a lane.
        edge_gather = lanes[Row.REFRESH_ROOT] + np.maximum(lanes[Row.UNSHARD_ROOT], lanes[Row.REFRESH_FIRST])
        edge_gather += lanes[Row.UNSHARD_FIRST]
        edge_reduce = lanes[Row.REDUCE_FIRST] + np.maximum(lanes[Row.REDUCE_ROOT], lanes[Row.BOUNDARY_FIRST])
        edge_reduce += lanes[Row.BOUNDARY_ROOT]
        gather, refresh = micro_batches * self.lanes[Row.GATHER_MICRO], self.lanes[Row.GATHER_STEP]
        reduce, boundary = micro_batches * self.lanes[Row.REDUCE_MICRO], self.lanes[Row.REDUCE_STEP]
        active = np.maximum(np.maximum(gather, refresh) + edge_reduce, np.maximum(reduce, boundary) + edge_gather)
        for micro, step in (*self.busy[:, :2], *self.copied):
            active = np.maximum(active, micro_batches * micro + step)
        met = micro_batches * self.lanes[Row.GATHER_BACK] + (micro_batches - 1) * self._spilled(compute)
        active = np.maximum(active, gather + reduce - met)
        compute_s = micro_batches * compute.total + compute.idle + optimizer_s
        # While the device waits or is idle anyway, nothing slows it down, and the edges may hide.
        micro, step = self.lost + compute.moving * self.moved
        edge = self.edge + compute.moving * self.moving
        slowed = micro_batches * micro + step + (edge_gather + edge_reduce) * (1 - edge)
        slowed += self._late(micro_batches, compute)
        slowed = np.maximum(0.0, slowed - micro_batches * compute.waiting - compute.idle)
        gathered = lanes[Row.GATHER_MICRO] - lanes[Row.GATHER_BACK]  # in a forward
        forward = np.maximum(compute.forward, gathered - lanes[Row.AHEAD])
        backward = np.maximum(compute.backward, lanes[Row.GATHER_BACK] - lanes[Row.AHEAD])
        last = (micro_batches - 1) * (forward + backward) + compute.idle
        first_links, last_links = np.max(self.busy[:, 2:], axis=0)
        last += np.maximum.reduce([backward, last_links - lanes[Row.AHEAD], lanes[Row.REDUCE_MICRO], boundary])
        first = np.maximum.reduce(
            [np.full_like(refresh, compute.forward), refresh, gathered, first_links, self.stepped]
        )
        in_order = first + np.maximum(reduce, last) + optimizer_s
        return np.asarray(np.maximum(np.maximum(active, in_order), compute_s + slowed))

    def _late(self, micro_batches: int, compute: ComputeSeconds) -> Floats:
        """W."""
        lanes, (forward, backward) = self.lanes, compute.entered
        left = 1 - self.late - compute.moving * self.moving
        first = (micro_batches - 1) * (lanes[Row.UNSHARD_ROOT] + lanes[Row.UNSHARD_FIRST])
        gathers = micro_batches * np.maximum(0.0, lanes[Row.UNSHARD_SECOND] * left - forward)
        return np.asarray(first * left + gathers + np.maximum(0.0, lanes[Row.REDUCE_SECOND] * left - backward))

    def _spilled(self, compute: ComputeSeconds) -> Floats:
        """S: reductions still to be done when a backward ends."""
        one = self.lanes[Row.BLOCK_REDUCE] + self.lanes[Row.BLOCK_GATHER]
        growing = max(0, compute.blocks - 1) * np.maximum(0.0, one - compute.block_backward)
        return np.asarray(one + growing + self.lanes[Row.OTHER_REDUCE])


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """Seconds of one micro-batch; its `blocks` blocks compute for at least `block_backward` each in the backward.
    `entered`: forward and backward of the unit that runs first, if it is one. `waiting`: of both, for collectives
    inside of units; `idle`: of a step, in a pipeline; `moving`: w."""

    forward: float
    backward: float
    blocks: int = 0
    block_backward: float = 0.0
    entered: tuple[float, float] = (0.0, 0.0)
    waiting: float = 0.0
    idle: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """State shared by the bounds of one workload on parts of one cluster, for one set of constants.

    Args:
        seconds: of all kinds of ranks, by degrees, micro-batch and recomputation.
        tables: by what is left of the cluster, and by what is sent over it.
    """

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
