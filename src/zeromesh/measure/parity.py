"""Compares a few steps of sharded training with plain training of the same global batch, in fp64, on all ranks.

Plain training holds the whole model on every rank and sums gradients with torch's own all-reduce, without zeromesh. So
its cost does not grow with the number of ranks.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh as zm
from zeromesh.launch.ranks import Ranks
from zeromesh.measure.llama import loss_of, make_llama
from zeromesh.measure.work import SHAPES

MICRO_BATCHES, SEQUENCES, TOKENS, STEPS = 2, 2, 16, 3
MODEL = "tiny"


def largest_difference(ranks: Ranks, strategy: str) -> float:
    """Returns the largest difference of any parameter after the steps, divided by that parameter's largest magnitude.

    The first rank compares the whole parameters, and tells all ranks the result.
    """
    sharded = zm.shard(
        make_llama(MODEL).double().to(ranks.device),
        ranks.mesh,
        strategy,
        reduce_dtype=torch.float64,
        grad_dtype=torch.float64,
        master_dtype=torch.float64,
    )
    _train_sharded(sharded, ranks)
    found = zm.full_state_dict(sharded)
    plain = _trained_plainly(ranks.rank, ranks.world, ranks.device)
    worst = torch.zeros((), dtype=torch.float64)
    if ranks.rank == 0:
        pairs = [(found[name], value) for name, value in plain.items()]
        shares = torch.stack([(one - other).abs().max() / other.abs().max() for one, other in pairs])
        worst = shares.nan_to_num(nan=float("inf")).max()
    dist.broadcast(worst, src=0)
    return float(worst)


def _batch(rank: int, step: int, micro: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1_000_000 * step + 1000 * micro + rank)
    return torch.randint(0, SHAPES[MODEL].vocab, (SEQUENCES, TOKENS), generator=generator).to(device)


def _train_sharded(model: nn.Module, ranks: Ranks) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with zm.accumulate(model, last=micro == MICRO_BATCHES - 1):
                loss = loss_of(model, _batch(ranks.rank, step, micro, ranks.device)) / MICRO_BATCHES
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def _trained_plainly(rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the parameters after plain training. It runs once for all strategies."""
    model = make_llama(MODEL).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            loss = loss_of(model, _batch(rank, step, micro, device)) / MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}
