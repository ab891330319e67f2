"""Carries out a schedule's ops as the points of a step are reached. Engine and simulator are its two back ends.

The interpreter knows which copy of which unit is valid, who holds which slot and which gradients have been reduced; it
never touches a tensor or a clock. Its decisions depend only on the sequence of points, so ranks that reach the same
points issue the same collectives in the same order.

[Note: Gathered states] A unit's gathered parameters are, by `UnitState.full` and `in_use`:

    not full          no valid copy; its slot may hold another unit
    full, not in use  gathered, or being gathered (`ticket`), or used and not yet overwritten; may be evicted
    full, in use      between UNSHARD and RESHARD: views into the slot are live, so nothing may be gathered into it

[Note: Generations] Every step, load or change by hand raises a unit's generation; a copy made from an older one is not
used again.

[Note: Gradient states] A unit's gradient within one step. EMPTY: nothing is accumulated. PARTIAL: the accumulator holds
micro-batches, reduced over the axes of `grad_axes` only. REDUCED: the state shard holds the reduced gradient. Later
gradients of the same backward are reduced by themselves and then added, so nothing is reduced twice.

[Note: Turns] Where parameters are sharded a unit is reduced as soon as its calls are over: [Note: Reverse]. Elsewhere
ranks may call different units, so reductions are issued in the reverse of an order that all share, each once in a
backward: docs/decisions/0003.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from zeromesh.errors import InternalError, ModelError
from zeromesh.schedule.program import Action, Op, PointKind, Schedule
from zeromesh.schedule.state import Backend, Backward, Call, Forward, GradState, Reduction

T = TypeVar("T")


@dataclass(slots=True)
class UnitState(Generic[T]):
    """The state of one unit; generations count from 1, so 0 is never valid."""

    generation: int = 1  # of its masters: [Note: Generations]
    refreshed: int = 1  # the generation of masters from which its compute copy was made
    full: int = 0  # the generation in its gather slot
    kept: int = 0  # the generation of its kept copy
    in_use: bool = False  # the model is pointed at the gathered parameters
    ticket: T | None = None  # ticket of a gather under way
    refreshing: T | None = None  # ticket of a refresh under way
    taking: T | None = None  # ticket of a reduction that still reads the reduce slot
    reducing: T | None = None  # ticket of a reduction under way
    grad: GradState = GradState.EMPTY  # how far this step's gradient is


@dataclass(slots=True)
class Interpreter(Generic[T]):
    """Runs `schedule` on `backend`."""

    schedule: Schedule
    backend: Backend[T]
    # Called at every point, before its ops: an observer for traces.
    watch: Callable[[PointKind, int], None] = lambda point, unit: None
    states: list[UnitState[T]] = field(init=False)
    gather_slots: list[int | None] = field(init=False)  # which unit has each; None is free
    reduce_slots: list[int | None] = field(init=False)  # likewise
    forward: Forward | None = None  # the one that runs, outside a backward or (a recomputation) inside
    backward: Backward | None = None
    seen: list[int] = field(default_factory=list)  # units in the order of their first forward
    returned: set[int] = field(default_factory=set)  # units with a forward that a backward comes back to
    digest: int = 0  # checksum of all gathers so far, to be compared between ranks
    awaited: set[int] = field(default_factory=set)  # units whose forward no backward has followed
    # Calls of each trainable unit that a reentrant checkpoint made without autograd, and is to repeat in a backward.
    to_repeat: Counter[int] = field(default_factory=Counter)
    _graphs: weakref.WeakSet[Forward] = field(default_factory=weakref.WeakSet)  # to which a backward may come back
    _forwards: int = 0  # how many have begun

    def __post_init__(self) -> None:
        self.states = [UnitState() for _ in self.schedule.units]
        self.gather_slots = [None] * len(self.schedule.memory.gather.slot_bytes)
        self.reduce_slots = [None] * len(self.schedule.memory.reduce.slot_bytes)

    # ---- points

    def pre_forward(self, unit: int, *, read: bool = False) -> None:
        """Before a unit's forward, or its repetition inside the backward; or when another unit's forward has `read` its
        parameters, so that it is open until the outermost forward ends."""
        if self.forward is None:
            self._forwards += 1
            self.forward = Forward(self._forwards, repeats=self.backward is not None)
        self.forward.begin(unit, read=read)
        if self.backward is not None:
            return self._run(PointKind.PRE_RECOMPUTE, unit)
        if unit not in self.seen:
            self.seen.append(unit)
        self._run(PointKind.PRE_FORWARD, unit)

    def post_forward(self, unit: int, *, backward: bool, hidden: bool = False, untraced: bool = False) -> Call | None:
        """After a unit's forward.

        Args:
            backward: whether its outputs will bring the call that is returned to `pre_backward`.
            hidden: nothing of its outputs can, though a gradient may come to its parameters.
            untraced: the call was made inside an autograd.Function, so autograd did not record it.
        """
        forward = self.forward
        if forward is None:  # it was given up from inside
            return None
        end = forward.end(unit, backward=backward)
        if hidden:
            forward.hidden.add(unit)
        if untraced and self.backward is None and self.schedule.units[unit].trainable:
            self.to_repeat[unit] += 1
        if not forward.running:
            self.forward = None
        if not forward.runs(unit):
            self._run(PointKind.POST_RECOMPUTE if self.backward is not None else PointKind.POST_FORWARD, unit)
        if self.forward is None and self.backward is None:
            # Without a backward to come, units that stayed gathered may go.
            if not forward.calls and not forward.hidden:
                self._run(PointKind.END_FORWARD)
            self._run(PointKind.LEAVE)
        if end is None:
            return None
        self.awaited.add(unit)
        self.returned.add(unit)
        self._graphs.add(forward)
        return Call(forward, unit, end, self.states[unit].generation)

    def begin_backward(self, backward: Backward | None = None) -> Backward:
        """When the first gradient of a backward has arrived. Returns the running backward, or begins this one."""
        self.backward = self.backward or backward or Backward()
        return self.backward

    def pre_backward(self, call: Call) -> None:
        """When the gradient of a call's output has arrived."""
        backward, generation = self.begin_backward(), self.states[call.unit].generation
        if call.generation != generation:
            backward.stale[call.unit] = min(call.generation, backward.stale.get(call.unit, call.generation))
        self.back_through(later for later in backward.reached if later.number > call.forward.number)
        self._go_back(call.forward, call.end)
        if not self.states[call.unit].in_use:  # its turn had passed: entered once more
            self._run(PointKind.PRE_BACKWARD, call.unit)

    def end_backward(self) -> None:
        """When autograd has ended. After a last micro-batch every reduced gradient is there on return."""
        backward = self.begin_backward()
        self.back_through(backward.reached)
        self._run(PointKind.END_BACKWARD)
        if not backward.inputs_only:
            self.awaited.clear()
        self.backward = None
        # A forward may run a backward, of forces say, and go on: its units must be open again.
        for _, unit in self.forward.running if self.forward is not None else ():
            self._unshard(unit)

    def back_through(self, forwards: Iterable[Forward]) -> None:
        """Goes back to the beginnings of forwards, the latest first: at the end of a backward, or in the second half of
        a split one."""
        for forward in sorted(forwards, key=lambda forward: -forward.number):
            self._go_back(forward, 0)

    def stepped(self, units: Iterable[int], *, refresh: Iterable[int] | None = None) -> None:
        """An optimizer, a load or the user has changed the masters of `units`. `refresh` has the units, of this call or
        of earlier ones, to be refreshed now; None for `units`."""
        self.watch(PointKind.STEPPED, -1)
        changed = set(units)
        for unit in changed:
            self.invalidate(unit)
        now = changed if refresh is None else set(refresh)
        for op in self.schedule.ops(PointKind.STEPPED) if now else ():
            if op.unit in now or op.action is Action.SYNC:
                self._do(op)

    # ---- for the back end

    def invalidate(self, unit: int) -> None:
        """Raises the unit's generation: [Note: Generations]."""
        state = self.states[unit]
        if state.in_use and self.backward is not None:
            raise InternalError(f"unit {self.schedule.units[unit].name!r} changed while its backward runs")
        state.generation += 1
        self.to_repeat.pop(unit, None)  # those that were not repeated until now have lost their backward

    def begin_step(self) -> None:
        """Discards all sums. It waits for reductions under way, whose results nobody reads."""
        for state in self.states:
            self._settle(state, "taking", "reducing")
            state.grad = GradState.EMPTY

    def abort(self) -> None:
        """After a forward or backward that did not end: nothing is in use any more."""
        for unit, state in enumerate(self.states):
            if state.in_use:
                self._reshard(unit)
        self.forward = self.backward = None
        self.awaited.clear()

    def forget(self) -> None:
        """Counts all gathered parameters as gone."""
        for unit in range(len(self.states)):
            self._drop(unit)

    def catch_up(self) -> None:
        """Starts the refreshes that no forward has asked for yet."""
        for unit in self.schedule.order:
            self._refresh(unit)

    def quiesce(self) -> None:
        """Waits for everything in flight: before masters change, are saved or loaded."""
        for state in self.states:
            self._settle(state, "refreshing", "ticket", "taking", "reducing")

    def adopt(self, schedule: Schedule) -> None:
        """Continues with the same units, in another order or with other buckets; between steps only."""
        self.schedule = schedule

    def watched(self, watch: Callable[[PointKind, int], None]) -> Callable[[PointKind, int], None]:
        """From now on calls `watch` at points; returns the observer before it."""
        before, self.watch = self.watch, watch
        return before

    # ---- back through the calls of a forward

    def _go_back(self, forward: Forward, to: int) -> None:
        """Passes the marks of `forward` from `to` on: [Note: Reverse]."""
        backward = self._running
        if forward not in backward.reached:
            backward.reach(forward)
            for unit in forward.hidden:
                self._require_seen(unit)
        position = backward.reached[forward]
        while position > to:
            position -= 1
            backward.reached[forward] = position
            mark = forward.marks[position]
            if mark is None:
                continue
            unit, ends = mark
            if ends:
                self._run(PointKind.PRE_BACKWARD, unit)
                continue
            backward.left[forward, unit] += 1
            if forward.repeats and not backward.retains and self.to_repeat[unit]:
                self.to_repeat[unit] -= 1
            if backward.has_left(forward, unit):
                backward.bring(unit)
                self._run(PointKind.POST_BACKWARD, unit)

    # ---- ops

    @property
    def _running(self) -> Backward:
        assert self.backward is not None
        return self.backward

    def _run(self, point: PointKind, unit: int = -1) -> None:
        self.watch(point, unit)
        for op in self.schedule.ops(point, unit):
            self._do(op)

    def _do(self, op: Op) -> None:
        match op.action:
            case Action.REFRESH:
                self._refresh(op.unit)
            case Action.PREFETCH if self.backward is None or op.unit in self.returned:
                self._gather(op.unit, prefetch=True)
            case Action.UNSHARD:
                self._unshard(op.unit)
            case Action.RESHARD:
                self._reshard(op.unit)
            case Action.DROP:
                self._drop(op.unit)
            case Action.REDUCE | Action.FLUSH if self.backward is not None and self.backward.inputs_only:
                pass
            case Action.REDUCE if self.schedule.shards_params:
                self._reduce(op.unit)
            case Action.REDUCE:
                self._take_turns()
            case Action.SYNC if op.unit < 0:
                self.quiesce()
            case Action.SYNC if self._running.last or self.schedule.layout.strategy.overlap == "none":
                self._settle(self.states[op.unit], "taking", "reducing")
            case Action.FLUSH:
                self._flush()

    def _refresh(self, unit: int) -> None:
        state = self.states[unit]
        if state.refreshed == state.generation:
            return
        state.refreshed = state.generation
        if self.schedule.units[unit].trainable:
            state.refreshing = self.backend.refresh(unit)

    def _unshard(self, unit: int) -> None:
        state = self.states[unit]
        self._gather(unit, prefetch=False)
        self._settle(state, "refreshing", "ticket")
        if not state.in_use:
            self.backend.use(unit)
            state.in_use = True

    def _gather(self, unit: int, *, prefetch: bool) -> None:
        self._refresh(unit)
        state, slot = self.states[unit], self.schedule.memory.gather.slot_of[unit]
        if slot is None or state.full == state.generation:
            return
        owner = self.gather_slots[slot]
        if owner is not None and owner != unit and not self._evict(owner, unit, prefetch):
            return
        self.gather_slots[slot] = unit
        kept = self.backward is not None and state.kept == state.generation
        from_kept = kept and self.schedule.memory.keeps(unit)
        self.digest = zlib.crc32(b"%d %d" % (unit, from_kept), self.digest)
        state.ticket = self.backend.unshard(unit, from_kept=from_kept, after=state.refreshing)
        state.full = state.kept = state.generation

    def _evict(self, owner: int, unit: int, prefetch: bool) -> bool:
        """Frees the slot that `owner` holds, unless a mere prefetch wants it while it is of use."""
        state = self.states[owner]
        if prefetch and (state.in_use or state.ticket is not None):
            return False
        if state.in_use and self.backward is None:
            names = [self.schedule.units[index].name for index in (owner, unit)]
            raise ModelError(
                f"units {names[0]!r} and {names[1]!r} are in use at once but share a gather slot, since neither is "
                f"registered inside the other; name one of them in `resident` so that it has a slot of its own"
            )
        if state.in_use:
            # A unit that is called again earlier in the graph: the calls after that point have finished their backward.
            self._reshard(owner)
        self._settle(state, "ticket")
        state.full = 0
        return True

    def _reshard(self, unit: int) -> None:
        state = self.states[unit]
        if state.in_use:
            state.in_use = False
            self.backend.unuse(unit)

    def _drop(self, unit: int) -> None:
        """Does not wait for a gather under way: whoever next writes to the slot or to its source does. A rank that has
        gathered a unit which no other rank gathers would hang here, before ranks compare their calls."""
        self._reshard(unit)
        state = self.states[unit]
        state.full = state.kept = 0

    # ---- reductions: [Note: Turns]

    def _take_turns(self) -> None:
        order, backward = self.schedule.order, self._running
        while backward.turn < len(order) and not self._is_awaited(order[-1 - backward.turn]):
            self._reduce_in_turn(order[-1 - backward.turn])

    def _is_awaited(self, unit: int) -> bool:
        """Whether this rank may come back to a call of the unit, in this backward."""
        backward = self._running
        # Without this, a reentrant checkpoint's gradients could come after the turn, on some ranks only.
        if self.to_repeat[unit]:
            return True
        for forward in self._graphs:
            over = forward.over and forward not in backward.reached  # in another backward
            if unit in forward.hidden or not (over or backward.has_left(forward, unit)):
                return True
        return False

    def _reduce_in_turn(self, unit: int) -> None:
        self._running.take_turn()
        due = self._running.last or self.schedule.reduces_each(unit)
        if self.schedule.units[unit].trainable and (due or self.backend.has_grads(unit)):
            self._reduce(unit)

    def _reduce(self, unit: int, *, micro: bool = True) -> None:
        state, slot, backward = self.states[unit], self.schedule.memory.reduce.slot_of[unit], self._running
        backward.reduced.add(unit)
        if slot is not None:
            owner = self.reduce_slots[slot]
            if owner is not None:
                self._settle(self.states[owner], "taking")
            self.reduce_slots[slot] = unit
        self._settle(state, "taking", "reducing")
        reduction = Reduction(
            micro=micro,
            accumulate=state.grad is GradState.PARTIAL,
            boundary=backward.last,
            add=state.grad is GradState.REDUCED,
            scale=backward.scale,
            stale=backward.stale.get(unit),
        )
        issued = self.backend.reduce(unit, reduction)
        state.taking, state.reducing = issued.taken, issued.done
        state.grad = GradState.REDUCED if backward.last else GradState.PARTIAL

    def _flush(self) -> None:
        backward = self._running
        for position, unit in enumerate(reversed(self.schedule.order)):
            if position == backward.turn and not self.schedule.shards_params:
                self._reduce_in_turn(unit)
            if not self.schedule.units[unit].trainable:
                continue
            if self.backend.has_grads(unit):
                self._require_seen(unit)
                self._reduce(unit)
            elif backward.last and self.states[unit].grad is GradState.PARTIAL:
                self._reduce(unit, micro=False)
        for state in self.states:
            if backward.last or self.schedule.layout.strategy.overlap == "none":  # shown as `.grad` from here on
                self._settle(state, "taking", "reducing")

    def _require_seen(self, unit: int) -> None:
        """Raises ModelError for gradients computed with another unit's parameters, in a slot that units share."""
        if self.schedule.shares_slot(unit) and unit not in self._running.reduced:
            raise ModelError(
                f"the backward of unit {self.schedule.units[unit].name!r} began unseen, and so may have used another "
                f"unit's parameters: its forward must return tensors, or tuples, lists, mappings or dataclasses of them"
            )

    def _settle(self, state: UnitState[T], *tickets: str) -> None:
        for kind in tickets:
            ticket: T | None = getattr(state, kind)
            if ticket is not None:
                self.backend.wait(ticket)
                setattr(state, kind, None)  # only now: a Ctrl-C may end the wait, and who comes next must wait again
