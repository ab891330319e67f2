"""Context parallelism: ranks that share sequences are data-parallel ranks, whose losses are sums over their tokens.

Torch's `context_parallel` has no kernels on CPU, so attention gathers keys and values itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.parity import adamw, close, net, same_grads, same_optimizer_states, same_params
from tests.dist.pool import kept, on_ranks

VOCABULARY, BATCH, SEQUENCE, PARTS, STEPS, MICROS = 11, 2, 8, 2, 2, 3
IGNORED = -100


class Gathered(torch.autograd.Function):
    """Parts along dimension 1 of all ranks of a group, whose losses each depend on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        first = 0
        if group is not None:
            first = group.rank() * x.shape[1]
            key, value = Gathered.apply(key, group), Gathered.apply(value, group)
        seen = torch.ones(x.shape[1], key.shape[1], dtype=torch.bool).tril(first)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + torch.tanh(self.mix(attended))


def batch(step: int, micro: int, place: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one line of `cp`; answers begin anywhere, so that parts have unequal numbers of labels."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + place)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    for row, prompt in enumerate(torch.randint(1, SEQUENCE, (BATCH,), generator=generator)):
        labels[row, :prompt] = IGNORED
    return tokens, labels


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def labelled(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def mesh_of() -> DeviceMesh:
    return kept(init_device_mesh, "cpu", (2, PARTS), mesh_dim_names=("node", "cp"))


def own_batches(mesh: DeviceMesh, step: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's parts of the sequences of its line of `cp`."""
    part, place = mesh.get_local_rank("cp"), mesh.get_local_rank("node")
    return [tuple(t.chunk(PARTS, 1)[part] for t in batch(step, micro, place)) for micro in range(MICROS)]  # type: ignore[misc]  # pairs


def step_plainly(plain: nn.Module, step: int) -> None:
    batches = [batch(step, micro, place) for micro in range(MICROS) for place in range(2)]
    total = sum(labelled(labels) for _, labels in batches)
    for tokens, labels in batches:
        (summed_loss(plain(tokens), labels) / total).backward()


@pytest.mark.parametrize("strategy", ["cp=3,node=1", "cp=0,node=3"])
@on_ranks(4)
def test_trains_as_plain_training_on_whole_sequences_does(strategy: str) -> None:
    mesh, plain = mesh_of(), net(block=Block)
    model = zm.shard(net(block=Block), mesh, strategy)
    optimizers = [adamw(each.parameters()) for each in (plain, model)]
    for step in range(STEPS):
        batches = own_batches(mesh, step)
        wholes = [batch(step, micro, place)[1] for micro in range(MICROS) for place in range(2)]
        assert len({labelled(part) for labels in wholes for part in labels.chunk(PARTS, 1)}) > 1
        total = zm.sum_over_ranks(model, float(sum(labelled(labels) for _, labels in batches)))
        for micro, (tokens, labels) in enumerate(batches):
            with zm.accumulate(model, last=micro == MICROS - 1, weight=1.0, total=total):
                summed_loss(model(tokens, mesh.get_group("cp")), labels).backward()
        step_plainly(plain, step)
        same_grads(model, plain)
        close(zm.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_params(model, plain)
    same_optimizer_states(model, optimizers[1], plain, optimizers[0])
