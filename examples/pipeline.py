"""A model in two pipeline stages, each sharded over its own data-parallel ranks.

    torchrun --nproc-per-node 4 examples/pipeline.py

Torch's zero-bubble schedule runs two of four stages on each rank: the first and the last on one half of the ranks, the
middle ones on the other half.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

import zeromesh as zm

VOCABULARY, WIDTH, SEQUENCE, BATCH, STEPS, MICRO_BATCHES = 32, 32, 16, 4, 8, 4
STAGES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """One stage of the model, whose parameters have the names of the whole model."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleDict({str(2 * index + i): Block() for i in range(2)})
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def batch(generator: torch.Generator) -> Tensor:
    """Rows of numbers that count up from a random start, for all micro-batches."""
    first = torch.randint(0, VOCABULARY, (MICRO_BATCHES * BATCH, 1), generator=generator)
    return (first + torch.arange(SEQUENCE)) % VOCABULARY


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(mesh: DeviceMesh) -> list[float]:
    """The loss of each step, averaged over the data-parallel ranks; empty on ranks that have no last stage."""
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    data = mesh[tuple(name for name in mesh.mesh_dim_names if name != "pp")]
    indices = (0, 3) if rank == 0 else (1, 2)
    models = [zm.shard(Stage(index), data, "node=3", units=(Block,)) for index in indices]
    device = torch.device("cpu")
    stages = [PipelineStage(m, index, STAGES, device, group=group) for m, index in zip(models, indices, strict=True)]
    schedule = ScheduleZBVZeroBubble(zm.pipeline(stages), n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()], lr=1e-2)
    # Both ranks of one pipeline have the same tokens.
    generator = torch.Generator().manual_seed(data.get_local_rank())
    losses = []
    for _ in range(STEPS):
        tokens, found = batch(generator), list[Tensor]()
        if rank == 0:
            schedule.step(tokens, target=tokens, losses=found)
        else:
            schedule.step()
        zm.clip_grad_norm_(models, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if found:
            losses.append(zm.sum_over_ranks(models[-1], float(torch.stack(found).mean())) / data.size())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "node"))
    losses = train(mesh)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step + 1}  loss {loss:.3f}" for step, loss in enumerate(losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
