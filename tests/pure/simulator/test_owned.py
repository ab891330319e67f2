"""Muon and AdamW by owners in the simulator: bytes, time and memory follow from the choice of owners."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from zeromesh.cluster.catalogue import preset
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.parallel import WHOLE
from zeromesh.pieces.owners import BUCKET_BYTES, choose_owners, newton_schulz_flops
from zeromesh.planner.search import Options, search
from zeromesh.planner.workload import Workload
from zeromesh.simulator.division import Division
from zeromesh.simulator.owned import OwnedTensors
from zeromesh.simulator.run import Setup, simulate
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy import Layout
from zeromesh.units import format_bytes

LLAMA = model_preset("llama-7b")
GPT2 = model_preset("gpt2")
A800 = preset("a800-8x-hdr")
MATRICES = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)


def work(optimizer: str, world: int, micro_batches: int = 2, ownership: str = "slices") -> FixedWorkload:
    tokens = 512 * world * micro_batches
    return FixedWorkload(seq_len=512, global_batch_tokens=tokens, optimizer=optimizer, ownership=ownership)


def setup(
    strategy: str,
    world: int,
    optimizer: str = "muon",
    ownership: str = "slices",
    *,
    engine: str = "zeromesh",
    model: ModelSpec = LLAMA,
) -> Setup:
    workload = work(optimizer, world, ownership=ownership)
    division = Division.of(model, A800.take(world), WHOLE, seq_len=workload.seq_len)
    return Setup.of(division, division.parts[0], strategy, workload, engine, default_constants())


def one(run: Setup) -> OwnedTensors:
    (owned,) = run.owned
    return owned


def sent(strategy: str, optimizer: str, ownership: str = "slices") -> dict[str, float]:
    found = simulate(LLAMA, A800.take(16), strategy, work(optimizer, 16, ownership=ownership))
    return {axis.axis: axis.bytes_sent_per_device for axis in found.axes}


def test_time_is_the_longest_owners_and_what_is_not_hidden() -> None:
    """On 8 ranks in one node: at least Newton-Schulz of an eighth of the matrices, and no more than a tenth above it
    beside the messages."""
    world = 8
    adamw, muon = (
        simulate(LLAMA, A800.take(world), "node=3,cluster=0", work(each, world)) for each in ("adamw", "muon")
    )
    run = setup("node=3,cluster=0", world)
    flops = 32 * (4 * newton_schulz_flops((4096, 4096)) + 3 * newton_schulz_flops((11008, 4096)))
    least = flops / world / (run.compute.matrix_flops * run.compute.constants.matmul_share)
    stepping = sum(bucket.step_s for bucket in one(run).buckets)
    assert least <= stepping - run.compute.optimizer(MATRICES / world) <= 1.3 * least
    assert muon.compute_s - adamw.compute_s == pytest.approx(
        stepping - run.compute.optimizer(MATRICES / world), rel=0.05
    )
    assert muon.step_s > adamw.step_s + least


def held_numel(owned: OwnedTensors, ranks: int) -> tuple[Counter[int], Counter[int]]:
    """Elements by rank: of all that it owns, and of the tensors of these that do not lie there as a whole."""
    all_of, apart = Counter[int](), Counter[int]()
    for tensor, rank in zip(owned.tensors, owned.owners.rank_of, strict=True):
        all_of[rank] += tensor.numel
        apart[rank] += tensor.numel if [share.rank for share in tensor.shares(ranks)] != [rank] else 0
    return all_of, apart


def test_memory_is_what_owners_keep() -> None:
    """Muon keeps one fp32 momentum, AdamW two moments, and both the values that do not lie there anyway. A step
    takes room for no less than an even share of the gradients of three buckets; where states are whole, for none."""
    slices = simulate(LLAMA, A800.take(16), "node=3,cluster=1", work("adamw", 16)).memory
    for optimizer, ownership, width in (("muon", "slices", 4), ("adamw", "owners", 8)):
        workload = work(optimizer, 16, ownership=ownership)
        found = simulate(LLAMA, A800.take(16), "node=3,cluster=1", workload).memory
        owned = one(setup("node=3,cluster=1", 16, optimizer, ownership))
        every, apart = held_numel(owned, 16)
        most = max(width * every[rank] + 4 * apart[rank] for rank in range(16))
        assert most == max(owned.held_bytes)
        assert found.optimizer - slices.optimizer == pytest.approx(most - 8 * owned.numel / 16)
        assert owned.numel / 16 <= max(every.values()) <= 1.1 * owned.numel / 16
    run = setup("node=3,cluster=1", 16)
    every, _ = held_numel(one(run), 16)
    assert BUCKET_BYTES < run.room_bytes == max(one(run).room_bytes) < 4 * max(every.values()) + 8 * MATRICES / 16
    assert setup("node=0,cluster=0", 16).room_bytes == 0


def test_bytes_of_adamw_and_amsps_owners() -> None:
    """AMSP's setting: over each axis the elements elsewhere than their owner, once each way."""
    found, plain = sent("node=1,cluster=1", "adamw", "owners"), sent("node=1,cluster=1", "adamw")
    for size, name in ((8, "node"), (2, "cluster")):
        assert 0 < found[name] - plain[name] <= 1.01 * 8 * LLAMA.num_trainable / 16 * (size - 1) / size
    # AMSP's owners step with Muon where tensors are whole.
    muon, adamw = (
        simulate(LLAMA, A800.take(16), "node=1,cluster=1", work(each, 16), engine="amsp") for each in ("muon", "adamw")
    )
    assert muon.axes == adamw.axes and muon.step_s > adamw.step_s
    assert [share.optimizer for share in muon.owners] == ["muon", "adamw"]
    with pytest.raises(InputError, match=r"engine amsp has parts of tensors .* sharded over node: give a"):
        simulate(LLAMA, A800.take(16), "node=3,cluster=1", work("muon", 16), engine="amsp")


@pytest.mark.parametrize(("optimizer", "ownership"), [("muon", "slices"), ("adamw", "owners")])
def test_a_plan_is_the_best_of_all(optimizer: str, ownership: str) -> None:
    """A search with bounds finds the same as simulating every layout."""
    cluster, options = A800.take(16), Options(splits="none", max_simulations=None, front=0)
    tokens = 16 * 512 * 4
    workload = Workload(
        seq_len=512, global_batch_tokens=tokens, micro_batch=2, optimizer=optimizer, ownership=ownership
    )
    found, _ = search(GPT2, cluster, workload, options=options)
    fixed = workload.fixed(2, Recomputation.NONE)
    every = [simulate(GPT2, cluster, f"node={node},cluster={outer}", fixed) for node in "0123" for outer in "0123"]
    assert found.bound_s <= found.best.step_s <= min(each.step_s for each in every) * (1 + 1e-9)


def test_amsps_owners_are_ours_and_their_tensors_are_the_state_shard() -> None:
    """One choice, of the same tensors; ranks with parts of tensors own parts. No bytes more for it: sums and broadcasts
    are the engine's own. Memory and seconds are those of the owner with the most, where slices have the mean's."""
    world = 64
    whole, parts = (
        setup(strategy, world, "adamw", engine="amsp") for strategy in ("node=1,cluster=1", "node=3,cluster=1")
    )
    for run, params in ((whole, 1), (parts, 8)):
        owned = one(run)
        assert owned.numel == LLAMA.num_trainable and run.optimizer_seconds() == pytest.approx(0, abs=1e-12)
        copies = Layout.of("node=1,cluster=1", [("node", world // params), ("cluster", 1)])
        assert owned.owners == choose_owners(
            copies, owned.tensors, [float(t.numel) for t in owned.tensors], anywhere=True
        )
        held = Counter[int]()
        for tensor, owner in zip(owned.tensors, owned.owners.rank_of, strict=True):
            held[owner] += tensor.numel
        most, mean = max(held.values()) / params, LLAMA.num_trainable / world
        assert owned.buckets[0].step_s == pytest.approx(run.compute.optimizer(most))
        assert run.memory(0.0).optimizer == pytest.approx(12 * most, rel=1e-5)
        assert owned.share.balance == pytest.approx(most / mean)
    assert one(whole).share.balance > 1.2 > 1.01 > one(parts).share.balance
    steps = [
        simulate(LLAMA, A800.take(world), "node=1,cluster=1", work("adamw", world, ownership=ownership), engine="amsp")
        for ownership in ("slices", "owners")
    ]
    assert steps[0] == steps[1]


def test_experts_are_batches_of_matrices() -> None:
    """A stack of eight takes eight times the iterations of one; it has one momentum of its shape, and one owner."""
    model = model_preset("mixtral-8x7b")
    run = setup("node=3,cluster=1", 16, model=model)
    owned = one(run)
    shapes = Counter(tensor.shape for tensor in owned.tensors)
    assert shapes[8, 2 * 14336, 4096] == shapes[8, 4096, 14336] == 32
    assert sum(math.prod(shape) * count for shape, count in shapes.items()) == owned.numel

    def seconds(shape: tuple[int, ...]) -> float:
        m, n = sorted(shape[-2:])
        once = run.compute.product(m, n, m, flops=4.0 * m * m * n) + run.compute.product(m, m, m, flops=2.0 * m**3)
        return math.prod(shape[:-2]) * 5 * once + run.compute.optimizer(math.prod(shape))

    busy: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for tensor, owner in zip(owned.tensors, owned.owners.rank_of, strict=True):
        busy[owner] += seconds(tensor.shape)  # type: ignore[assignment]  # seconds
        held[owner] += tensor.numel
    assert max(busy.values()) <= sum(b.step_s for b in owned.buckets) <= 1.1 * max(busy.values())
    assert 4 * max(held.values()) <= max(owned.held_bytes) <= 8 * max(held.values())


def test_memory_that_does_not_fit_says_by_how_much() -> None:
    """Which rank holds most of which kind, the need of slices, and the excess in all."""
    big = model_preset("llama3-70b")
    found = simulate(big, A800.take(64), "node=0,cluster=1", work("adamw", 64, ownership="owners"))
    (share,), (owners, excess) = found.owners, found.notes()
    assert not found.fits and owners.startswith("adamw by owners: 723 tensors on 8 ranks; the busiest has 1.0")
    assert f"rank {share.fullest} of them holds most" in owners and "(adamw on slices: 70.6 GB)" in owners
    assert share.held_bytes == max(one(setup("node=0,cluster=1", 64, "adamw", "owners", model=big)).held_bytes)
    over = format_bytes(found.memory.total - found.memory_limit_bytes)
    assert excess.startswith("does not fit: ") and f" 73.6 GB are usable, {over} too much; owners hold up to" in excess
    slices = simulate(big, A800.take(64), "node=0,cluster=1", work("adamw", 64))
    assert slices.notes()[0].endswith("too much")
    assert not simulate(LLAMA, A800.take(64), "node=3,cluster=1", work("adamw", 64)).notes()
