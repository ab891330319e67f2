"""One training step as data: which op happens at which point.

[Note: Points] A step is a sequence of points. Units are indices into the schedule's units; micro-batches repeat
forward and backward; ``last`` marks the micro-batch after which the optimizer steps::

    PRE_FORWARD(u)   POST_FORWARD(u)    around a unit's forward
    END_FORWARD                         the root's forward has ended, and no backward will come
    LEAVE                               the outermost forward has ended, the root's or that of a unit called by itself
    BEGIN_BACKWARD                      the first gradient has arrived
    PRE_BACKWARD(u)  POST_BACKWARD(u)   a gradient of its output has arrived; its trainable parameters have theirs (of a
                                        unit with frozen ones, and one that did not use all: an earlier unit begins)
    PRE_RECOMPUTE(u) POST_RECOMPUTE(u)  around a forward that activation checkpointing repeats inside the backward
    END_BACKWARD                        autograd has nothing left to do
    STEPPED(u)                          an optimizer has updated the unit

[Note: Ops] At each point the schedule lists ops, and the interpreter carries them out:

    REFRESH     start to bring the compute copy up to date with the optimizer's
    PREFETCH    start a gather if its slot is free; never waits
    UNSHARD     gather if that has not been started, and wait until the parameters are there
    RESHARD     the unit's parameters are the optimizer's again; the slot's content stays valid until it is overwritten
    DROP        RESHARD, and the content counts as gone
    REDUCE      queue the unit's gradients for reduction, in the order that all ranks share
    SYNC        wait for the unit's reduction, or for all traffic (-1), in overlap modes that expose it
    FLUSH       queue what is left, wait for all reductions after a last micro-batch

Where no parameters are sharded there is nothing to gather or to free unit by unit: all units are opened when the
backward begins and closed when forward or backward end, and a unit's own points have little to do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from zeromesh.schedule.memory import MemoryPlan
from zeromesh.schedule.placed import Placed, place
from zeromesh.schedule.unit import Role, Unit
from zeromesh.strategy import Layout


class PointKind(enum.Enum):
    """Where in a step we are: [Note: Points]."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    END_FORWARD = "end_forward"
    LEAVE = "leave"
    BEGIN_BACKWARD = "begin_backward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    PRE_RECOMPUTE = "pre_recompute"
    POST_RECOMPUTE = "post_recompute"
    END_BACKWARD = "end_backward"
    STEPPED = "stepped"


class Action(enum.Enum):
    """What is done: [Note: Ops]."""

    REFRESH = "refresh"
    PREFETCH = "prefetch"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    DROP = "drop"
    REDUCE = "reduce"
    SYNC = "sync"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True)
class Op:
    """One action on one unit."""

    action: Action
    unit: int

    def __str__(self) -> str:
        return f"{self.action.value}({self.unit})"


Program = dict[tuple[PointKind, int], tuple[Op, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that is decided about a step before it runs.

    Args:
        layout: the strategy on its mesh.
        units: in the order in which the model registers them, root first.
        placed: the buffers of each.
        order: unit indices in the order of the forward.
        memory: every buffer, in bytes.
        program: ops by (point, unit); unit is -1 for points of no unit.
    """

    layout: Layout
    units: tuple[Unit, ...]
    placed: tuple[tuple[Placed, ...], ...] = field(repr=False)
    order: tuple[int, ...]
    memory: MemoryPlan
    program: Program = field(repr=False)

    @classmethod
    def of(cls, layout: Layout, units: Sequence[Unit], *, workspace_bytes: int = 0) -> Schedule:
        """The schedule of `units` under `layout`, in the order of registration until the first forward shows another.

        Args:
            layout: the strategy on its mesh.
            units: root first; block units in the order of the model's repeated list.
            workspace_bytes: what the collectives need beside the regions they work on.
        """
        order, placed = tuple(range(len(units))), place(layout, units)
        return cls(
            layout=layout,
            units=tuple(units),
            placed=placed,
            order=order,
            memory=MemoryPlan.of(layout, units, placed, workspace_bytes),
            program=_program(layout, units, order),
        )

    def reordered(self, order: Sequence[int]) -> Schedule:
        """The same schedule for units called in another order; slots stay where they are."""
        return replace(self, order=tuple(order), program=_program(self.layout, self.units, order))

    def ops(self, point: PointKind, unit: int = -1) -> tuple[Op, ...]:
        return self.program.get((point, unit), ())

    def resident(self, unit: int) -> bool:
        return self.units[unit].role is Role.RESIDENT

    @property
    def shards_params(self) -> bool:
        return self.layout.degree(self.layout.param_axes) > 1

    def describe(self) -> str:
        """The program as text, one line per point: the golden form that tests compare."""
        lines = [
            f"{point.value:<14} {'' if unit < 0 else unit:>3}  {' '.join(map(str, ops))}"
            for (point, unit), ops in self.program.items()
        ]
        return "\n".join(lines)


def _program(layout: Layout, units: Sequence[Unit], order: Sequence[int]) -> Program:
    if layout.degree(layout.param_axes) == 1:
        return _whole_program(layout, units, order)
    program: Program = {}
    for position, unit in enumerate(order):
        ahead = tuple(_ahead(units, order[position + 1 :], layout.strategy.prefetch))
        behind = _ahead(units, tuple(reversed(order[:position])), layout.strategy.prefetch)
        program[PointKind.PRE_FORWARD, unit] = (
            Op(Action.UNSHARD, unit),
            *_prefetches(layout, ahead),
        )
        # A block's content stays in its slot: where forward turns into backward the last ones need no second gather.
        program[PointKind.POST_FORWARD, unit] = (Op(Action.RESHARD, unit),)
        program[PointKind.PRE_BACKWARD, unit] = (Op(Action.UNSHARD, unit), *_prefetches(layout, behind))
        program[PointKind.PRE_RECOMPUTE, unit] = (Op(Action.UNSHARD, unit),)
        program[PointKind.POST_RECOMPUTE, unit] = ()
        # The gather for the unit before was issued at PRE_BACKWARD: on one communicator it must not queue behind this.
        program[PointKind.POST_BACKWARD, unit] = (Op(Action.DROP, unit), *_reduce(layout, units, unit))
    drop = _each(Action.DROP, order)
    program[PointKind.END_FORWARD, -1] = drop
    program[PointKind.END_BACKWARD, -1] = (Op(Action.FLUSH, -1), *drop)
    program[PointKind.STEPPED, -1] = _stepped(layout, units, order)
    return program


def _whole_program(layout: Layout, units: Sequence[Unit], order: Sequence[int]) -> Program:
    """Where no parameters are sharded."""
    program: Program = {}
    for unit in order:
        # The unit after the root may hold the root's parameters: `adopts_root`.
        opened = (0, 1)[: len(units)] if unit == 0 else (unit,)
        program[PointKind.PRE_FORWARD, unit] = _each(Action.UNSHARD, opened)
        program[PointKind.PRE_RECOMPUTE, unit] = (Op(Action.UNSHARD, unit),)
        program[PointKind.POST_BACKWARD, unit] = (Op(Action.RESHARD, unit), *_reduce(layout, units, unit))
    program[PointKind.LEAVE, -1] = _each(Action.RESHARD, order)
    program[PointKind.BEGIN_BACKWARD, -1] = _each(Action.UNSHARD, order)
    program[PointKind.END_BACKWARD, -1] = (Op(Action.FLUSH, -1), *_each(Action.RESHARD, order))
    program[PointKind.STEPPED, -1] = _stepped(layout, units, order)
    return program


def _each(action: Action, order: Sequence[int]) -> tuple[Op, ...]:
    return tuple(Op(action, unit) for unit in order)


def _stepped(layout: Layout, units: Sequence[Unit], order: Sequence[int]) -> tuple[Op, ...]:
    """Refreshes all start with the step, in the order of the forward: they have a lane of their own, in which each of
    the forward's gathers finds its unit done before."""
    refreshes = tuple(Op(Action.REFRESH, unit) for unit in order if units[unit].trainable)
    return refreshes if layout.strategy.overlap == "all" else (*refreshes, Op(Action.SYNC, -1))


def _reduce(layout: Layout, units: Sequence[Unit], unit: int) -> tuple[Op, ...]:
    if not units[unit].trainable:
        return ()
    exposed = () if layout.strategy.overlap == "all" else (Op(Action.SYNC, unit),)
    return (Op(Action.REDUCE, unit), *exposed)


def _ahead(units: Sequence[Unit], following: Sequence[int], prefetch: int) -> Iterator[int]:
    """The next `prefetch` block units, and whatever else is gathered before the last of them."""
    blocks = 0
    for unit in following:
        if blocks == prefetch:
            return
        blocks += units[unit].role is Role.BLOCK
        yield unit


def _prefetches(layout: Layout, units: Iterable[int]) -> tuple[Op, ...]:
    if layout.strategy.overlap == "none":
        return ()
    return tuple(Op(Action.PREFETCH, unit) for unit in units)
