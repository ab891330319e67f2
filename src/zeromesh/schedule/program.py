"""One training step as data: which op happens at which point.

[Note: Points] A step is a sequence of points. Units are indices into the schedule's units; micro-batches repeat
forward and backward; ``last`` marks the micro-batch after which the optimizer steps::

    PRE_FORWARD(u)   POST_FORWARD(u)    around a unit's forward
    END_FORWARD                         the outermost forward has ended, and no backward will come
    LEAVE                               the outermost forward has ended, of the root or of a unit called by itself
    PRE_BACKWARD(u)                     the gradient of an output of a call of u has arrived
    POST_BACKWARD(u)                    the backward has passed all calls of u: its parameters have their gradients
    PRE_RECOMPUTE(u) POST_RECOMPUTE(u)  around a forward that activation checkpointing repeats inside the backward
    END_BACKWARD                        autograd has nothing left to do
    STEPPED(u)                          an optimizer has updated the unit

[Note: Ops] At each point the schedule lists ops, and the interpreter carries them out:

    REFRESH     start to bring the compute copy up to date with the optimizer's, unless that is done: [Note: Window]
    PREFETCH    start a gather if its slot is free; never waits
    UNSHARD     gather if that has not been started, and wait until the parameters are there
    RESHARD     the unit's parameters are the optimizer's again; the slot's content stays valid until it is overwritten
    DROP        RESHARD, and the content counts as gone
    REDUCE      queue the unit's gradients for reduction, in the order that all ranks share
    SYNC        wait for the unit's reduction, or for all traffic (-1), in overlap modes that expose it
    FLUSH       queue the remaining reductions, wait for all after a last micro-batch

[Note: Window] Where parameters are sharded, a step starts the refreshes of the first two units, and each unit's forward
that of the first unit which is not prefetched yet. So behind a gather's own refresh at most one other is launched
before it, which keeps the refreshes' lane at work. NCCL may start kernels in the order of their launch, over all
communicators (NCCL_LAUNCH_ORDER_IMPLICIT): the gather then waits until that one begins, which is when its own ends. All
ranks call the same units in the same order then. Where no parameters are sharded they may not, and one rank may call
the model alone, so all refreshes start with the step.

A refresh after a step in the host's memory waits for that step, and with it all that comes after it in its lanes. So
there the step starts none, and each unit's forward only those of units that it prefetches, or of the next one, also
where no parameters are sharded, if refreshes are only copies to the device.

Where no parameters are gathered a unit may be called many times, by parts (`zeromesh.schedule.unit.neighbours`), and
has no slot to give back: it stays open until the outermost forward has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from zeromesh.schedule.buffer_layout import BufferLayout, place
from zeromesh.schedule.lanes import Lanes
from zeromesh.schedule.memory import MemoryPlan
from zeromesh.schedule.unit import Role, Unit
from zeromesh.strategy import Axis, Layout, Strategy

if TYPE_CHECKING:
    from zeromesh.schedule.bucket import Bucket


class PointKind(enum.Enum):
    """Where in a step we are: [Note: Points]."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    END_FORWARD = "end_forward"
    LEAVE = "leave"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    PRE_RECOMPUTE = "pre_recompute"
    POST_RECOMPUTE = "post_recompute"
    END_BACKWARD = "end_backward"
    STEPPED = "stepped"


class Action(enum.Enum):
    """The kinds of operations: [Note: Ops]."""

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
    """One action on one unit; -1 for all."""

    action: Action
    unit: int

    def __str__(self) -> str:
        return f"{self.action.value}({self.unit})"


Program = Mapping[tuple[PointKind, int], tuple[Op, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that is decided about a step before it runs."""

    layout: Layout  # the strategy on its mesh, which also says how the step overlaps
    parts: Mapping[str, Layout] = field(default_factory=dict)  # by part of the model; buffers name theirs
    units: tuple[Unit, ...]  # in the order in which the model registers them, root first
    placed: tuple[tuple[BufferLayout, ...], ...] = field(repr=False)
    order: tuple[int, ...]  # unit indices in the order of the forward
    memory: MemoryPlan
    buckets: tuple[tuple[Bucket, ...], ...] = ()  # for each optimizer that steps on whole tensors
    beyond: tuple[Axis, ...] = ()  # axes beyond the layouts, which only whole tensors cross
    shards_params: bool = field(init=False)  # whether any layout does: all ranks then call all units in the same order
    program: Program = field(init=False, repr=False)  # unit -1 for points of no unit

    def __post_init__(self) -> None:
        gathers = any(layout.gathers for layout in self.layouts)
        sharded = any(layout.degree(layout.param_axes) > 1 for layout in self.layouts)
        late = self.memory.host is not None and any(b.stepped_on_host for unit in self.placed for b in unit)
        windowed = sharded or (late and not any(b.routes["refresh"].steps for unit in self.placed for b in unit))
        object.__setattr__(self, "shards_params", sharded)
        strategy, overlaps = self.layout.strategy, self.layout.strategy.overlap == "all"
        prefetch = strategy.prefetch if gathers and strategy.overlap != "none" else 0
        facts = tuple(_Facts(unit.role, unit.trainable) for unit in self.units)
        program = _program(gathers, prefetch, overlaps, windowed and overlaps, late, facts, self.order)
        object.__setattr__(self, "program", program)

    @classmethod
    def of(
        cls,
        layout: Layout,
        units: Sequence[Unit],
        *,
        parts: Mapping[str, Layout] = MappingProxyType({}),
        messages: bool | None = None,
        triton: bool = True,
        lent: Mapping[str, str] = MappingProxyType({}),
    ) -> Schedule:
        """The schedule of `units` under `layout`, in the order of registration until the first forward shows another.

        Args:
            units: root first; block units in the order of the model's repeated list.
            messages: whether ranks exchange messages, which decides the workspaces of their collectives; None counts
                none.
            triton: whether the devices have it: [Note: Which codec] of `zeromesh.wires.format`.
            lent: axes that use the communicators of another, as `lent_axes` of `zeromesh.schedule.lanes` gives them.
        """
        placed = place(layout, units, parts)
        return cls(
            layout=layout,
            parts=parts,
            units=tuple(units),
            placed=placed,
            order=tuple(range(len(units))),
            memory=MemoryPlan.of(placed, layout.strategy.prefetch, messages, triton=triton, lent=lent),
        )

    def reordered(self, order: Sequence[int]) -> Schedule:
        """The same schedule for units called in another order; slots stay where they are."""
        return replace(self, order=tuple(order))

    def with_owned(self, buckets: Sequence[Bucket], beyond: Sequence[Axis] = ()) -> Schedule:
        """The same schedule with one more optimizer, which steps on these buckets of whole tensors. They cross the axes
        `beyond` as well."""
        further = tuple(axis for axis in beyond if axis not in self.beyond)
        return replace(self, buckets=(*self.buckets, tuple(buckets)), beyond=(*self.beyond, *further))

    def without_owned(self, optimizer: int) -> Schedule:
        """The same schedule after an optimizer is gone: the others keep their numbers."""
        return replace(self, buckets=(*self.buckets[:optimizer], (), *self.buckets[optimizer + 1 :]))

    def ops(self, point: PointKind, unit: int = -1) -> tuple[Op, ...]:
        return self.program.get((point, unit), ())

    def resident(self, unit: int) -> bool:
        return self.units[unit].role is Role.RESIDENT

    @property
    def lanes(self) -> Lanes:
        return self.memory.lanes

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The model's, then those of its parts."""
        return (self.layout, *self.parts.values())

    @property
    def strategy(self) -> Strategy:
        """The model's, with those of its parts."""
        return self.layout.strategy.with_parts({part: layout.strategy for part, layout in self.parts.items()})

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all layouts and of groups outside them, with unique names."""
        return (*(axis for layout in self.layouts for axis in layout.axes), *self.beyond)

    def reduces_each(self, unit: int) -> bool:
        """Whether anything of the unit's gradients is reduced, or copied, after each micro-batch."""
        return any(placed.routes["reduce"].all_steps for placed in self.placed[unit])

    def shares_slot(self, unit: int) -> bool:
        """Whether other units are gathered into the unit's slot."""
        slots = self.memory.gather.slot_of
        return slots[unit] is not None and slots.count(slots[unit]) > 1


class _Facts(NamedTuple):
    """The facts on which a unit's operations depend."""

    role: Role
    trainable: bool


@lru_cache(maxsize=64)
def _program(
    gathers: bool,
    prefetch: int,
    overlaps: bool,
    windowed: bool,
    late: bool,
    units: tuple[_Facts, ...],
    order: tuple[int, ...],
) -> Program:
    """Cached, since a search asks for thousands of programs and few of them differ."""
    program: dict[tuple[PointKind, int], tuple[Op, ...]] = {}
    for position, unit in enumerate(order):
        ahead, behind = order[position + 1 :], order[:position][::-1]
        prefetches = _prefetches(prefetch, units, ahead)
        following = ahead[len(prefetches) :][:1] if windowed and not (late and prefetches) else ()
        program[PointKind.PRE_FORWARD, unit] = (Op(Action.UNSHARD, unit), *prefetches, *_refreshes(units, following))
        # A block's content stays in its slot: where forward turns into backward the last ones need no second gather.
        program[PointKind.POST_FORWARD, unit] = (Op(Action.RESHARD, unit),) if gathers else ()
        program[PointKind.PRE_BACKWARD, unit] = (Op(Action.UNSHARD, unit), *_prefetches(prefetch, units, behind))
        program[PointKind.PRE_RECOMPUTE, unit] = (Op(Action.UNSHARD, unit),)
        program[PointKind.POST_RECOMPUTE, unit] = ()
        exposed = () if overlaps else (Op(Action.SYNC, unit),)
        reduction = (Op(Action.REDUCE, unit), *exposed) if units[unit].trainable else ()
        # The gather for the unit before was issued at PRE_BACKWARD: on one communicator it must not queue behind this.
        program[PointKind.POST_BACKWARD, unit] = (Op(Action.DROP, unit), *reduction)
    drop = tuple(Op(Action.DROP, unit) for unit in order)
    program[PointKind.END_FORWARD, -1] = drop
    program[PointKind.LEAVE, -1] = () if gathers else tuple(Op(Action.RESHARD, unit) for unit in order)
    program[PointKind.END_BACKWARD, -1] = (Op(Action.FLUSH, -1), *drop)
    exposed = () if overlaps else (Op(Action.SYNC, -1),)
    at_once = order if not windowed else () if late else [unit for unit in order if units[unit].trainable][:2]
    program[PointKind.STEPPED, -1] = (*_refreshes(units, at_once), *exposed)
    return program


def _refreshes(units: Sequence[_Facts], which: Sequence[int]) -> tuple[Op, ...]:
    return tuple(Op(Action.REFRESH, unit) for unit in which if units[unit].trainable)


def _prefetches(count: int, units: Sequence[_Facts], following: Sequence[int]) -> tuple[Op, ...]:
    """The next `count` block units, and other units that are gathered before the last of them."""
    ops: list[Op] = []
    blocks = 0
    for unit in following:
        if blocks == count:
            break
        blocks += units[unit].role is Role.BLOCK
        ops.append(Op(Action.PREFETCH, unit))
    return tuple(ops)
