"""Muon on its owners in the simulator: bytes, time and memory follow from who owns what."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from zeromesh.cluster import preset
from zeromesh.errors import ConfigError, InputError
from zeromesh.model import preset as model_preset
from zeromesh.pieces.owners import newton_schulz_flops
from zeromesh.planner import Workload, search
from zeromesh.schedule import Schedule
from zeromesh.simulator import FixedWorkload, simulate
from zeromesh.simulator.run import _Setup
from zeromesh.strategy import Layout

LLAMA = model_preset("llama-7b")
GPT2 = model_preset("gpt2")
A800 = preset("a800-8x-hdr")
MATRICES = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)


def work(optimizer: str, world: int, micro_batches: int = 2) -> FixedWorkload:
    return FixedWorkload(seq_len=512, global_batch_tokens=512 * world * micro_batches, optimizer=optimizer)


def setup(strategy: str, world: int) -> _Setup:
    from zeromesh.cost.constants import default_constants

    return _Setup.of(LLAMA, A800.take(world), strategy, work("muon", world), "zeromesh", default_constants())


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=1", "node=0,cluster=1", "node=0,cluster=0"])
def test_bytes_are_what_lies_elsewhere_than_its_owner(strategy: str) -> None:
    world = 16
    found = {
        optimizer: {
            axis.axis: axis.bytes_sent_per_device
            for axis in simulate(LLAMA, A800.take(world), strategy, work(optimizer, world)).axes
        }
        for optimizer in ("adamw", "muon")
    }
    owned = setup(strategy, world).owned
    assert owned is not None and owned.numel == MATRICES
    layout = Layout.of(strategy, A800.take(world).axes)
    ranks = layout.degree(layout.significant)
    expected: Counter[str] = Counter()
    for tensor, owner in zip(owned.tensors, owned.owners.rank_of, strict=True):
        for home, start, stop in tensor.parts(ranks):
            at, goal = home, owner
            for axis in reversed(layout.significant):
                (at, here), (goal, there) = divmod(at, axis.size), divmod(goal, axis.size)
                expected[axis.name] += (stop - start) * (here != there)
    for axis in layout.axes:
        more = found["muon"][axis.name] - found["adamw"][axis.name]
        # Of an average rank, rounded up in each bucket: fp32 gradients and masters there, masters back.
        assert more == pytest.approx(12 * expected[axis.name] / ranks, abs=12 * len(owned.buckets))


def test_time_is_the_longest_owners_and_what_is_not_hidden() -> None:
    """Of 8 ranks in one node: at least Newton-Schulz of an eighth of the matrices, and no more than a tenth above it
    beside what moves."""
    world = 8
    adamw, muon = (
        simulate(LLAMA, A800.take(world), "node=3,cluster=0", work(each, world)) for each in ("adamw", "muon")
    )
    run = setup("node=3,cluster=0", world)
    flops = 32 * (4 * newton_schulz_flops((4096, 4096)) + 3 * newton_schulz_flops((11008, 4096)))
    least = flops / world / (run.compute.matrix_flops * run.compute.constants.matmul_share)
    assert run.owned is not None
    stepping = sum(bucket.step_s for bucket in run.owned.buckets)
    assert least <= stepping - run.compute.optimizer(MATRICES / world) <= 1.3 * least
    assert muon.compute_s - adamw.compute_s == pytest.approx(
        stepping - run.compute.optimizer(MATRICES / world), rel=0.05
    )
    assert muon.step_s > adamw.step_s + least


def test_memory_is_one_momentum_of_what_is_owned() -> None:
    world = 16
    adamw, muon = (
        simulate(LLAMA, A800.take(world), "node=3,cluster=1", work(each, world)).memory for each in ("adamw", "muon")
    )
    owned = setup("node=3,cluster=1", world).owned
    assert owned is not None
    assert adamw.optimizer - muon.optimizer == pytest.approx(8 * MATRICES / world - 4 * owned.most_numel)
    assert MATRICES / world <= owned.most_numel <= 1.1 * MATRICES / world


def test_placements_are_those_of_the_schedule() -> None:
    """Matrices lie inside their units' buffers, in order, apart."""
    run = setup("node=3,cluster=1", 16)
    assert run.owned is not None and isinstance(run.schedule, Schedule)
    by_length = Counter(tensor.padded for tensor in run.owned.tensors)
    blocks = [p for unit in run.schedule.placed for p in unit if p.padded in by_length]
    assert sum(by_length.values()) == 224 and len(blocks) == 32
    for first, second in zip(run.owned.tensors, run.owned.tensors[1:], strict=False):
        assert second.start == 0 or first.start + math.prod(first.shape) <= second.start
        assert second.start + math.prod(second.shape) <= second.padded


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer must be one of adamw, muon; got 'sgd'"):
        work("sgd", 8)
    with pytest.raises(InputError, match="searched for adamw"):
        search(GPT2, A800.take(8), Workload(seq_len=512, global_batch_tokens=8192, optimizer="muon"))
