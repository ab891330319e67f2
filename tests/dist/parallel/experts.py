"""Mixtures of experts, divided over ranks, held against one process that has all of them and all ranks' tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.dist.parity import Pair

STEPS, VOCABULARY = 2, 13


def load_example(name: str) -> Any:
    path = Path(__file__).parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example("expert_parallel")


def build(*, shared: bool, num: int = 4) -> Any:
    """Mixtral-like; with shared experts DeepSeek-like. The same on every rank."""
    torch.manual_seed(0)
    return example.LanguageModel(vocabulary=VOCABULARY, dim=6, hidden=5, layers=2, num=num, shared=shared).double()


def tokens(step: int, micro: int, rank: int, length: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 1 + length), generator=generator)


def keep_own(model: nn.Module, mesh: DeviceMesh) -> None:
    """Plain tensors of this rank's experts in the place of DTensors."""
    for module in model.modules():
        if isinstance(module, example.MixtureOfExperts):
            module.mesh = mesh
            for name, param in list(module.experts.named_parameters()):
                own = nn.Parameter(param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone())
                own.divided = mesh.get_local_rank(), mesh.size()
                setattr(module.experts, name, own)


def train_experts(model: nn.Module, *, shared: bool, weighted: bool = False, steps: int = STEPS) -> None:
    """Trains `model`, sharded, and a whole one on the same tokens.

    Args:
        model: whose experts are divided over ranks.
        shared: as for `build`.
        weighted: micro-batches have other numbers of tokens on every rank, one of them none, and losses count by them.
        steps: of the optimizer.
    """

    def count(micro: int, rank: int) -> int:
        return (rank + micro) % 4 if weighted else 4

    pair = Pair(
        base=build(shared=shared),
        model=model,
        loss_of=example.next_token_loss,
        data_of=lambda step, micro, rank: tokens(step, micro, rank, count(micro, rank)),
        counts=count if weighted else None,
        clip=0.3,
    )
    pair.train(steps=steps)
