"""The canonical step: every point in order, for whoever has no autograd to reach them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

from zeromesh.schedule.buffer_layout import Route
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.state import Backward, Call, Reducing, Reduction
from zeromesh.schedule.transfer import Transfer

T = TypeVar("T")
Phase = Literal["forward", "recompute", "backward"]
ROOT = 0


def run_micro_batch(
    interpreter: Interpreter[T],
    *,
    last: bool,
    compute: Callable[[Phase, int], None],
    recompute: Callable[[int], bool] = lambda part: False,
    returned: Callable[[int], bool] = lambda part: True,
    parts: Sequence[int] | None = None,
) -> None:
    """Drives `interpreter` through the forward and the backward of one micro-batch. Its first unit is the root, whose
    forward encloses the others'.

    Args:
        last: whether the optimizer's step follows.
        compute: called between the points around a part's forward, recomputation or backward.
        returned: whether a backward comes back to it: not where neither it nor anything before it trains.
        parts: the unit of each part, root first; None if each unit is one part, under its own number.
    """
    calls = run_forward(interpreter, compute=compute, returned=returned, parts=parts)
    interpreter.begin_backward(Backward(last=last))
    for part, call in reversed(calls):
        interpreter.pre_backward(call)
        if recompute(part):
            interpreter.pre_forward(call.unit)
            compute("recompute", part)
            interpreter.post_forward(call.unit, backward=False)
        compute("backward", part)
    interpreter.end_backward()


def run_forward(
    interpreter: Interpreter[T],
    *,
    compute: Callable[[Phase, int], None],
    returned: Callable[[int], bool] = lambda part: True,
    parts: Sequence[int] | None = None,
) -> list[tuple[int, Call]]:
    """The forward alone; returns the calls that a backward comes back to, in the order in which they end."""
    order = interpreter.schedule.order
    called = zip(order, order, strict=True) if parts is None else enumerate(parts)
    calls: list[tuple[int, Call]] = []
    interpreter.pre_forward(ROOT)
    for part, unit in called:
        if part == ROOT:
            continue
        interpreter.pre_forward(unit)
        compute("forward", part)
        call = interpreter.post_forward(unit, backward=returned(part))
        if call is not None:
            calls.append((part, call))
    compute("forward", ROOT)
    enclosing = interpreter.post_forward(ROOT, backward=True)
    assert enclosing is not None  # its backward comes
    return [*calls, (ROOT, enclosing)]


@dataclass(slots=True)
class Counted:
    """A back end that only lists the transfers of each op, at once."""

    schedule: Schedule
    sent: list[tuple[int, Transfer]] = field(default_factory=list)

    def _list(self, unit: int, route: Route) -> None:
        self.sent.extend((unit, step) for step in route.all_steps)

    def refresh(self, unit: int) -> None:
        for placed in self.schedule.placed[unit]:
            self._list(unit, placed.routes["refresh"])

    def unshard(self, unit: int, *, from_kept: bool, after: None) -> None:
        for placed in self.schedule.placed[unit]:
            self._list(unit, placed.from_kept if from_kept else placed.routes["unshard"])

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[None]:
        for placed in (placed for placed in self.schedule.placed[unit] if placed.buffer.trainable):
            steps = placed.grad_steps(
                micro=reduction.micro, accumulate=reduction.accumulate, boundary=reduction.boundary
            )
            self.sent.extend((unit, step) for step in steps)
        return Reducing(None, None)

    def wait(self, ticket: None) -> None:
        """Nothing is ever in flight."""

    def use(self, unit: int) -> None:
        """There is no model."""

    def unuse(self, unit: int) -> None:
        """There is no model."""

    def has_grads(self, unit: int) -> bool:
        """Each is reduced when its unit's backward ends."""
        return False


def step_transfers(
    schedule: Schedule,
    *,
    micro_batches: int,
    recompute: bool = False,
    returned: Callable[[int], bool] = lambda unit: True,
    moments: Callable[[int, int], Iterable[int]] = lambda unit, buffer: (2,),
) -> list[tuple[int, Transfer]]:
    """Every collective of one step in steady state, as (unit, transfer), in the order of issue. `recompute`
    repeats the forwards of all blocks in the backward. `moments` tells, for the indices of a unit and its buffer, how
    many states of each element every optimizer keeps that steps on it on the device."""
    counted = Counted(schedule)
    for unit in schedule.order:
        for index, placed in enumerate(schedule.placed[unit]):
            counted.sent += [(unit, copy) for count in moments(unit, index) for copy in placed.stream(count)]
    interpreter = Interpreter(schedule=schedule, backend=counted)
    interpreter.stepped(range(len(schedule.units)))
    for micro in range(micro_batches):
        run_micro_batch(
            interpreter,
            last=micro == micro_batches - 1,
            compute=lambda phase, part: None,
            recompute=lambda unit: recompute and not schedule.resident(unit),
            returned=returned,
        )
    return counted.sent


def sent_bytes_per_axis(schedule: Schedule, **step: Any) -> dict[str, int]:
    """Bytes that one rank sends on each axis of the layouts (and copies, `Transfer.line`) in one step in steady state,
    in which each optimizer that steps on whole tensors steps once, on all of them; `step` as in `step_transfers`."""
    total = Counter({axis.name: 0 for axis in schedule.axes})
    for _, transfer in step_transfers(schedule, **step):
        total[transfer.line] += transfer.sent_bytes
    for bucket in chain.from_iterable(schedule.buckets):
        for shipment in (*bucket.there, *bucket.back):
            total[shipment.axis.name] += shipment.sent_bytes
    return dict(total)
