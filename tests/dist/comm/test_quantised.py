"""Quantised collectives over one, two and three axes: bound, order, bytes, equal replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.comm.axes import axes, room, values
from tests.dist.pool import Pool, on_ranks
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter
from zeromesh.comm.exchange import AxisGroup, Sent
from zeromesh.comm.quantised import check_quantisable, noise_generator, restore_kept
from zeromesh.errors import InputError, InternalError
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.wires import coded
from zeromesh.wires.blocks import QuantFormat

SHAPES = {1: (3,), 3: (2, 2, 2)}


def noise(form: QuantFormat, group: AxisGroup) -> torch.Generator | None:
    return noise_generator(group) if form.stochastic else None


def gather(shape, chunk, form, seed):
    groups = axes(*shape)
    world = dist.get_world_size()
    exact = torch.cat([values(rank, chunk, seed=seed, spread=1.0) for rank in range(world)])
    full = torch.full_like(exact, float("nan"))
    held = slice(dist.get_rank() * chunk, (dist.get_rank() + 1) * chunk)
    full[held] = exact[held]
    for group in groups:  # ranks grow innermost axis fastest, so each region is contiguous
        length = held.stop - held.start
        start = held.start - group.rank * length
        held = slice(start, start + group.size * length)
        all_gather(full[held], group, form, workspace=room(group), generator=noise(form, group))
    assert (full - exact).abs().max() <= form.error_bound(len(groups)) * exact.abs().max()
    first = full.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, full)


def scatter(shape, chunk, form, seed, accumulate):
    groups = axes(*shape)
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = [values(rank, chunk * world, seed=seed, spread=1.0) for rank in range(world)]
    region, start = everyone[rank].clone(), 0
    for group in reversed(groups):
        length = region.numel() // group.size
        start += group.rank * length
        out, adds = torch.ones(length), accumulate and group is groups[0]
        means: dict[str, Any] = {"scale": 1 / group.size, "accumulate": adds, "generator": noise(form, group)}
        reduce_scatter(region, out, group, form, workspace=room(group), **means)
        region = out
    exact = torch.stack(everyone).double().mean(0)[start : start + chunk] + (1.0 if accumulate else 0.0)
    largest = max(tensor.abs().max() for tensor in everyone)
    bound = form.error_bound(len(groups)) * largest + 1e-6 * largest
    assert (region - exact).abs().max() <= bound


FORMS = st.builds(QuantFormat, bits=st.sampled_from([4, 8]), block=st.sampled_from([16, 128]), stochastic=st.booleans())


@pytest.mark.parametrize("num_axes", [1, 3])
@settings(max_examples=12)
@given(chunk=st.integers(0, 400), form=FORMS, seed=st.integers(0, 9))
def test_all_gather_stays_within_the_bound(pool: Pool, num_axes, chunk, form, seed):
    shape = SHAPES[num_axes]
    if chunk:
        pool.run(int(torch.tensor(shape).prod()), gather, shape, chunk, form, seed)


@pytest.mark.parametrize("num_axes", [1, 3])
@settings(max_examples=12)
@given(chunk=st.integers(1, 400), form=FORMS, seed=st.integers(0, 9), accumulate=st.booleans())
def test_reduce_scatter_stays_within_the_bound(pool: Pool, num_axes, chunk, form, seed, accumulate):
    shape = SHAPES[num_axes]
    pool.run(int(torch.tensor(shape).prod()), scatter, shape, chunk, form, seed, accumulate)


def test_regions_of_many_pieces(pool: Pool):
    pool.run(2, gather, (2,), 900_001, QuantFormat(bits=4), 1)
    pool.run(2, scatter, (2,), 900_001, QuantFormat(bits=8), 1, True)


@on_ranks(2)
def test_room_for_kept_messages_must_be_right():
    group, form = axes(2)[0], QuantFormat(bits=8)
    with pytest.raises(InternalError, match=r"kept messages of 2 chunks of 100 need 132 bytes each; got 100"):
        restore_kept(torch.zeros(100).byte(), torch.zeros(200), group, form, workspace=room(group))


@pytest.mark.parametrize("numel", [3, 1005])
@on_ranks(3)
def test_all_reduce_leaves_equal_replicas(numel):
    group, form = axes(3)[0], QuantFormat(bits=8)
    tensor = values(group.rank, numel, seed=3, spread=1.0).bfloat16()
    everyone = torch.stack([values(rank, numel, seed=3, spread=1.0).bfloat16().double() for rank in range(3)])
    all_reduce(tensor, group, form, workspace=room(group), scale=1 / 3)
    first = tensor.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, tensor)
    # Two quantisations, and twice a rounding to bf16.
    bound = (form.error_bound(2) + 2 * 2**-8) * everyone.abs().max()
    assert (tensor - everyone.mean(0)).abs().max() <= bound


@on_ranks(3)
def test_error_feedback_of_an_all_reduce_covers_both_its_quantisations():
    group, form, numel = axes(3)[0], QuantFormat(bits=4), 501
    own = values(group.rank, numel, seed=8)
    residual, total, repeats = torch.zeros(numel), torch.zeros(numel), 30
    plain = torch.zeros(numel)
    for _ in range(repeats):
        for sums, owed in ((total, residual), (plain, None)):
            tensor = own.clone()
            all_reduce(tensor, group, form, workspace=room(group), scale=1 / 3, residual=owed)
            sums += tensor
    everyone = torch.stack([values(rank, numel, seed=8) for rank in range(3)])
    exact = repeats * everyone.mean(0)
    # Still owed in the end, once for each quantisation; the values quantised may include older debts.
    assert (total - exact).abs().max() <= 2 * form.error_bound(2) * everyone.abs().max()
    assert (plain - exact).abs().max() > 5 * (total - exact).abs().max()
    first = total.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, total)


@pytest.mark.parametrize("wire", ["int8", "int4"])
@on_ranks(2)
def test_bytes_sent(wire):
    group, form = axes(2)[0], coded(wire)
    seen: list[Sent] = []
    group.record = seen.append
    region = torch.zeros(600_000)
    all_gather(region, group, form, workspace=room(group))
    reduce_scatter(region, torch.zeros(300_000), group, form, workspace=room(group))
    all_reduce(region, group, form, workspace=room(group))
    # Pieces are whole blocks, so a chunk in pieces is as long as one in a single message.
    chunk = wire_bytes(300_000, wire)
    found = [(sent.operation, sent.sent_bytes) for sent in seen]
    assert found == [("all_gather", chunk), ("reduce_scatter", chunk), ("all_reduce", 2 * chunk)]


def mean_of_two_axes(generators: list[torch.Generator]) -> float:
    """The mean of .6 on one rank in four, after averages over two axes, in units of an int4 code."""
    groups, form, numel = axes(2, 2), QuantFormat(bits=4, stochastic=True), 4096
    total, rounds = torch.zeros(numel), 30
    largest = torch.arange(numel) % form.block == 0  # the same on all ranks, so that a code is 1 everywhere
    own = torch.full((numel,), 0.6 if dist.get_rank() == 0 else 0.0).masked_fill(largest, 7.0)
    for _ in range(rounds):
        tensor = own.clone()
        for group, generator in zip(groups, generators, strict=True):
            all_reduce(tensor, group, form, workspace=room(group), scale=0.5, generator=generator)
        total += tensor
    return float(total[~largest].mean()) / rounds


@on_ranks(4)
def test_rounding_at_random_is_unbiased_over_two_axes():
    """Each by draws of its own: by the same ones, the second would round up wherever the first has."""
    groups = axes(2, 2)
    assert mean_of_two_axes([noise_generator(group, "weight") for group in groups]) == pytest.approx(0.15, abs=0.01)
    same = [torch.Generator().manual_seed(group.rank) for group in groups]
    assert mean_of_two_axes(same) > 0.2, "a bias must be seen"


@on_ranks(2)
def test_buffers_are_rounded_by_draws_of_their_own():
    group = axes(2)[0]
    draws = [torch.rand(4, generator=noise_generator(group, name)).tolist() for name in ("one", "two", "one")]
    assert draws[0] == draws[2] != draws[1]


@on_ranks(1)
def test_what_cannot_be_quantised_says_so():
    with pytest.raises(InputError, match=r"axis node: a quantised wire carries fp32, bf16 or fp16 values; got .*int64"):
        check_quantisable(torch.int64, "node")


@on_ranks(2)
def test_a_workspace_that_is_too_small_says_so():
    group = axes(2)[0]
    with pytest.raises(InternalError, match=r"quantised collective of 2 ranks needs \d+ bytes; got 10"):
        all_gather(torch.zeros(2), group, QuantFormat(bits=8), workspace=torch.zeros(10).byte())
