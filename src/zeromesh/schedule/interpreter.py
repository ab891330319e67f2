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

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from zeromesh.errors import InternalError, ModelError
from zeromesh.schedule.memory import REDUCE_SLOTS
from zeromesh.schedule.program import Action, Op, PointKind, Schedule
from zeromesh.schedule.state import Backend, GradState, Reduction, Slots, Target, UnitState

T = TypeVar("T")


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
    _learnt: bool = False
    _apart: list[int] = field(default_factory=list)

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
        """When the gradients of the unit's trainable parameters are there, or an earlier unit's backward has begun."""
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

    def begin_grads(self, unit: int, *, in_turn: bool = False) -> Target:
        """Where to put the gradients of `unit` that the running backward computes; settled at the first of them.

        Args:
            in_turn: it is reduced now, so no other unit is to have its slot before it.
        """
        state = self.states[unit]
        if state.target in (None, Target.WAIT):
            state.target = self._acquire(unit, in_turn=in_turn)
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
        self._learnt = True

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

    def _acquire(self, unit: int, *, in_turn: bool = False) -> Target:
        slot = self.schedule.memory.reduce.slot_of[unit]
        if slot is None:
            if self.states[unit].grad is not GradState.REDUCED:
                return Target.ACCUMULATOR
            self._bound_apart(unit)
            return Target.APART
        if not in_turn and not self.schedule.shards_params and not self._is_next(unit, slot):
            return Target.WAIT
        owner = self.reduce_slots.owner[slot]
        if owner is not None:
            holder = self.states[owner]
            if holder.target not in (None, Target.WAIT):
                return Target.WAIT
            self._settle(holder, "taking", Op(Action.REDUCE, unit))
        self.reduce_slots.owner[slot] = unit
        return Target.SLOT

    def _bound_apart(self, unit: int) -> None:
        """A gradient that is collected apart takes memory of its own until it is reduced: waits for the oldest of
        those under way where there are as many as slots would be. They are issued in an order that all ranks share,
        so whoever waits for one waits for ranks that wait for earlier ones at most."""
        under_way = [other for other in self._apart if self.states[other].reducing is not None]
        for other in under_way[: len(under_way) + 1 - REDUCE_SLOTS]:
            self._settle_reduction(self.states[other], Op(Action.REDUCE, unit))
            under_way.remove(other)
        self._apart = under_way

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
        parameters has no gradient by now was not used. Not so units inside `unit`, which may share its output, and one
        that holds the root's parameters (`adopts_root`), which have theirs at the end."""
        order, units = self.schedule.order, self.schedule.units
        adopted = not self.schedule.shards_params and not units[0].buffers
        for later in reversed(order[order.index(unit) + 1 :]):
            state = self.states[later]
            if adopted and later == 1:
                continue
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
            return state.calls == 0 or self._bypassed(unit)
        if state.visited:
            return False
        self._reduce_unseen(unit)
        return True

    def _bypassed(self, unit: int) -> bool:
        """Whether the backward is past a unit whose output got no gradient: one before it, in an order that all ranks
        have learnt, has been entered. If it is entered later all the same, its turn has passed."""
        if not self._learnt or self.states[unit].entered:
            return False
        order, units = self.schedule.order, self.schedule.units
        before = order[: order.index(unit)]
        return any(self.states[other].entered and not units[other].encloses(units[unit]) for other in before)

    def _reduce_unseen(self, unit: int) -> None:
        """A unit that this rank has not called; others may have, where parameters are not sharded, and reduce over the
        axes of `grad_axes` then. Over the others too in a last backward, and after one whose gradient was kept."""
        micro = self.schedule.layout.degree(self.schedule.layout.grad_axes) > 1
        if micro or self.last or self.states[unit].grad is GradState.REDUCED:
            self._reduce(unit)

    def _reduce_if_ready(self, unit: int) -> bool:
        if not self.states[unit].ready:
            return False
        self.states[unit].ready = False
        self._reduce(unit)
        return True

    def _reduce(self, unit: int) -> None:
        target, state = self.begin_grads(unit, in_turn=True), self.states[unit]
        while target is Target.WAIT:  # for a unit that collects in the slot
            self._reduce(self._slot_owner(unit))
            target = self.begin_grads(unit, in_turn=True)
        add = state.grad is GradState.REDUCED
        boundary = self.last or add
        reduction = Reduction(target=target, accumulate=state.grad is GradState.PARTIAL, boundary=boundary, add=add)
        self._settle_reduction(state, Op(Action.REDUCE, unit))
        issued = self.backend.reduce(unit, reduction)
        state.taking, state.reducing = issued.taken, issued.done
        if target is Target.APART:
            self._apart.append(unit)
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
        at_once = self.schedule.layout.strategy.overlap == "none"
        for state in self.states:
            if at_once or state.grad is GradState.REDUCED:  # shown as `.grad` from here on
                self._settle_reduction(state, op)

    def _settle_reduction(self, state: UnitState[T], op: Op) -> None:
        self._settle(state, "taking", op)
        self._settle(state, "reducing", op)

    def _settle(self, state: UnitState[T], kind: str, op: Op) -> None:
        ticket: T | None = getattr(state, kind)
        if ticket is not None:
            self.backend.wait(ticket, op)
            setattr(state, kind, None)  # only now: a Ctrl-C may end the wait, and whoever comes next must wait again
