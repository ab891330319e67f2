import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import InputError, MeasurementError
from zeromesh.measure.fit import Line, fit

SIZES = [1 << power for power in (12, 14, 16, 18, 20, 22)]


def timings(line: Line, *, noise: float = 0.0, rounds: int = 16, seed: int = 0) -> dict[int, list[float]]:
    """Timings that are never shorter than the line says, as real ones."""
    draw = random.Random(seed)
    return {
        size: [line.seconds(size) * (1 + draw.expovariate(1 / noise) if noise else 1) for _ in range(rounds)]
        for size in SIZES
    }


@settings(deadline=None, max_examples=50)
@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e11))
def test_a_line_is_found_again(latency, rate):
    found = fit(timings(Line(latency_s=latency, bytes_per_s=rate))).line
    # Where the latency hides the longest transfer, or the other way round, only their sum is known.
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(latency + size / rate, rel=1e-3)
    if 0.1 < latency * rate / SIZES[2] < 10:
        assert (found.latency_s, found.bytes_per_s) == pytest.approx((latency, rate), rel=1e-3)


def test_what_a_bucket_lets_pass_at_once_does_not_make_its_link_faster():
    """128 KiB are there at once, the rest comes at the link's rate."""
    rate, latency, burst = 6e7, 1e-3, 131072
    seconds = {size: latency + max(0, size - burst) / rate for size in SIZES}
    found = fit({size: [s] * 8 for size, s in seconds.items()}).line
    assert found.bytes_per_s == pytest.approx(rate, rel=0.03)
    assert found.latency_s == pytest.approx(latency, rel=0.5)


def test_noise_moves_the_line_by_no_more_than_its_median():
    line = Line(latency_s=1e-4, bytes_per_s=5e8)
    found = fit(timings(line, noise=0.1))
    assert found.line.bytes_per_s == pytest.approx(line.bytes_per_s / 1.07, rel=0.08)
    assert 0.02 < found.spread < 0.12 and found.disagreement < 0.25
    found.require_trust("here")


def test_a_few_disturbed_rounds_do_not_matter():
    clean = timings(Line(latency_s=1e-4, bytes_per_s=5e8))
    disturbed = {size: [t * 10 if i % 5 == 0 else t for i, t in enumerate(times)] for size, times in clean.items()}
    assert fit(disturbed).line == fit(clean).line


def test_halves_that_disagree_are_not_trusted():
    clean = timings(Line(latency_s=1e-4, bytes_per_s=5e8))
    loaded = {size: [t * (1 if i < 8 else 2) for i, t in enumerate(times)] for size, times in clean.items()}
    found = fit(loaded)
    with pytest.raises(
        MeasurementError, match=r"gather over node: .* disagree by \d+% .*spread by \d+%.*--accept-noise"
    ):
        found.require_trust("gather over node")


def test_timings_that_do_not_agree_with_each_other_are_not_trusted():
    """Load that comes and goes is the same in both halves."""
    clean = timings(Line(latency_s=1e-4, bytes_per_s=5e8))
    found = fit({size: [t * (1 + i % 2) for i, t in enumerate(times)] for size, times in clean.items()})
    assert found.disagreement < 0.01 and not found.trusted
    with pytest.raises(MeasurementError, match=r"longest messages spread by 33% \(allowed 25%\)"):
        found.require_trust("gather over node")


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=8), min_size=2, max_size=5))
def test_any_timings_give_a_usable_line(rows):
    rounds = min(map(len, rows))
    found = fit({4**index * 1000: row[:rounds] for index, row in enumerate(rows)})
    assert found.line.latency_s >= 0 and 0 < found.line.bytes_per_s < float("inf")
    longest = max(statistics.median(row[:rounds]) for row in rows)
    assert found.line.latency_s <= longest * 1.001


@pytest.mark.parametrize("rows", [{}, {1000: [1.0] * 8}, {1000: [1.0] * 3, 4000: [1.0] * 3}])
def test_too_few_timings(rows):
    with pytest.raises(InputError, match="at least 2 sizes and 4 rounds"):
        fit(rows)
