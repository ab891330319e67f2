"""The interpreter's laws over random programs of points, and the program itself as golden text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.schedule.program_laws import Checked, Pass, Script
from tests.pure.schedule.test_transfers import buffer, stack
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.errors import InternalError
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.state import Backward, Reducing
from zeromesh.schedule.step import Counted, run_micro_batch
from zeromesh.schedule.unit import FlatBuffer, Role, Unit
from zeromesh.strategy import Layout

MESH = (("node", 2), ("cluster", 2))
GOLDEN = Path(__file__).parent / "golden"


EVERYTHING = Pass(calls=(1, 2, 3, 4))


def units(blocks: int, frozen: frozenset[int], parts: Mapping[int, str] = MappingProxyType({})) -> list[Unit]:
    """Root, embedding, blocks of unequal sizes, some frozen; `parts` says which have a part's parameters too."""

    def flat(index: int) -> tuple[FlatBuffer, ...]:
        own = buffer(8 * (index + 1), master_dtype=None if index in frozen else "fp32")
        return (own, buffer(8, part=parts[index])) if index in parts else (own,)

    return [
        Unit(name="", role=Role.RESIDENT, buffers=flat(0)),
        Unit(name="embed", role=Role.RESIDENT, buffers=flat(1)),
        *(Unit(name=f"blocks.{i}", role=Role.BLOCK, buffers=flat(i + 2)) for i in range(blocks)),
    ]


STRATEGIES = [notation(mix) for mix in mixes(2, kept=True)]


@st.composite
def schedules(draw):
    strategy = draw(st.sampled_from(STRATEGIES))
    prefetch = draw(st.integers(0, 3))
    overlap = draw(st.sampled_from(["all", "all", "gather", "none"]))
    frozen = frozenset(draw(st.sets(st.integers(1, 6), max_size=2)))
    host = draw(st.sampled_from(["", "", "host=1,", "host=3,", "host[50%]=3d,"]))
    layout = Layout.of(f"{host}{strategy};prefetch={prefetch};overlap={overlap}", MESH)
    parts = {name: Layout.of(draw(st.sampled_from(STRATEGIES)), MESH, part=name) for name in ("a", "b")}
    homes = draw(st.dictionaries(st.integers(0, 6), st.sampled_from(["a", "b"]), max_size=3))
    return Schedule.of(layout, units(draw(st.integers(1, 5)), frozen, homes), parts=parts)


@st.composite
def passes(draw, schedule):
    """Mostly every unit in order; sometimes one twice, out of order, left out, or with an output that is not used."""
    inner = list(range(1, len(schedule.units)))
    kind = draw(st.sampled_from(["all", "all", "some", "shuffled", "twice"]))
    if kind == "some":
        inner = [unit for unit in inner if draw(st.booleans())]
    elif kind == "shuffled":
        inner = draw(st.permutations(inner))
    elif kind == "twice":
        inner = [*inner, draw(st.sampled_from(inner))]
    return Pass(
        calls=tuple(inner),
        backward=draw(st.integers(0, 4)) > 0,
        recompute=draw(st.booleans()),
        unreached=frozenset(unit for unit in set(inner) if draw(st.integers(0, 9)) == 0),
    )


def script(schedule, eager) -> Script:
    backend = Checked(schedule, itertools.repeat(eager) if isinstance(eager, bool) else eager)
    return Script(Interpreter(schedule=schedule, backend=backend), backend)


def of(strategy: str, blocks: int = 3) -> Schedule:
    return Schedule.of(Layout.of(strategy, MESH), units(blocks, frozenset()))


@settings(max_examples=150)
@given(st.data())
def test_laws_of_random_programs(data):
    """Each unit computes with its newest parameters, no slot in use is gathered into, and each gradient reaches the
    optimizer exactly once, in any order of calls and however late the lanes."""
    schedule = data.draw(schedules())
    draws = data.draw(st.lists(st.booleans(), min_size=1, max_size=40))
    run = script(schedule, itertools.cycle(draws))
    for _ in range(data.draw(st.integers(1, 3))):
        for index in range(micro_batches := data.draw(st.integers(1, 3))):
            run.run(data.draw(passes(schedule)), last=index == micro_batches - 1 or data.draw(st.booleans()))
        everyone = set(range(len(schedule.units)))
        changed = everyone if data.draw(st.booleans()) else {unit for unit in everyone if data.draw(st.booleans())}
        trainable = {unit for unit in changed if schedule.units[unit].trainable}
        if not any(counter for counter in run.backend.accumulated):
            run.optimize(trainable)


@settings(max_examples=40)
@given(st.data())
def test_ranks_with_different_units_in_use_reduce_in_the_same_order(data):
    """Where no parameters are sharded, ranks may call different units; their reductions must still pair up."""
    text = data.draw(st.sampled_from([text for text in STRATEGIES if "3" not in text]))
    schedule = Schedule.of(Layout.of(text, MESH), units(4, frozenset()))
    runs = [script(schedule, itertools.cycle([data.draw(st.booleans())])) for _ in range(2)]
    for _ in range(3):
        for last in data.draw(st.sampled_from([(False, True), (True,), (True, False, True)])):
            for run in runs:
                run.run(replace(data.draw(passes(schedule)), backward=True), last=last)
        assert runs[0].backend.sent == runs[1].backend.sent
        for run in runs:
            run.optimize(set(range(len(schedule.units))))


@settings(max_examples=30)
@given(st.data())
def test_ranks_whose_losses_use_other_outputs_issue_the_same(data):
    """All call the same units in the same order; outputs that a loss does not use are passed in their turn. Points
    decide which operations are issued, never the time that a wait took."""
    schedule = data.draw(schedules())
    drawn = [replace(data.draw(passes(schedule)), backward=True) for _ in range(data.draw(st.integers(1, 3)))]
    seen = []
    for _ in range(2):
        run = script(schedule, itertools.repeat(data.draw(st.booleans())))
        for index, one in enumerate(drawn):
            unreached = frozenset(unit for unit in set(one.calls) if data.draw(st.booleans()))
            run.run(replace(one, unreached=unreached, recompute=False), last=index == len(drawn) - 1)
        seen.append((run.backend.sent, run.interpreter.digest))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3", "node=3d,cluster=1"])
def test_units_are_reduced_as_the_backward_leaves_them(strategy):
    """Each when the one before it is entered, also where the output of a unit after it is not used."""
    run = script(of(f"{strategy};overlap=none", 4), True)
    calls = {call.unit: call for call in run.forward(Pass(calls=(1, 2, 3, 4, 5)))}
    reduced = []
    for unit in (0, 4, 3, 2, 1):
        run.interpreter.pre_backward(calls[unit])
        run.grads(unit)
        reduced.append([sent for sent, *_ in run.backend.sent])
    assert reduced == [[], [5], [5, 4], [5, 4, 3], [5, 4, 3, 2]]


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3d,cluster=1", "node=2,cluster=2"])
def test_a_unit_whose_turn_had_passed_is_entered_once_more(strategy):
    """Autograd comes to it after one that was called before it."""
    run = script(of(strategy), True)
    calls = {call.unit: call for call in run.forward(EVERYTHING)}
    run.interpreter.begin_backward(Backward(last=True))
    for unit in (0, 4, 2, 3, 1):
        run.interpreter.pre_backward(calls[unit])
        run.backend.require_valid(unit)
        run.grads(unit)
    run.interpreter.end_backward()
    assert run.backend.reduced == run.expected


class Slow(Counted):
    """A back end all of whose transfers are under way until they are waited for."""

    def refresh(self, unit):
        super().refresh(unit)
        return "refreshed"

    def unshard(self, unit, **after):
        super().unshard(unit, **after)
        return "gathered"

    def reduce(self, unit, reduction):
        super().reduce(unit, reduction)
        return Reducing(taken="taken", done="reduced")


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3", "node=2,cluster=2", "node=0,cluster=0"])
def test_without_overlap_nothing_is_under_way_while_anything_computes(strategy):
    """The root too, which is reduced at the end of each backward."""
    schedule = of(f"{strategy};overlap=none", 4)
    interpreter = Interpreter(schedule=schedule, backend=Slow(schedule))
    interpreter.stepped(range(len(schedule.units)))
    computed = []

    def compute(phase, unit):
        computed.append(unit)
        for state in interpreter.states:
            assert (state.refreshing, state.ticket, state.taking, state.reducing) == (None,) * 4, (phase, unit)

    for last in (False, False, True):
        run_micro_batch(interpreter, last=last, compute=compute)
    assert len(computed) == 3 * 2 * len(schedule.units)


def test_the_order_is_learned_between_steps():
    schedule = of("node=3,cluster=1", 4)
    run = script(schedule, False)
    order = (5, 2, 4, 3, 1)
    run.run(Pass(calls=order), last=True)
    run.interpreter.adopt(schedule.reordered([0, *order]))
    run.optimize(set(range(6)))
    run.run(Pass(calls=order), last=True)
    assert run.interpreter.schedule.order == (0, *order)


@pytest.mark.parametrize("strategy", ["node=1,cluster=1", "node=3,cluster=1", "node=3,cluster=3k", "node=2,cluster=1"])
def test_a_wait_that_was_interrupted_is_waited_for_again(strategy):
    """Ctrl-C comes where a step stands longest; the next forward must not compute with parameters still under way."""
    for wait in range(6):
        run = script(of(strategy), False)
        run.run(EVERYTHING, last=True)
        run.optimize(set(range(5)))
        run.backend.interrupted_wait = run.backend.waits + wait
        with suppress(KeyboardInterrupt):
            run.forward(EVERYTHING)
        run.interpreter.abort()
        run.backend.interrupted_wait = None
        run.run(EVERYTHING, last=True)


@pytest.mark.parametrize("strategy", ["node=1,cluster=1", "node=0,cluster=0", "node=3d,cluster=1"])
def test_sums_of_an_interrupted_backward_end_before_new_gradients_are_added(strategy):
    run = script(of(strategy), False)
    for call in run.forward(EVERYTHING)[:1:-1]:
        run.interpreter.pre_backward(call)
        run.grads(call.unit)
    run.interpreter.abort()
    run.backend.leaves = [Counter() for _ in run.backend.leaves]
    run.begin_step()
    run.run(EVERYTHING, last=True)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3k", "node=2,cluster=0"])
def test_an_aborted_backward_leaves_nothing_in_use(strategy):
    run = script(of(strategy), False)
    calls = run.forward(EVERYTHING)
    for call in calls[:-3:-1]:
        run.interpreter.pre_backward(call)
    with pytest.raises(InternalError, match=r"unit 'blocks\.2' changed while its backward runs"):
        run.interpreter.stepped([4])
    run.interpreter.abort()
    assert not run.backend.used and run.interpreter.backward is None
    run.backend.lanes["gather inner"].jobs.clear()


@pytest.mark.parametrize("name", ["node=3,cluster=1", "node=1,cluster=3k;prefetch=2", "node=2,cluster=0;overlap=none"])
def test_the_program_as_text(name):
    """To accept a change on purpose, write the text printed below into the file."""
    program = Schedule.of(Layout.of(name, MESH), stack(16, blocks=3)).program
    lines = [
        f"{point.value:<14} {'' if unit < 0 else unit:>3}  {' '.join(map(str, ops))}"
        for (point, unit), ops in program.items()
    ]
    text = "\n".join(lines) + "\n"
    path = GOLDEN / f"{name.replace(';', ' ')}.txt"
    assert path.read_text() == text, f"{path.name} should be:\n{text}"


# ---- When refreshes start: [Note: Window] of `zeromesh.schedule.program`


@dataclass(slots=True)
class Issued(Counted):
    """Notes which gathers and refreshes start, and which units compute, in order."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    def refresh(self, unit: int) -> None:
        self.calls.append(("refresh", unit))

    def unshard(self, unit: int, *, from_kept: bool, after: None) -> None:
        self.calls.append(("gather", unit))


def issued(strategy: str, order: list[int]) -> tuple[list[tuple[str, int]], int]:
    """The calls of a step's update and of two micro-batches after it, and how many the update has made."""
    schedule = Schedule.of(Layout.of(strategy, MESH), stack(16, blocks=5)).reordered(order)
    backend = Issued(schedule)
    interpreter = Interpreter(schedule=schedule, backend=backend)
    interpreter.stepped(range(len(schedule.units)))
    made = len(backend.calls)
    for last in (False, True):
        run_micro_batch(interpreter, last=last, compute=lambda phase, unit: backend.calls.append((phase, unit)))
    return backend.calls, made


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 5, 2, 4]])
def test_no_gather_waits_for_a_refresh_that_it_does_not_need(prefetch: int, order: list[int]):
    calls, made = issued(f"node=3,cluster=1;prefetch={prefetch}", order)
    refreshed, first = list[int](), dict.fromkeys(unit for kind, unit in calls if kind == "gather")
    for kind, unit in calls:
        if kind == "refresh":
            refreshed.append(unit)
        elif kind == "forward" and unit:
            begun = order[: order.index(unit) + prefetch + 2]
            assert set(begun[1:]) <= set(refreshed)  # those that are prefetched, and one more: the lane is at work
        elif kind == "gather" and first.pop(unit, 0) is None:
            assert len(refreshed[refreshed.index(unit) :]) <= 2  # its own, and one that begins as its own ends
    assert refreshed == order[1:]  # the root, which comes first, trains nothing
    assert made == 2


def test_where_ranks_may_call_other_units_all_start_with_the_step():
    calls, made = issued("node=1,cluster=1", [0, 1, 2, 3, 4, 5])
    assert calls[:made] == [("refresh", unit) for unit in range(1, 6)]
    assert not {"refresh", "gather"} & {kind for kind, _ in calls[made:]}


@pytest.mark.parametrize("strategy", ["host=1,node=3,cluster=1", "host=3,node=0,cluster=0", "host=2,node=0,cluster=0"])
def test_a_forward_waits_for_the_next_unit_s_step_on_the_host_and_no_later_one(strategy: str):
    calls, made = issued(strategy, [0, 1, 2, 3, 4, 5])
    assert made == 0 and [unit for kind, unit in calls if kind == "refresh"] == [1, 2, 3, 4, 5]
    for unit in range(2, 6):
        before = calls[: calls.index(("forward", unit - 1))]
        assert ("refresh", unit) in before and ("refresh", unit + 1) not in before


def test_where_ranks_send_refreshes_and_may_call_other_units_the_host_s_start_with_the_step_too():
    calls, made = issued("host=2,node=1,cluster=0", [0, 1, 2, 3, 4, 5])
    assert calls[:made] == [("refresh", unit) for unit in range(1, 6)]
