"""A mixture of experts on 4 ranks: experts over the fast links, and a stage for every level that shares weights.

    torchrun --nproc-per-node 4 examples/expert_parallel.py

Experts are divided over the node (expert parallelism, torch's DTensors): tokens travel between its ranks, experts do
not. A rank shares its experts with one rank of every other node, so their only data-parallel axis is the cluster; all
other parameters have both axes. That is why experts are a part with a mesh and a strategy of their own. Their gradients
come from the tokens of all ranks, and are means over all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

import zeromesh as zm


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of their experts, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], *ctx.back), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class Experts(nn.Module):
    """SwiGLU experts in stacked matrices. A rank may have only some of them: Shard(0) of a DTensor."""

    def __init__(self, num: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(num, *shape) / shape[1] ** 0.5)
            for shape in ((hidden, dim), (hidden, dim), (dim, hidden))
        )

    def spread(self, mesh: DeviceMesh) -> None:
        """Divides the experts over a mesh of one dimension."""
        for name, param in list(self.named_parameters(recurse=False)):
            setattr(self, name, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`rows` are sorted by expert; `counts` has the number of each expert's rows."""
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        chunks = rows.split(counts)
        return torch.cat([(functional.silu(x @ gate[i].T) * (x @ up[i].T)) @ down[i].T for i, x in enumerate(chunks)])


class MixtureOfExperts(nn.Module):
    """Sends each token to its `top` experts, on any rank, and to a shared expert if there is one.

    Args:
        shared: whether there is a shared expert and gates are sigmoids, as in DeepSeek; if not, as in Mixtral.
    """

    def __init__(self, dim: int, hidden: int, num: int, top: int, *, shared: bool) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num, bias=False)
        self.experts = Experts(num, dim, hidden)
        self.shared = Experts(1, dim, hidden) if shared else None
        self.num, self.top = num, top
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.experts.spread(mesh)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        scores = scores.softmax(-1) if self.shared is None else scores.sigmoid()
        weights, chosen = scores.topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # copies of tokens, by expert
        rows = tokens[order // self.top]
        counts = chosen.flatten().bincount(minlength=self.num)
        found = self._through_experts(rows, counts)
        found = torch.zeros_like(found).index_copy(0, order, found) * weights.flatten()[:, None]
        found = found.view(-1, self.top, tokens.shape[-1]).sum(1)
        if self.shared is not None:
            found = found + self.shared(tokens, [len(tokens)])
        return found.view_as(x)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.mesh is None:
            return self.experts(rows, counts.tolist())
        group, ranks = self.mesh.get_group(), self.mesh.size()
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, coming))
        arrived = Exchange.apply(rows, sent, received, group)
        # They came sorted by rank and then expert, and are needed by expert and then rank.
        local = coming.view(ranks, -1)
        places = torch.arange(local.shape[1]).repeat(ranks).repeat_interleave(coming).argsort(stable=True)
        computed = self.experts(arrived[places], local.sum(0).tolist())
        return Exchange.apply(torch.zeros_like(computed).index_copy(0, places, computed), received, sent, group)


class Block(nn.Module):
    """A block that mixes neighbouring tokens, in the place of attention."""

    def __init__(self, dim: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(dim), nn.Linear(2 * dim, dim), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(torch.cat([x, x.roll(1, dims=1)], -1))
        return x + self.mlp(self.norm(x))


class LanguageModel(nn.Module):
    """Blocks with experts. If there are shared experts, the first block is dense, as in DeepSeek."""

    def __init__(
        self,
        *,
        vocabulary: int = 64,
        dim: int = 16,
        hidden: int = 24,
        layers: int = 3,
        num: int = 4,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            Block(dim, nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim)))
            if shared and index == 0
            else Block(dim, MixtureOfExperts(dim, hidden, num, 2, shared=shared))
            for index in range(layers)
        )
        self.head = nn.Linear(dim, vocabulary)

    def spread(self, mesh: DeviceMesh) -> None:
        """Divides all experts, not the shared ones, over `mesh`."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.spread(mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main(steps: int = 20) -> list[float]:
    """Returns the loss of each step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node"))
    torch.manual_seed(0)
    model = LanguageModel()
    model.spread(mesh["node"])
    model = zm.shard(
        model, mesh, "node=3,cluster=1", parts={"*.experts": zm.Part(mesh=mesh["cluster"], strategy="cluster=1")}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        start = torch.randint(0, 64, (8, 1), generator=data)
        tokens = (start + 3 * torch.arange(17)) % 64
        loss = next_token_loss(model, tokens)
        loss.backward()
        zm.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zm.sum_over_ranks(model, float(loss.detach())) / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"{steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
