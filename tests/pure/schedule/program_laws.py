"""A back end that checks every law of the interpreter, and random training scripts to run it with.

Jobs of a lane run in the order of issue, but as late or as early as the draw says: at latest when somebody waits. So a
missing wait is seen as a value that is not there yet, and a slot reused too early as one that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.state import Backward, Call, Reducing, Reduction
from zeromesh.schedule.unit import Role

ROOT = 0


@dataclass(slots=True, eq=False)
class Job:
    run: Callable[[], None]
    lane: Lane
    after: Job | None = None
    done: bool = False


@dataclass(slots=True)
class Lane:
    """One queue of jobs."""

    eager: Iterator[bool]
    jobs: list[Job] = field(default_factory=list)

    def submit(self, run: Callable[[], None], after: Job | None = None) -> Job:
        job = Job(run, self, after)
        self.jobs.append(job)
        if next(self.eager):
            self.finish(job)
        return job

    def finish(self, job: Job) -> None:
        while not job.done:
            first = self.jobs.pop(0)
            if first.after is not None:
                first.after.lane.finish(first.after)
            first.run()
            first.done = True


Contribution = tuple[int, int, int]
"""(step, micro-batch, unit): one backward's gradient of one unit."""


@dataclass(slots=True)
class Checked:
    """Runs ops on names of values instead of values, and asserts that each is the right one."""

    schedule: Schedule
    eager: Iterator[bool]
    lanes: dict[str, Lane] = field(init=False)
    master: list[int] = field(init=False)
    params: list[int] = field(init=False)
    kept: list[int] = field(init=False)
    gathered: dict[int, tuple[int, int]] = field(default_factory=dict)
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)  # gathers over the outer axis
    used: set[int] = field(default_factory=set)
    waiting: dict[int, tuple[int, Counter[Contribution]]] = field(default_factory=dict)
    accumulated: list[Counter[Contribution]] = field(init=False)
    reduced: list[Counter[Contribution]] = field(init=False)
    leaves: list[Counter[Contribution]] = field(init=False)
    sent: list[tuple[int, bool, bool]] = field(default_factory=list)
    waits: int = 0
    interrupted_wait: int | None = None

    def __post_init__(self) -> None:
        count = len(self.schedule.units)
        self.lanes = {f"{way} {axis}": Lane(self.eager) for way in ("gather", "reduce") for axis in ("inner", "outer")}
        self.master, self.params, self.kept = [1] * count, [1] * count, [0] * count
        self.accumulated = [Counter() for _ in range(count)]
        self.reduced = [Counter() for _ in range(count)]
        self.leaves = [Counter() for _ in range(count)]

    # ---- schedule.Backend

    def refresh(self, unit: int) -> Job:
        def run() -> None:
            self.params[unit] = self.master[unit]

        return self.lanes["gather outer"].submit(run)

    def unshard(self, unit: int, *, from_kept: bool, after: Job | None) -> Job:
        slot = self.schedule.memory.gather.slot_of[unit]
        assert slot is not None

        def begin() -> None:
            others = [other for other in self.used if self.schedule.memory.gather.slot_of[other] == slot]
            assert others in ([], [unit]), f"{unit} is gathered into the slot that {others} use"
            self.gathered[slot] = (unit, 0)
            self.begun[slot] = (unit, self.kept[unit] if from_kept else self.params[unit])

        def run() -> None:
            owner, source = self.begun[slot]
            assert owner == unit, f"{owner} is gathered into the slot while {unit} is"
            self.gathered[slot] = (unit, source)
            if not from_kept:
                self.kept[unit] = source

        return self.lanes["gather inner"].submit(run, self.lanes["gather outer"].submit(begin, after))

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[Job]:
        slot = self.schedule.memory.reduce.slot_of[unit]
        terms, self.leaves[unit] = self.leaves[unit], Counter()
        assert reduction.micro or not terms, f"the gradients of {unit} are left behind"
        before = self.reduced[unit] if reduction.add else Counter()
        if reduction.micro and slot is not None:
            assert slot not in self.waiting, f"{unit} writes gradients over those of {self.waiting[slot][0]}"
            self.waiting[slot] = (unit, terms)
        elif reduction.micro:
            self.accumulated[unit] = (self.accumulated[unit] if reduction.accumulate else Counter()) + terms
        micro = reduction.micro and self.schedule.reduces_each(unit)
        if micro or reduction.boundary:
            self.sent.append((unit, micro, reduction.boundary))

        def begin() -> None:
            if slot is not None and reduction.micro:
                owner, _ = self.waiting[slot]
                assert owner == unit, f"the reduction of {unit} finds the gradients of {owner} in its slot"

        def take() -> None:
            if slot is not None and reduction.micro:
                _, waiting = self.waiting.pop(slot)
                self.accumulated[unit] = (self.accumulated[unit] if reduction.accumulate else Counter()) + waiting

        def finish() -> None:
            self.reduced[unit], self.accumulated[unit] = self.accumulated[unit] + before, Counter()

        taken = self.lanes["reduce outer"].submit(take, self.lanes["reduce inner"].submit(begin))
        return Reducing(taken, self.lanes["reduce outer"].submit(finish, taken) if reduction.boundary else taken)

    def wait(self, ticket: Job) -> None:
        self.waits += 1
        if self.waits - 1 == self.interrupted_wait:
            raise KeyboardInterrupt
        ticket.lane.finish(ticket)

    def use(self, unit: int) -> None:
        self.used.add(unit)
        self.require_valid(unit)

    def unuse(self, unit: int) -> None:
        self.used.discard(unit)

    def has_grads(self, unit: int) -> bool:
        return bool(self.leaves[unit])

    # ---- parameters under computation

    def require_valid(self, unit: int) -> None:
        """The unit may compute: the newest parameters are there."""
        assert unit in self.used, f"{unit} computes without its parameters"
        slot = self.schedule.memory.gather.slot_of[unit]
        held = (unit, self.params[unit]) if slot is None else self.gathered.get(slot)
        assert held == (unit, self.master[unit]), f"{unit} computes with {held}, its master is {self.master[unit]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward, perhaps with a backward.

    Args:
        calls: units in the order in which they are called, root aside; one may stand twice.
        backward: whether a backward follows.
        recompute: whether the backward repeats each block's forward.
        unreached: units whose output gets no gradient.
    """

    calls: tuple[int, ...]
    backward: bool = True
    recompute: bool = False
    unreached: frozenset[int] = frozenset()


@dataclass(slots=True)
class Script:
    """Drives an interpreter over a checked back end through passes and steps, as autograd would."""

    interpreter: Interpreter[Job]
    backend: Checked
    step: int = 0
    micro: int = 0
    expected: list[Counter[Contribution]] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = [Counter() for _ in self.backend.schedule.units]

    def run(self, one: Pass, *, last: bool) -> None:
        calls = self.forward(one)
        if one.backward:
            self.backward(one, calls, last=last)
            if last:
                for unit, shape in enumerate(self.backend.schedule.units):
                    if shape.trainable:
                        assert self.backend.reduced[unit] == self.expected[unit], f"gradient of {unit}"
                self.begin_step()
        self.micro += 1

    def begin_step(self) -> None:
        """Gradients that were shown are set aside."""
        self.interpreter.begin_step()
        for expected in self.expected:
            expected.clear()
        self.backend.reduced = [Counter() for _ in self.expected]
        self.backend.accumulated = [Counter() for _ in self.expected]

    def forward(self, one: Pass) -> list[Call]:
        """The calls that autograd will reach, in order, the root's last."""
        interpreter, calls = self.interpreter, list[Call | None]()
        interpreter.pre_forward(ROOT)
        for unit in one.calls:
            interpreter.pre_forward(unit)
            self.backend.require_valid(unit)
            self.backend.require_valid(ROOT)
            calls.append(interpreter.post_forward(unit, backward=one.backward))
        calls.append(interpreter.post_forward(ROOT, backward=one.backward))
        return [call for call in calls if call is not None]

    def backward(self, one: Pass, calls: list[Call], *, last: bool) -> None:
        interpreter, backend = self.interpreter, self.backend
        interpreter.begin_backward(Backward(last=last))
        for call in reversed(calls):
            if call.unit in one.unreached:
                continue
            interpreter.pre_backward(call)
            backend.require_valid(call.unit)
            if one.recompute and backend.schedule.units[call.unit].role is Role.BLOCK:
                interpreter.pre_forward(call.unit)
                backend.require_valid(call.unit)
                interpreter.post_forward(call.unit, backward=False)
            backend.require_valid(ROOT)
            self.grads(call.unit)
        interpreter.end_backward()

    def grads(self, unit: int) -> None:
        """Autograd has computed the gradients of a unit."""
        if self.backend.schedule.units[unit].trainable:
            contribution = (self.step, self.micro, unit)
            self.expected[unit][contribution] += 1
            self.backend.leaves[unit][contribution] += 1

    def optimize(self, units: set[int]) -> None:
        """The optimizer changes the masters of `units`, as the engine's hooks report it."""
        self.interpreter.quiesce()
        for unit in units:
            self.backend.master[unit] += 1
        self.interpreter.stepped(units)
        self.step += 1
