"""Mixtures of experts, divided over ranks, held against one process that has all of them and all ranks' tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zeromesh as zm
from tests.dist.features.parity import adamw, close, share_grads
from tests.dist.parallel.tensor import own_part
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import ShardedParameter

STEPS, MICRO_BATCHES, VOCABULARY = 2, 2, 13


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
                own = param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
                setattr(module.experts, name, nn.Parameter(own))


def expected_of(param: ShardedParameter, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's slice, of its experts where they are divided over `mesh`."""
    whole = whole.detach()
    if whole.shape != param.region.shape:  # plain tensors
        whole = whole.chunk(mesh.size())[mesh.get_local_rank()]
    return own_part(param, whole)


def compare(model: nn.Module, wholes: Mapping[str, Tensor], mesh: DeviceMesh, what: str) -> None:
    """Parameters, or gradients, with the whole ones of one process."""
    for param in engine_of(model).optimizer_params():
        held = param if what == "parameter" else param.grad
        assert held is not None, param.full_name
        close(held.local, expected_of(param, wholes[param.full_name], mesh), f"{what} of {param.full_name}")  # type: ignore[attr-defined]


def check_experts(
    model: nn.Module, mesh: DeviceMesh, *, shared: bool, weighted: bool = False, steps: int = STEPS, num: int = 4
) -> None:
    """Trains `model`, sharded, and a whole one on the same tokens.

    Args:
        model: whose experts are divided over `mesh`, of one dimension.
        mesh: of experts.
        shared: as for `build`.
        weighted: micro-batches have other numbers of tokens on every rank, one of them none, and losses count by them.
        steps: of the optimizer.
        num: of experts, for `build`.
    """
    plain, control = build(shared=shared, num=num), engine_of(model).control
    world, own_rank = control.size, control.rank
    optimizer, reference = adamw(model.parameters()), adamw(plain.parameters())
    lengths = [[(rank + micro) % 4 if weighted else 4 for rank in range(world)] for micro in range(MICRO_BATCHES)]
    total = float(sum(map(sum, lengths)))
    for step in range(steps):
        for micro, counts in enumerate(lengths):
            own = counts[own_rank]
            weights = {"weight": own, "total": total} if weighted else {}
            with zm.accumulate(model, last=micro == MICRO_BATCHES - 1, **weights) as weigh:
                loss = example.next_token_loss(model, tokens(step, micro, own_rank, own))
                (weigh(loss) if weighted else loss / MICRO_BATCHES).backward()
            for rank, count in enumerate(counts) if dist.get_rank() == 0 else ():
                loss = example.next_token_loss(plain, tokens(step, micro, rank, count))
                (loss * count / total).backward()
        share_grads(plain)
        compare(model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, mesh, "gradient")
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        close(zm.clip_grad_norm_(model, 0.3), norm, "norm")
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        compare(model, dict(plain.named_parameters()), mesh, "parameter")
    named = dict(plain.named_parameters())
    for param in engine_of(model).optimizer_params():
        for key in ("exp_avg", "exp_avg_sq"):
            theirs = expected_of(param, reference.state[named[param.full_name]][key], mesh)
            close(optimizer.state[param][key], theirs, f"{key} of {param.full_name}")
