"""Earlier planners' own spaces and objectives: their sizes, their formulas by hand, their published choices."""

from __future__ import annotations

import pytest

from validation.published import CHOICES, Assumptions, Ranked, answer
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.model.presets import preset
from zeromesh.model.spec import Recomputation

AMSPS_CHOICES = [(row[1], row[2], row[4]) for row in CHOICES if row[0] == "amsp"]
MODELS = [model for model, _, _ in AMSPS_CHOICES]


def amsp(
    model: str, world: int, recomputation: Recomputation | None = None, assumptions: Assumptions | None = None
) -> list[Ranked]:
    return answer("amsp", model, world, recomputation, assumptions)


def chosen(ranking: list[Ranked]) -> str:
    assert ranking[0].fits
    return ranking[0].name


@pytest.mark.parametrize(("model", "world", "choice"), AMSPS_CHOICES)
@pytest.mark.parametrize("bucket_bytes", [32 * 2**20, 512 * 2**20])
def test_amsps_choices_come_out(model: str, world: int, choice: str, bucket_bytes: int) -> None:
    """With one set of assumptions for all three; the size of InternEvo's buckets does not decide."""
    assert chosen(amsp(model, world, assumptions=Assumptions(bucket_bytes=bucket_bytes))) == choice


def test_amsps_memory_and_space() -> None:
    """2/8 + 2/8 + 12/32 bytes of state and 4/8 of temporaries a parameter; 24 of activations per layer's output."""
    best = amsp("amsp-30b", 32)[0]
    num_params = preset("amsp-30b").num_params
    assert best.memory_bytes == pytest.approx(num_params * (0.875 + 0.5) + 24 * 4096 * 6144 * 60)
    # AMSP's space keeps its constraints.
    for row in amsp("llama-7b", 64):
        params, grads, states = (int(text) for text in row.name.strip("()").split(","))
        assert params <= grads <= states
        assert grads in (params, states)
        assert states % params == 0
        for degree in (params, grads, states):
            assert degree <= 8 or degree % 8 == 0


def test_mics_takes_the_smallest_group_that_fits() -> None:
    """The AMSP paper ran MiCS in groups of 8, 8 and 16: by the same memory formula, 7B also fits in half a node."""
    found = [chosen(answer("mics", model, 1024)) for model in MODELS]
    assert found == ["group of 4", "group of 8", "group of 16"]


def paro() -> list[Ranked]:
    return answer("paro", "llama-7b", 128, Recomputation.NONE)


def test_paros_closed_form_and_orderings() -> None:
    """IIG: 10 micro-batches of 3 (m-1)/m V/B', then (n_g-1)/n_g V/B for each of gradients and parameters."""
    times = {row.name: row.objective_s for row in paro()}
    volume, between = 2 * 6738415616, 12.5e9
    inside = find_cluster("a100-8x-100g").levels[0].bandwidth_bytes_per_s
    by_hand = 10 * 3 * 7 / 8 * volume / inside + 2 * 15 / 16 * volume / between
    compute_bound = min(times.values())
    assert times["IIG"] == pytest.approx(max(by_hand, compute_bound))
    everything = 10 * 3 * 127 / 128 * volume / between
    assert times["GGG"] == pytest.approx(everything)
    # Sharding everything over all devices is the slowest, partial redundancy in the node far faster.
    times = {row.name: row.objective_s for row in paro()}
    assert times["GGG"] == max(times.values())
    assert times["IIG"] < times["IGG"] < times["GGG"]
    assert times["NIG"] < times["NGG"] and len(times) == 14
    # PaRO's fastest of 65B is the only fast one that fits.
    best, second, *_ = answer("paro", "llama-65b", 32, Recomputation.FULL)
    assert (best.name, best.fits) == ("IIG", True) and second.objective_s > 2 * best.objective_s
