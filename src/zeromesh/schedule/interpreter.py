"""Carries out a schedule's ops as the points of a step are reached. Engine and simulator are its two back ends.

The interpreter knows which copy of which unit is valid, who holds which slot and what has been reduced; it never
touches a tensor or a clock. What it decides depends only on the sequence of points, so ranks that reach the same
points issue the same collectives in the same order.

[Note: Gathered states] A unit's gathered parameters are, by `UnitState.full` and `in_use`:

    not full          no valid copy; its slot may hold another unit
    full, not in use  gathered, or being gathered (`ticket`), or used and not yet overwritten; may be evicted
    full, in use      between UNSHARD and RESHARD: views into the slot are live, so nothing may be gathered into it

[Note: Generations] Every step, load or change by hand raises a unit's generation; a copy made from an older one is not
used again.

[Note: Gradient states] EMPTY: nothing accumulated. PARTIAL: the accumulator holds micro-batches, reduced over the axes
of `grad_axes` only. REDUCED: its state shard holds the reduced gradient; a further backward is reduced by itself, then
added, so nothing is reduced twice.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from zeromesh.errors import InternalError, ModelError
from zeromesh.schedule.program import Action, Op, PointKind, Schedule

T = TypeVar("T")


class GradState(enum.Enum):
    """[Note: Gradient states]."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


class Target(enum.Enum):
    """Where a unit's gradients of the running backward are collected.

    SLOT: its reduce slot. ACCUMULATOR: added where they stay. APART: a temporary of the accumulator's size, since that
    one already holds a reduced gradient. WAIT: its slot is another unit's; they stay where autograd left them.
    """

    SLOT = "slot"
    ACCUMULATOR = "accumulator"
    APART = "apart"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What to do with the gradients a unit has collected in one backward.

    Args:
        target: where they are; WAIT means nothing was collected before the unit's turn came.
        accumulate: add to the accumulator (else overwrite it).
        boundary: go on to the state shard: the gradient the optimizer sees.
        add: the state shard already holds a reduced gradient; add to it.
    """

    target: Target
    accumulate: bool
    boundary: bool
    add: bool


@dataclass(frozen=True, slots=True)
class Reducing(Generic[T]):
    """A reduction that was issued, as tickets; None where there is nothing to wait for.

    Args:
        taken: what was collected has been read: its slot may be filled again.
        done: the sums are where they are to be.
    """

    taken: T | None
    done: T | None


class Backend(Protocol[T]):
    """What runs the ops: on devices, on a virtual clock, or only counting. Calls return before the work is done; the
    ticket is for `wait`, None if there was nothing to do."""

    def refresh(self, unit: int) -> T | None:
        """Bring the parameter shard up to date with the state shards."""
        ...

    def unshard(self, unit: int, *, from_kept: bool, after: T | None) -> T | None:
        """Gather the unit's parameters into its slot, from the kept copy if that is valid; `after` their refresh."""
        ...

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[T]:
        """Reduce the gradients that the unit has collected."""
        ...

    def wait(self, ticket: T, op: Op) -> None:
        """Make the computation wait for the ticket's work, on behalf of `op`."""
        ...

    def use(self, unit: int) -> None:
        """The unit's gathered parameters are there: point the model at them."""
        ...

    def unuse(self, unit: int) -> None:
        """The unit's gathered parameters may go: point the model away from them."""
        ...

    def grads_discarded(self, unit: int) -> bool:
        """Whether the user has dropped or zeroed the reduced gradient since it was reduced."""
        ...


@dataclass(slots=True)
class UnitState(Generic[T]):
    """What is known of one unit; generations count from 1, so 0 is never valid.

    Args:
        generation: of its masters; a step or a load raises it.
        refreshed: the generation that its compute copy was made of.
        full: the generation in its gather slot.
        kept: the generation of its secondary copy.
        in_use: the model is pointed at what was gathered.
        ticket: of a gather under way.
        refreshing: of a refresh under way.
        visited: called since the last step.
        calls: forwards whose backward is to come.
        entered: of these, how many backwards have begun.
        grad: what its accumulator holds.
        target: where the running backward puts its gradients; None before the first of them.
        ready: all gradients are there, and wait for the unit's turn to be reduced.
        taking: of what still reads the reduce slot.
        reducing: of a reduction under way.
    """

    generation: int = 1
    refreshed: int = 1
    full: int = 0
    kept: int = 0
    in_use: bool = False
    ticket: T | None = None
    refreshing: T | None = None
    visited: bool = False
    calls: int = 0
    entered: int = 0
    grad: GradState = GradState.EMPTY
    target: Target | None = None
    ready: bool = False
    taking: T | None = None
    reducing: T | None = None


@dataclass(slots=True)
class Slots(Generic[T]):
    """Owners of a set of slots, by unit index; None is free."""

    owner: list[int | None]

    @classmethod
    def free(cls, count: int) -> Slots[T]:
        return cls([None] * count)


def _unwatched(point: PointKind, unit: int) -> None:
    pass


@dataclass(slots=True)
class Interpreter(Generic[T]):
    """Runs `schedule` on `backend`.

    Args:
        schedule: what to do where.
        backend: who does it.
        last: whether the running micro-batch is the last before the optimizer's step; set by the driver.
        in_backward: from a backward's first gradient to its end.
        watch: is told of every point as it is reached, before its ops; an observer for traces.
        states: by unit.
        gather_slots, reduce_slots: which unit has which.
        seen: units in the order of their first forward.
        digest: of the gathers since the last step, to be compared between ranks.
    """

    schedule: Schedule
    backend: Backend[T]
    last: bool = True
    in_backward: bool = False
    watch: Callable[[PointKind, int], None] = _unwatched
    states: list[UnitState[T]] = field(init=False)
    gather_slots: Slots[T] = field(init=False)
    reduce_slots: Slots[T] = field(init=False)
    seen: list[int] = field(default_factory=list)
    digest: int = 0
    _turn: int = 0

    def __post_init__(self) -> None:
        self.states = [UnitState() for _ in self.schedule.units]
        self.gather_slots = Slots.free(len(self.schedule.memory.gather.slot_bytes))
        self.reduce_slots = Slots.free(len(self.schedule.memory.reduce.slot_bytes))

    # ---- points

    def pre_forward(self, unit: int) -> None:
        """Before a unit's forward, or its repetition inside the backward."""
        if self.in_backward:
            return self._run(PointKind.PRE_RECOMPUTE, unit)
        self.states[unit].visited = True
        if unit not in self.seen:
            self.seen.append(unit)
        self._run(PointKind.PRE_FORWARD, unit)

    def post_forward(self, unit: int, *, backward: bool) -> None:
        """After a unit's forward; `backward` says whether its outputs will bring it to PRE_BACKWARD."""
        if self.in_backward:
            return self._run(PointKind.POST_RECOMPUTE, unit)
        self.states[unit].calls += backward
        self._run(PointKind.POST_FORWARD, unit)

    def end_forward(self, *, backward: bool) -> None:
        """After the root's forward: without a backward to come, what stayed gathered may go."""
        if not backward and not self.in_backward:
            self._run(PointKind.END_FORWARD)

    def leave(self) -> None:
        """When the outermost forward has ended."""
        if not self.in_backward:
            self._run(PointKind.LEAVE)

    def begin_backward(self) -> None:
        """When the first gradient of a backward has arrived; once is enough."""
        if self.in_backward:
            return
        self.in_backward, self._turn = True, 0
        for unit, state in enumerate(self.states):
            if state.grad is GradState.REDUCED:
                # Under way only after a backward that was interrupted: its sums must not fall into new gradients.
                self._settle_reduction(state, Op(Action.SYNC, -1))
                if self.backend.grads_discarded(unit):
                    state.grad = GradState.EMPTY
        self._run(PointKind.BEGIN_BACKWARD)

    def pre_backward(self, unit: int) -> None:
        """When the gradient of a call's output has arrived."""
        self.begin_backward()
        self.states[unit].entered += 1
        self._finish_later_units(unit)
        self._run(PointKind.PRE_BACKWARD, unit)

    def post_backward(self, unit: int) -> None:
        """When all gradients of the unit's parameters have been computed."""
        self._run(PointKind.POST_BACKWARD, unit)

    def end_backward(self) -> None:
        """When autograd has ended. After a last micro-batch every reduced gradient is there on return."""
        self._run(PointKind.END_BACKWARD)
        self.in_backward = False
        for state in self.states:  # still visited: a further backward of the same forward may reach them
            state.calls, state.entered, state.ready = 0, 0, False

    def stepped(self, units: Iterable[int]) -> None:
        """An optimizer, a load or the user has changed the masters of `units`."""
        self.watch(PointKind.STEPPED, -1)
        changed = set(units)
        for unit in changed:
            self.invalidate(unit)
            self.states[unit].visited = False
        for op in self.schedule.ops(PointKind.STEPPED):
            if op.unit in changed or op.action is Action.SYNC:
                self._do(op)

    # ---- for the back end

    def begin_grads(self, unit: int) -> Target:
        """Where to put the gradients of `unit` that the running backward computes; settled at the first of them."""
        state = self.states[unit]
        if state.target in (None, Target.WAIT):
            state.target = self._acquire(unit)
        assert state.target is not None
        return state.target

    def invalidate(self, unit: int) -> None:
        """Raises the unit's generation: [Note: Generations]."""
        state = self.states[unit]
        if state.in_use and self.in_backward:
            raise InternalError(f"unit {self.schedule.units[unit].name!r} changed while its backward runs")
        state.generation += 1

    def discard_grads(self) -> None:
        """Forgets what was accumulated and not yet stepped on."""
        for state in self.states:
            self._settle_reduction(state, Op(Action.SYNC, -1))
            state.grad = GradState.EMPTY

    def abort(self) -> None:
        """After a forward or backward that raised: nothing is in use any more; partial sums are kept."""
        for unit, state in enumerate(self.states):
            if state.in_use:
                self._reshard(unit)
            if state.target is not None:
                self._free_reduce_slot(unit)
            state.target, state.ready, state.visited, state.calls, state.entered = None, False, False, 0, 0
        self.in_backward = False

    def quiesce(self) -> None:
        """Waits for everything in flight: before masters change, are saved or loaded."""
        for state in self.states:
            self._settle(state, "refreshing", Op(Action.SYNC, -1))
            self._settle(state, "ticket", Op(Action.SYNC, -1))
            self._settle_reduction(state, Op(Action.SYNC, -1))

    def adopt(self, order: Sequence[int]) -> None:
        """Continues with units in `order`, as the first step has shown it; between steps only."""
        self.schedule = self.schedule.reordered(order)

    # ---- ops

    def _run(self, point: PointKind, unit: int = -1) -> None:
        self.watch(point, unit)
        for op in self.schedule.ops(point, unit):
            self._do(op)

    def _do(self, op: Op) -> None:
        match op.action:
            case Action.REFRESH:
                self._refresh(op.unit)
            # Ready: its backward is done, as that of a root whose last layers are its own may be, early.
            case Action.PREFETCH if not self.states[op.unit].ready:
                self._gather(op.unit, prefetch=True)
            case Action.UNSHARD:
                self._unshard(op)
            case Action.RESHARD:
                self._reshard(op.unit)
            case Action.DROP:
                self._drop(op)
            case Action.REDUCE:
                self.states[op.unit].ready = True
                self._take_turns()
            case Action.SYNC if op.unit < 0:
                self.quiesce()
            case Action.SYNC if self.last or self.schedule.layout.strategy.overlap == "none":
                self._settle_reduction(self.states[op.unit], op)
            case Action.FLUSH:
                self._flush(op)

    def _refresh(self, unit: int) -> None:
        state = self.states[unit]
        if state.refreshed == state.generation:
            return
        state.refreshed = state.generation
        if self.schedule.units[unit].trainable:
            state.refreshing = self.backend.refresh(unit)

    def _unshard(self, op: Op) -> None:
        state = self.states[op.unit]
        self._gather(op.unit, prefetch=False)
        self._settle(state, "refreshing", op)
        self._settle(state, "ticket", op)
        if not state.in_use:
            self.backend.use(op.unit)
            state.in_use = True

    def _gather(self, unit: int, *, prefetch: bool) -> None:
        self._refresh(unit)
        state, slot = self.states[unit], self.schedule.memory.gather.slot_of[unit]
        if slot is None or state.full == state.generation:
            return
        owner = self.gather_slots.owner[slot]
        if owner is not None and owner != unit and not self._evict(owner, unit, prefetch):
            return
        self.gather_slots.owner[slot] = unit
        from_kept = self._has_kept(unit) and self.in_backward and state.kept == state.generation
        self.digest = zlib.crc32(b"%d %d" % (unit, from_kept), self.digest)
        state.ticket = self.backend.unshard(unit, from_kept=from_kept, after=state.refreshing)
        state.full = state.kept = state.generation

    def _has_kept(self, unit: int) -> bool:
        return any(buffer.kept for buffer in self.schedule.memory.persistent[unit])

    def _evict(self, owner: int, unit: int, prefetch: bool) -> bool:
        """Frees the slot that `owner` holds, unless a mere prefetch wants it while it is of use."""
        state = self.states[owner]
        if prefetch and (state.in_use or state.ticket is not None):
            return False
        if state.in_use and not self.in_backward:
            names = [self.schedule.units[index].name for index in (owner, unit)]
            raise ModelError(
                f"units {names[0]!r} and {names[1]!r} are in use at once but share a gather slot, since neither is "
                f"registered inside the other; name one of them in `resident` so that it has a slot of its own"
            )
        if state.in_use:
            # A unit that is called again earlier in the graph: the calls after that point have finished their backward.
            self.backend.unuse(owner)
            state.in_use = False
        self._settle(state, "ticket", Op(Action.UNSHARD, unit))
        state.full = 0
        return True

    def _reshard(self, unit: int) -> None:
        state = self.states[unit]
        if state.in_use:
            state.in_use = False
            self.backend.unuse(unit)

    def _drop(self, op: Op) -> None:
        self._reshard(op.unit)
        state = self.states[op.unit]
        # A gather that nobody waited for still writes into the slot.
        self._settle(state, "ticket", op)
        state.full = state.kept = 0

    # ---- reductions, in an order that all ranks share

    def _acquire(self, unit: int) -> Target:
        slot = self.schedule.memory.reduce.slot_of[unit]
        if slot is None:
            return Target.APART if self.states[unit].grad is GradState.REDUCED else Target.ACCUMULATOR
        if not self.schedule.shards_params and not self._is_next(unit, slot):
            return Target.WAIT
        owner = self.reduce_slots.owner[slot]
        if owner is not None:
            holder = self.states[owner]
            if holder.target not in (None, Target.WAIT):
                return Target.WAIT
            self._settle(holder, "taking", Op(Action.REDUCE, unit))
        self.reduce_slots.owner[slot] = unit
        return Target.SLOT

    def _is_next(self, unit: int, slot: int) -> bool:
        """Whether no other unit is to reduce from the slot first. Ranks may get there in different orders where no
        parameters are sharded; were a slot taken out of turn, it would have to be emptied out of turn."""
        left = self.schedule.order[: len(self.schedule.order) - self._turn]
        sharing = [other for other in left if self.schedule.memory.reduce.slot_of[other] == slot]
        return not sharing or sharing[-1] == unit

    def _slot_owner(self, unit: int) -> int:
        slot = self.schedule.memory.reduce.slot_of[unit]
        owner = None if slot is None else self.reduce_slots.owner[slot]
        if owner is None:
            raise InternalError(f"unit {self.schedule.units[unit].name!r} waits for a reduce slot that nobody holds")
        return owner

    def _free_reduce_slot(self, unit: int) -> None:
        slot = self.schedule.memory.reduce.slot_of[unit]
        if slot is not None and self.reduce_slots.owner[slot] == unit:
            self.reduce_slots.owner[slot] = None

    def _finish_later_units(self, unit: int) -> None:
        """Units after `unit` in the forward whose every call has entered its backward have finished it: what of their
        parameters has no gradient by now was not used. Not so units inside `unit`, which may share its output."""
        order, units = self.schedule.order, self.schedule.units
        for later in reversed(order[order.index(unit) + 1 :]):
            state = self.states[later]
            running = (state.in_use or state.target is not None) and not units[unit].encloses(units[later])
            if running and not state.ready and state.entered and state.entered >= state.calls:
                self.post_backward(later)

    def _take_turns(self) -> None:
        order = self.schedule.order
        while self._turn < len(order):
            unit = order[-1 - self._turn]
            if not self._may_pass(unit):
                break
            self._turn += 1
        # Units whose turn has passed (called again, or unseen by the order): in the order in which they end.
        for position in range(self._turn):
            self._reduce_if_ready(order[-1 - position])

    def _may_pass(self, unit: int) -> bool:
        """Reduces `unit` if it is its turn; False where the ranks must wait for it."""
        state = self.states[unit]
        if self._reduce_if_ready(unit) or not self.schedule.units[unit].trainable:
            return True
        if self.schedule.shards_params:
            return state.calls == 0
        if state.visited:
            return False
        self._reduce_unseen(unit)
        return True

    def _reduce_unseen(self, unit: int) -> None:
        """A unit that this rank has not called; others may have, where parameters are not sharded."""
        if self.last or self.schedule.layout.degree(self.schedule.layout.grad_axes) > 1:
            self._reduce(unit)

    def _reduce_if_ready(self, unit: int) -> bool:
        if not self.states[unit].ready:
            return False
        self.states[unit].ready = False
        self._reduce(unit)
        return True

    def _reduce(self, unit: int) -> None:
        target, state = self.begin_grads(unit), self.states[unit]
        while target is Target.WAIT:
            self._reduce(self._slot_owner(unit))
            target = self.begin_grads(unit)
        add = state.grad is GradState.REDUCED
        boundary = self.last or add
        reduction = Reduction(target=target, accumulate=state.grad is GradState.PARTIAL, boundary=boundary, add=add)
        self._settle_reduction(state, Op(Action.REDUCE, unit))
        issued = self.backend.reduce(unit, reduction)
        state.taking, state.reducing = issued.taken, issued.done
        state.grad = GradState.REDUCED if boundary else GradState.PARTIAL
        state.target = None

    def _flush(self, op: Op) -> None:
        for position, unit in enumerate(reversed(self.schedule.order)):
            state, passed = self.states[unit], position < self._turn
            self._turn = max(self._turn, position)
            if not self.schedule.units[unit].trainable:
                continue
            pending = self.last and state.grad is GradState.PARTIAL
            if state.ready or state.target is not None or pending:
                state.ready = False
                self._reduce(unit)
            elif not self.schedule.shards_params and not passed:
                self._reduce_unseen(unit)
        self._turn = len(self.schedule.order)
        for state in self.states:
            if state.grad is GradState.REDUCED:  # shown as `.grad` from here on
                self._settle_reduction(state, op)

    def _settle_reduction(self, state: UnitState[T], op: Op) -> None:
        self._settle(state, "taking", op)
        self._settle(state, "reducing", op)

    def _settle(self, state: UnitState[T], kind: str, op: Op) -> None:
        ticket: T | None = getattr(state, kind)
        if ticket is not None:
            self.backend.wait(ticket, op)
            setattr(state, kind, None)  # only now: a Ctrl-C may end the wait, and whoever comes next must wait again
