"""Which layouts are still in question, of times that are made up."""

import random
from math import exp

import pytest

from zeromesh.measure.race import CLOSE, as_good, compare, fastest, in_question, student

TRUE = {"a": 1.0, "b": 1.02, "c": 1.05, "d": 1.1, "e": 1.3, "f": 2.5}


@pytest.mark.parametrize(
    ("error", "freedom", "value"),
    [(0.025, 1, 12.706), (0.025, 2, 4.303), (0.025, 5, 2.571), (0.001, 3, 10.215), (0.001, 10, 4.144)],
)
def test_students_t_is_that_of_the_tables(error, freedom, value):
    assert student(error, freedom) == pytest.approx(value, abs=1e-3)


def test_a_slow_round_of_all_is_no_noise():
    """Each round of everything is another minute of the machine; a layout that began later is compared in its own."""
    pace = [1.0, 3.0, 0.5, 2.0]
    times = {name: {i: of * pace[i] for i in range(4)} for name, of in {"a": 1.0, "b": 1.2, "c": 1.1}.items()}
    del times["c"][1]
    assert fastest(times) == "a"
    ratios = compare(times, "a", looks=8)
    assert {name: ratio.value for name, ratio in ratios.items()} == pytest.approx({"b": 1.2, "c": 1.1})
    assert all(ratio.low > 1.09 for ratio in ratios.values())
    assert in_question(times, looks=8) == set()
    assert as_good(times, "a", looks=8) == (True, True) and as_good(times, "b", looks=8) == (False, True)


def test_one_round_tells_only_what_is_far_off():
    times = {"a": {0: 1.0}, "b": {0: 1.9}, "c": {0: 2.1}, "d": {}}
    assert in_question(times, looks=8) == {"a", "b", "d"}
    assert as_good(times, "a", looks=8) == (True, False) and as_good(times, "c", looks=8) == (False, False)
    assert in_question({"a": {0: 1.0, 1: 1.0}}, looks=8) == {"a"}  # nothing to compare with
    assert in_question({"a": {}, "b": {}}, looks=8) == {"a", "b"}


@pytest.mark.parametrize(("strays", "most_visits"), [(0.01, 26), (0.04, 38)])
def test_races_end_early_and_hardly_ever_wrong(strays, most_visits):
    """300 of them, whose error may be 5 %: what is left out is never the fastest, and what is told is true."""
    rng, visits, wrong = random.Random(0), 0, 0
    for _ in range(300):
        times, left = {name: {} for name in TRUE}, set(TRUE)
        for number in range(8):
            pace = exp(rng.gauss(0, 0.2))
            for name in left:
                times[name][number] = TRUE[name] * pace * exp(rng.gauss(0, strays))
            visits += len(left)
            left &= in_question(times, looks=8)
            if not left:
                break
        right, told = as_good(times, "c", looks=8)
        wrong += TRUE[fastest(times)] > 1 + CLOSE or (told and right)
    assert wrong <= 15 and visits / 300 <= most_visits
