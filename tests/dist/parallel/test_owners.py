"""Optimizers on whole tensors beside tensor parallelism: whole over its axis too, with the numbers of one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

import zeromesh as zm
from tests.dist.owners.optimizers import LAMB, Orthogonal
from tests.dist.parallel.experts import build as experts
from tests.dist.parallel.experts import example, tokens
from tests.dist.parallel.tensor import (
    CLIP,
    FP64,
    MICRO_BATCHES,
    backward,
    mesh_of,
    pair_of,
    params_of,
    sharded,
)
from tests.dist.parallel.test_states import shared_path
from tests.dist.parity import Pair, close, local_part, mesh_of_world, same_params
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import WHOLE

Make = Callable[..., optim.Optimizer]


def optimizers_of(model: nn.Module, make: Make) -> list[optim.Optimizer]:
    """Muon on the matrices of blocks, LAMB on others, divided or not, AdamW on their vectors, all of them by `make`."""
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if "blocks" in name and param.ndim == 2]
    norms = [param for name, param in named.items() if "blocks" in name and param.ndim < 2]
    rest = [param for name, param in named.items() if "blocks" not in name]
    return [
        make(optim.Muon, matrices, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        make(LAMB, rest),
        make(optim.AdamW, norms, lr=0.01),
    ]


def by_owner(kind: type[optim.Optimizer], params: Any, **options: Any) -> optim.Optimizer:
    return zm.by_owner(kind, params, bucket_bytes=300, **options)  # several, that are on their way at once


def plainly(kind: type[optim.Optimizer], params: Any, **options: Any) -> optim.Optimizer:
    return kind(params, **options)


@dataclass
class Both:
    """A model with its owners beside a plain one, with its optimizers."""

    pair: Pair
    ours: list[optim.Optimizer]
    theirs: list[optim.Optimizer]

    def train(self, plan: str, steps: range) -> None:
        """Compares parameters after each of the steps, and states after the last."""
        for step in steps:
            self.pair.plain_backward(step)
            backward(self.pair.model, plan, step, self.pair.own)
            zm.clip_grad_norm_(self.pair.model, CLIP)
            nn.utils.clip_grad_norm_(self.pair.plain.parameters(), CLIP)
            for optimizer in (*self.ours, *self.theirs):
                optimizer.step()
                optimizer.zero_grad()
            self.pair.same_params()
        self.same_states()

    def same_states(self) -> list[str]:
        """Names of those parameters whose states are here."""
        named, found = dict(self.pair.plain.named_parameters()), list[str]()
        for optimizer, plain in zip(self.ours, self.theirs, strict=True):
            for param, state in optimizer.state.items():
                assert param in WHOLE[optimizer]
                wanted = plain.state[named[param.full_name]]
                assert state.keys() == wanted.keys()
                for key, value in wanted.items():
                    close(torch.as_tensor(state[key]), torch.as_tensor(value), f"{key} of {param.full_name}")
                found.append(param.full_name)
        return found


def both(strategy: str, plan: str, mesh: DeviceMesh) -> Both:
    pair = pair_of(strategy, plan, mesh)
    return Both(pair, optimizers_of(pair.model, by_owner), optimizers_of(pair.plain, plainly))


def gathered(value: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


@pytest.mark.parametrize(("strategy", "plan"), [("node=3", "blocks"), ("node=1", "loss")])
@on_ranks(4)
def test_numbers_of_one_process(strategy, plan):
    run = both(strategy, plan, mesh_of(2))
    run.train(plan, range(2))
    counts = Counter(chain(*gathered([param.full_name for optimizer in run.ours for param in WHOLE[optimizer]])))
    layout = engine_of(run.pair.model).schedule.layout
    replicas = layout.degree(layout.replica_axes)
    for param in params_of(run.pair.model):  # divided ones have one owner over all of tp, others one in each
        assert counts[param.full_name] == replicas * (2 if param.region.is_whole else 1), param.full_name


def elements_that_move(model: nn.Module, optimizer: optim.Optimizer, tp: int) -> Counter[str]:
    """By axis, over all ranks: elements that lie at another index than their tensor's owner, as ranks say it."""
    mesh, own = mesh_of(2, tp=tp), dict[str, tuple[list[int], bool, bool]]()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        held = local_part(param, torch.arange(param.numel()).view(param.shape)).tolist()
        own[param.full_name] = held, param in WHOLE[optimizer], param.region.is_whole
    said = gathered((tuple(mesh.get_coordinate() or ()), own))
    found: Counter[str] = Counter()
    for (node, plane), tensors in said:
        for name, (held, _, repeated) in tensors.items():
            planes = [plane] if repeated else range(tp)
            (owner,) = [at for at, others in said if others[name][1] and at[1] in planes]
            found["node"] += len(held) * (owner[0] != node)
            found["tp"] += len(held) * (owner[1] != plane)
    return found


@on_ranks(4)
def test_bytes_and_memory_are_predicted():
    """Exactly on each rank; over all ranks 8 bytes for an element elsewhere than its owner, there and back."""
    model = sharded("node=1", "tensor", mesh_of(2))
    before = {line.axis: line.predicted_bytes for line in zm.traffic_report(model, micro_batches=MICRO_BATCHES).lines()}
    params = [param for param in model.parameters() if param.ndim == 2]
    optimizer = by_owner(optim.Muon, params, lr=0.05)
    memory = {line.kind: line for line in zm.memory_report(model, optimizer)}
    assert set(before) == {"node"}
    for step in range(2):
        engine_of(model).at_rest(follow=True)
        with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
            backward(model, "tensor", step, engine_of(model).control.rank)
            optimizer.step()
            optimizer.zero_grad()
    assert all(line.sent_bytes == line.predicted_bytes for line in traffic.lines())
    sent = torch.tensor([line.sent_bytes - before.get(line.axis, 0) for line in traffic.lines()])
    dist.all_reduce(sent)
    moved = elements_that_move(model, optimizer, 2)
    assert dict(zip([line.axis for line in traffic.lines()], sent.tolist(), strict=True)) == {
        axis: 16 * count for axis, count in moved.items()
    }
    assert 0 < moved["tp"] < sum(param.numel() for param in params)
    for line in zm.memory_report(model, optimizer):
        if line.kind in ("optimizer", "step"):
            assert line.allocated_bytes == line.predicted_bytes == memory[line.kind].predicted_bytes, line.kind


@on_ranks(4)
def test_resumes_under_another_degree(tmp_path):
    """Under degrees 1 and 4 a checkpoint of 2; and, by `state_dict`, states of tensors that a rank owns."""
    path, run = shared_path(tmp_path), both("node=3", "blocks", mesh_of(2))
    run.train("blocks", range(1))
    with zm.Checkpoints(path, run.pair.model, run.ours) as checkpoints:
        checkpoints.save(2)
        checkpoints.wait()
    for shape, tp, plan in ((4, 1, "blocks"), (1, 4, "tensor")):
        other = both("node=1", plan, mesh_of(shape, tp=tp))
        other.pair.plain, other.theirs = run.pair.plain, run.theirs
        with torch.no_grad():
            for param in other.pair.model.parameters():
                param.zero_()
        with zm.Checkpoints(path, other.pair.model, other.ours) as checkpoints:
            assert checkpoints.load() is not None
        other.pair.same_params()
        assert {*chain(*gathered(other.same_states()))} == {name for name, _ in run.pair.plain.named_parameters()}
    saved = [optimizer.state_dict() for optimizer in run.ours]
    run.ours = optimizers_of(run.pair.model, by_owner)
    for optimizer, state in zip(run.ours, saved, strict=True):
        optimizer.load_state_dict(state)
    run.train("blocks", range(1, 2))


def of_experts(model: nn.Module, make: Make, ours: dict[str, Any]) -> list[optim.Optimizer]:
    """One on each matrix of most experts' weights, one on whole weights of the others, one for all else."""
    named = dict(model.named_parameters())
    experts = {name: param for name, param in named.items() if ".experts." in name}
    single = [param for name, param in experts.items() if not name.endswith("down")]
    return [
        make(Orthogonal, single, **ours),
        make(LAMB, [param for name, param in experts.items() if name.endswith("down")]),
        optim.AdamW([param for name, param in named.items() if name not in experts], lr=0.01),
    ]


def train_experts(model: nn.Module, plain: nn.Module) -> list[Any]:
    """One step of both, with the same optimizers; this rank's parts are compared."""
    ours = of_experts(model, by_owner, {"dims": 2, "batched": True}), of_experts(plain, plainly, {})
    for micro in range(MICRO_BATCHES):
        for rank in range(4):
            (example.next_token_loss(plain, tokens(0, micro, rank)) / MICRO_BATCHES / 4).backward()
        with zm.accumulate(model, last=micro == MICRO_BATCHES - 1):
            own = tokens(0, micro, engine_of(model).control.rank)
            (example.next_token_loss(model, own) / MICRO_BATCHES).backward()
    for each in (each for both in ours for each in both):
        each.step()
        each.zero_grad()
    same_params(model, plain)
    return ours[0]


def states_of(model: nn.Module, optimizers: list[Any]) -> dict[tuple[str, str, int], float]:
    """Each element of the states of owned tensors, by name, state and place in the whole tensor."""
    own: dict[tuple[str, str, int], float] = {}
    for optimizer in optimizers:
        for param, region in WHOLE.get(optimizer, {}).items():
            for key, value in optimizer.state[param].items():
                shape = region.whole_shape(value.shape)
                places = torch.arange(math.prod(shape)).view(shape)[region.of(shape).index]
                pairs = zip(places.flatten().tolist(), value.flatten().tolist(), strict=True)
                own |= {(param.full_name, key, place): element for place, element in pairs}
    return {place: element for each in gathered(own) for place, element in each.items()}


@on_ranks(4)
def test_experts_that_are_divided_by_number_are_batches_of_whole_matrices(tmp_path):
    """Nothing of them moves over the axis that divides them, unless the class needs all experts of a layer together."""
    path, mesh = shared_path(tmp_path), mesh_of_world()
    model, plain = experts(shared=False), experts(shared=False)
    model.spread(mesh["node"])
    parts = {"*.experts": zm.Part(mesh=mesh["cluster"], strategy="cluster=1")}
    model = zm.shard(model, mesh, "node=3,cluster=1", parts=parts, **FP64)
    optimizers = train_experts(model, plain)
    assert [axis.name for axis in engine_of(model).schedule.beyond] == ["beyond node"]
    assert ["beyond node" in optimizer.buckets[0].strides for optimizer in optimizers[:2]] == [False, True]
    with zm.Checkpoints(path, model, optimizers) as checkpoints:
        checkpoints.save(2)
        checkpoints.wait()
    saved = [optimizer.state_dict() for optimizer in optimizers]
    wanted = states_of(model, optimizers)
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    assert states_of(model, optimizers) == wanted
    other = zm.shard(experts(shared=False), mesh, "node=1,cluster=3", **FP64)
    loaded = of_experts(other, by_owner, {"dims": 2})
    with zm.Checkpoints(path, other, loaded) as checkpoints:
        assert checkpoints.load() is not None
    assert states_of(other, loaded) == wanted
