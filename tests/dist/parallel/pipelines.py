"""Trains a model in stages under a schedule of torch's, and plainly, and holds the two against each other in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zeromesh as zm
from tests.dist.parity import BOUND, Block, Net, Pair, adamw, net
from tests.dist.pool import kept

MICROS = 4
CLIP = 0.5
SHAPE = (2, 4)
"""Samples of a micro-batch on a rank, and their length."""

LOOPED = (0, 1, 0, 1)
V = (0, 1, 1, 0)
FOUR = (0, 1, 2, 3)
"""Which rank has each stage."""

SCHEDULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gpipe": (ScheduleGPipe, (0, 1)),
    "1f1b": (Schedule1F1B, (0, 1)),
    "interleaved": (ScheduleInterleaved1F1B, LOOPED),
    "zero-bubble": (ScheduleInterleavedZeroBubble, LOOPED),
    "zbv": (ScheduleZBVZeroBubble, V),
}
OF_FOUR = Schedule1F1B, FOUR


class StageOf(nn.Module):
    """A contiguous part of a `Net`, under its names."""

    def __init__(self, whole: Net, index: int, num_stages: int) -> None:
        super().__init__()
        first, last = index == 0, index == num_stages - 1
        each = len(whole.blocks) // num_stages
        self.embed = whole.embed if first else None
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(index * each, (index + 1) * each)})
        self.norm = whole.norm if last else None
        self.head = whole.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def batch(step: int, place: int, shape: Sequence[int] = SHAPE) -> Tensor:
    """All micro-batches of one data-parallel place, to be cut along dimension 0."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(0, 11, (MICROS * shape[0], shape[1]), generator=generator)


def mesh_of(world: int, tp: int = 1, pp: int = 2) -> DeviceMesh:
    names, data = ("pp", "cluster", "node", "tp"), world // tp // pp
    return kept(init_device_mesh, "cpu", (pp, max(data // 2, 1), min(data, 2), tp), mesh_dim_names=names)


def divide(stage: StageOf, tp: DeviceMesh) -> None:
    """Blocks under tensor parallelism, and their norms under sequence parallelism: gradients that come as Partial."""
    for block in stage.blocks.values():
        # Ahead of parallelize_module's own, which would take a plain tensor for a part of the sequence.
        block.norm.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], tp, [Replicate()]),))
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, tp, plan)


@dataclass
class Staged:
    """One rank's stages."""

    models: list[nn.Module]
    schedule: Any
    optimizer: torch.optim.Optimizer

    def step(self, data: Tensor) -> list[Tensor]:
        """The losses of the micro-batches, where the last stage is."""
        return self._run(self.schedule.step, data, return_outputs=False)

    def eval(self, data: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return self._run(self.schedule.eval, data)

    def _run(self, call: Any, data: Tensor, **options: Any) -> list[Tensor]:
        stages, losses = stages_of(self.schedule), list[Tensor]()
        args = (data,) if any(stage.is_first for stage in stages) else ()
        last = {"target": data.roll(1, 1), "losses": losses} if any(stage.is_last for stage in stages) else {}
        call(*args, **last, **options)
        return losses


def stages_of(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]


def staged(
    whole: Net,
    name: str,
    strategy: str,
    mesh: DeviceMesh,
    *,
    make: Callable[[Iterable[Any]], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> Staged:
    kind, homes = SCHEDULES.get(name, OF_FOUR)
    group, data = mesh.get_group("pp"), mesh["cluster", "node"]
    models, stages = [], []
    for index, home in enumerate(homes):
        if home == mesh.get_local_rank("pp"):
            stage = StageOf(copy.deepcopy(whole), index, len(homes))
            if mesh["tp"].size() > 1:
                divide(stage, mesh["tp"])
            model = zm.shard(stage, data, strategy, units=(Block,), **options)
            models.append(model)
            stages.append(PipelineStage(model, index, len(homes), torch.device("cpu"), group=group))
    stages = zm.pipeline(stages)
    schedule = kind(stages if len(stages) > 1 else stages[0], n_microbatches=MICROS, loss_fn=loss_of)
    return Staged(models, schedule, make([p for m in models for p in m.parameters()]))


def pair_of(plain: Net, ours: Staged) -> Pair:
    """The stages beside a plain model that has all of them."""

    def run(step: int) -> None:
        losses = ours.step(batch(step, pair.own))
        if not losses:
            return
        with torch.no_grad():
            expected = [mean_loss(plain, micro) for micro in batch(step, pair.own).chunk(MICROS)]
        assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=BOUND, atol=BOUND)

    pair = Pair(
        base=plain,
        model=ours.models,
        loss_of=mean_loss,
        data_of=lambda step, micro, place: batch(step, place).chunk(MICROS)[micro],
        micro_batches=MICROS,
        run=run,
        clip=CLIP,
    )
    return pair


def mean_loss(model: nn.Module, micro: Tensor) -> Tensor:
    return loss_of(model(micro), micro.roll(1, 1))


def parity(name: str, strategy: str, world: int, *, steps: int = 2, tp: int = 1, **options: Any) -> None:
    """Gradients, joint norms, parameters and optimizer states are those of plain training on all places' data.

    Each stage has two blocks."""
    plain = net(num_blocks=2 * len(SCHEDULES[name][1]))
    pair_of(plain, staged(plain, name, strategy, mesh_of(world, tp), **options)).train(steps=steps)
