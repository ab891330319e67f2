"""Fits a line to timings, seconds = latency + bytes / rate, and judges how far it can be trusted.

Timings of one size scatter upwards, so each size is represented by its median. The rate comes from least squares over
absolute errors, which the longest messages dominate. The latency is the time that shorter messages take beyond that. A
joint fit would let short messages tilt the rate: their noise is larger in proportion, and a shaped link's savings let
them pass at once (a bucket of 128 KiB took 1 Gbit/s for up to 1.1). Trust comes from repetition: the same line is
fitted to the first and to the second half of the rounds, which saw the machine at different moments.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeromesh.errors import InputError, MeasurementError

SCATTERING = ("all_gather", "reduce_scatter")
"""A level's rate and latency are the means over these operations."""

MAX_SPREAD = 0.25
"""Largest spread of the longest messages' timings, which decide the rate. It catches constant load, which is the same
in both halves. Idle links have 1 to 13 % (2 cores, 4 and 8 ranks); few short rounds may have more."""

MAX_DISAGREEMENT = 0.25
"""How much the rates of the two halves may differ. On an idle machine gloo's differ by 1 to 8 %, under load by 30 % and
more (2 cores, 4 ranks, November 2026)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, sent_bytes: float) -> float:
        return self.latency_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    line: Line  # through the medians of all rounds
    spread: float  # half the distance between the quartiles of the longest messages' timings, over the median
    disagreement: float  # between the rates of the rounds' first and second half, over the rate of all

    @property
    def trusted(self) -> bool:
        """Whether the two halves agree, and the spread is small."""
        return self.disagreement <= MAX_DISAGREEMENT and self.spread <= MAX_SPREAD

    @property
    def noise(self) -> str:
        """How far the fit can be trusted, in words."""
        return (
            f"the first and the second half of the measurement disagree by {self.disagreement:.0%} (allowed "
            f"{MAX_DISAGREEMENT:.0%}), and timings of the longest messages spread by {self.spread:.0%} (allowed "
            f"{MAX_SPREAD:.0%})"
        )

    def require_trust(self, what: str) -> None:
        """Raises MeasurementError if the fit cannot be trusted."""
        if not self.trusted:
            raise MeasurementError(
                f"{what}: {self.noise}: something else uses these processors or links. Measure again when they are "
                f"idle, or longer (--rounds); --accept-noise takes the figures as they are"
            )


def fit(timings: Mapping[int, Sequence[float]]) -> Fit:
    """Fits the seconds of each round, in order, by bytes that one rank sends. Raises InputError for fewer than 2 sizes
    or 4 rounds."""
    rounds = min((len(times) for times in timings.values()), default=0)
    if len(timings) < 2 or rounds < 4:
        raise InputError(f"a fit needs at least 2 sizes and 4 rounds; got {len(timings)} and {rounds}")
    line = _through({size: statistics.median(times) for size, times in timings.items()})
    first = _through({size: statistics.median(times[: len(times) // 2]) for size, times in timings.items()})
    second = _through({size: statistics.median(times[len(times) // 2 :]) for size, times in timings.items()})
    longest = timings[max(timings)]
    low, _, high = statistics.quantiles(longest, n=4)
    return Fit(
        line=line,
        spread=(high - low) / 2 / statistics.median(longest),
        disagreement=abs(first.bytes_per_s - second.bytes_per_s) / line.bytes_per_s,
    )


def _through(medians: Mapping[int, float]) -> Line:
    """Fits the rate by least squares, where the longest messages count most, then the latency to the shortest."""
    points = sorted(medians.items())
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    (_, fastest), (longest, slowest) = points[0], points[-1]
    if slope <= 0:
        slope = max(slowest - fastest, 1e-3 * slowest) / longest
    left = statistics.median(y - x * slope for x, y in points[: max(1, len(points) // 2)])
    return Line(latency_s=max(0.0, left), bytes_per_s=1 / slope)
