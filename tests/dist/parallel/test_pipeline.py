"""Pipelines of sharded stages under torch's schedules."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

import zeromesh as zm
from tests.dist.parallel.pipelines import (
    MICROS,
    SCHEDULES,
    Staged,
    batch,
    loss_of,
    mean_loss,
    mesh_of,
    parity,
    staged,
)
from tests.dist.parity import Block, both_params, local_part, net, same_grads, same_optimizer_states, same_params, sgd
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import CheckpointError, InputError, MismatchError, ModelError, OptimizerError

SCARCE = "node=3,cluster=0;prefetch=0"
"""All blocks of a stage share one slot, so each is gathered anew for each forward and backward."""


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4)
def test_trains_as_plain_training_does(name: str) -> None:
    if name in ("gpipe", "zero-bubble"):
        parity(name, "node=1,cluster=0", 4)
    else:
        parity(name, SCARCE, 4, debug=True)


@on_ranks(8)
def test_on_two_levels_and_beside_tensor_and_sequence_parallelism() -> None:
    parity("1f1b", "host=1,node=3,cluster=1", 8, steps=1)
    parity("zbv", "host=3,node=3,cluster=0", 8, steps=1, tp=2)


def calls_of_a_step(ours: Staged, step: int) -> list[Counter[str]]:
    """By stage on this rank: how many collectives, by operation."""
    with ExitStack() as reports:
        found = [reports.enter_context(zm.traffic_report(model, micro_batches=MICROS)) for model in ours.models]
        ours.step(batch(step, dist.get_rank() % 2))
    return [Counter(call.operation for call in report.calls) for report in found]


@on_ranks(4)
def test_gradients_are_reduced_once_a_step_and_stage() -> None:
    """Where they wait for the step's end; else with each micro-batch, of zero-bubble's halves in the second alone."""
    for strategy, times in {"node=3,cluster=0": MICROS, "node=3d,cluster=0": 1}.items():
        ours = staged(net(num_blocks=4), "zbv", strategy, mesh_of(4))
        calls_of_a_step(ours, 0)  # in which torch learns the shapes
        for model, calls in zip(ours.models, calls_of_a_step(ours, 1), strict=True):
            units = sum(unit.trainable for unit in engine_of(model).schedule.units)
            assert calls["reduce_scatter"] == units * times


@on_ranks(4)
def test_a_stage_whose_blocks_share_a_slot_gathers_them_for_each_pass() -> None:
    """But where a forward is followed by a backward, whose first block is still there. The root has its own slot."""
    blocks = 2
    for name, turns in {"gpipe": (1, 1), "1f1b": (3, 4)}.items():
        ours = staged(net(num_blocks=2 * blocks), name, SCARCE, mesh_of(4))
        calls_of_a_step(ours, 0)
        (calls,) = calls_of_a_step(ours, 1)
        assert calls["all_gather"] == 2 * MICROS * blocks - turns[dist.get_rank() // 2] + MICROS


@on_ranks(4)
def test_a_step_of_two_runs_of_the_schedule() -> None:
    """`zm.accumulate` around the first; a run without gradients, and one whose gradients are dropped, leave nothing."""
    plain, mesh, place = net(num_blocks=4), mesh_of(4), dist.get_rank() % 2
    for name in ("1f1b", "zbv"):
        ours = staged(plain, name, SCARCE, mesh)
        ours.step(batch(7, place))
        ours.optimizer.zero_grad()
        with ExitStack() as contexts:
            for model in ours.models:
                contexts.enter_context(zm.accumulate(model, last=False))
            ours.step(batch(0, place))
        assert all(param.grad is None for model in ours.models for param in model.parameters())
        with pytest.raises(OptimizerError, match=r"run the last backward before the step under zm.accumulate"):
            ours.optimizer.step()
        if name == "1f1b":
            ours.eval(batch(3, place))  # torch's own ZBV cannot
        ours.step(batch(1, place))
        plain.zero_grad()
        for step in range(2):
            for micro in [micro for other in range(2) for micro in batch(step, other).chunk(MICROS)]:
                (mean_loss(plain, micro) / (2 * MICROS)).backward()
        same_grads(ours.models, plain)


@on_ranks(4)
def test_norms_and_skipped_steps_are_those_of_all_stages() -> None:
    """Rank 1 has gradients of one stage, rank 0 of two."""
    whole = net(num_blocks=4)
    whole.blocks[1].requires_grad_(False)
    ours = staged(whole, "zbv", "node=3,cluster=1", mesh_of(4), make=sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # it begins with its first loss, which is on the ranks of the last stage
    ours.schedule._loss_fn = lambda logits, target: scaler.scale(loss_of(logits, target))
    for last_value in (1.0, math.inf):
        ours.step(batch(0, dist.get_rank() % 2))
        if dist.get_rank() == 0:  # a gradient of the first stage
            next(iter(ours.models[0].parameters())).grad.mul_(last_value)
        before = [param.local.clone() for model in ours.models for param in model.parameters()]
        scaler.step(ours.optimizer)
        scaler.update()
        changed = [not param.local.equal(was) for param, was in zip(params_of(ours), before, strict=True)]
        assert any(changed) == (last_value == 1.0)
        for order in (2.0, math.inf):
            norm = zm.clip_grad_norm_(ours.models, 1e9, order)
            assert bool(norm.isfinite()) == (last_value == 1.0)
        ours.optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_joint_norm_is_the_same_where_a_stage_is_frozen() -> None:
    whole, found = net(num_blocks=4), [None, None]
    for module in (*whole.blocks[2:], whole.norm, whole.head):
        module.requires_grad_(False)
    ours = staged(whole, "1f1b", "node=1,cluster=0", mesh_of(2))
    ours.step(batch(0, 0))
    dist.all_gather_object(found, float(zm.clip_grad_norm_(ours.models, 1e-3)))
    assert found[0] == found[1] != torch.tensor(found[0]).float().item()  # in fp64
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    frozen = (OptimizerError, r"a gradient on each rank of a pipeline, but all stages of rank 1 .* are frozen")
    kind, said = frozen if dist.get_rank() == 0 else (AssertionError, "No inf checks were recorded")  # torch's own
    with pytest.raises(kind, match=said):
        scaler.step(ours.optimizer)


def grouped(params: Iterable[Any], lr: float = 1e-2) -> torch.optim.Optimizer:
    """Two groups, of which a rank's stages may have one alone."""
    held = list(params)
    groups = ([p for p in held if len(p.shape) > 1], [p for p in held if len(p.shape) == 1])
    return torch.optim.AdamW([{"params": group, "lr": lr * (i + 1)} for i, group in enumerate(groups)])


def require_states(ours: Staged, plain: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    same_params(ours.models, plain)
    same_optimizer_states(ours.models, ours.optimizer, plain, optimizer)


@on_ranks(4)
def test_a_checkpoint_of_all_stages_loads_under_another_cut(tmp_path: Path) -> None:
    """Each time training goes on as plain training does, with the learning rates that were saved."""
    plain = net(num_blocks=4)
    fresh, optimizer = net(num_blocks=4), grouped(plain.parameters())
    cuts = [("zbv", "node=3,cluster=1", 2), ("1f1b", "node=1,cluster=3", 2), ("of four", "node=1,cluster=0", 4)]
    for step, (name, strategy, pp) in enumerate(cuts):
        mesh = mesh_of(4, pp=pp)
        ours = staged(fresh, name, strategy, mesh, make=partial(grouped, lr=1e-2 if step == 0 else 7.0))
        with zm.Checkpoints(tmp_path, ours.models, ours.optimizer) as checkpoints:
            assert (checkpoints.load() is None) == (step == 0)
            require_states(ours, plain, optimizer)
            ours.step(batch(step, mesh.get_local_rank("node")))
            for place in range(4 // pp):
                for micro in batch(step, place).chunk(MICROS):
                    (mean_loss(plain, micro) / (MICROS * (4 // pp))).backward()
            for each in (ours.optimizer, optimizer):
                each.step()
                each.zero_grad()
            require_states(ours, plain, optimizer)
            checkpoints.save(step + 1, {"rank": 0 if dist.get_rank() == 0 else None})
    alone = zm.shard(fresh, mesh["cluster", "node"], "node=3,cluster=3", units=(Block,))  # each rank by itself
    found = Staged([alone], None, grouped(alone.parameters(), lr=7.0))
    with zm.Checkpoints(tmp_path, alone, found.optimizer) as checkpoints:
        restored = checkpoints.load()
        assert restored is not None
        assert (restored.step, restored.state) == (3, {"rank": 0})
        require_states(found, plain, optimizer)
        assert [group["lr"] for group in found.optimizer.param_groups] == [1e-2, 2e-2]
        if dist.get_rank() == 0:
            checkpoints.save(9)
    dist.barrier()
    ours = staged(net(num_blocks=4), "zbv", "node=3,cluster=1", mesh_of(4), make=grouped)
    restored = zm.Checkpoints(tmp_path, ours.models, ours.optimizer).load()
    assert restored is not None
    assert restored.step == 9
    require_states(ours, plain, optimizer)


@on_ranks(4)
def test_frozen_parameters_of_all_stages_may_be_left_out(tmp_path: Path) -> None:
    """By checksums of all of them, wherever they are in this cut and in that of the load."""
    plain = net(num_blocks=4)
    for module in (plain.embed, plain.norm):
        module.requires_grad_(False)
    saved, other, wrong = copy.deepcopy(plain), copy.deepcopy(plain), copy.deepcopy(plain)
    for param in other.blocks.parameters():
        nn.init.zeros_(param)
    nn.init.zeros_(wrong.norm.weight)
    ours = staged(saved, "zbv", "node=3,cluster=1", mesh_of(4))
    with zm.Checkpoints(tmp_path, ours.models, ours.optimizer, frozen=False) as checkpoints:
        checkpoints.save(1)
    found = staged(other, "1f1b", "node=1,cluster=1", mesh_of(4))
    assert zm.Checkpoints(tmp_path, found.models, found.optimizer).load() is not None
    for _, param, value in both_params(found.models, plain):
        assert torch.equal(param.local, local_part(param, value))
    bad = staged(wrong, "1f1b", "node=1,cluster=1", mesh_of(4))
    with pytest.raises(CheckpointError, match=r"other values of 1 of 3 frozen parameters .* such as norm.weight"):
        zm.Checkpoints(tmp_path, bad.models, bad.optimizer).load()


class Part(nn.Linear):
    """A stage whose names may be those of another, with a buffer."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__(width, width)
        self.register_buffer("scale", torch.tensor([value]))


@on_ranks(4)
def test_stages_that_are_no_parts_of_one_model_are_not_saved_as_one(tmp_path: Path) -> None:
    mesh = mesh_of(4)
    rank, data = mesh.get_local_rank("pp"), mesh["cluster", "node"]

    def stage(key: str, module: nn.Module) -> nn.Module:
        model = zm.shard(nn.ModuleDict({key: module}), data, "node=3,cluster=1")
        zm.pipeline([stage_of(model, mesh)])
        return model

    same = stage("0", Part(4, 1.0))
    with pytest.raises(InputError, match=r"stages 0 and 1 both have '0.weight', with shapes \(4, 4\) and \(4, 4\)"):
        zm.Checkpoints(tmp_path, same)
    own = stage(str(rank), nn.Linear(4, 4))
    with pytest.raises(
        InputError, match=r"one directory; its ranks name .*stage-0, .*stage-1: give all ranks the same"
    ):
        zm.Checkpoints(tmp_path / f"stage-{rank}", own)
    with pytest.raises(InputError, match=r"call zm.pipeline\(stages\) first; got 2 models"):
        zm.Checkpoints(tmp_path, [sharded_linear(data), sharded_linear(data)])
    given = [own] if rank == 0 else [own, sharded_linear(data)]
    with pytest.raises(InputError, match=r"this rank holds stages 1 of a pipeline.* got 2 model"):
        zm.Checkpoints(tmp_path, given)
    for value, saved in ((1.0, True), (float(rank), False)):
        part = Part(4, value)
        setattr(part, f"weight{rank}", part.weight)
        setattr(part, f"bias{rank}", part.bias)
        del part.weight, part.bias
        checkpoints = zm.Checkpoints(tmp_path, stage("part", part))
        checkpoints.save(1)
        if saved:
            checkpoints.close()
        else:
            with pytest.raises(CheckpointError, match=r"part.scale is in several stages of the pipeline, with other"):
                checkpoints.close()


def params_of(ours: Staged) -> list[Any]:
    return [param for model in ours.models for param in model.parameters()]


def stage_of(module: nn.Module, mesh: DeviceMesh, **options: Any) -> PipelineStage:
    rank = mesh.get_local_rank("pp")
    return PipelineStage(module, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"), **options)


def sharded_linear(mesh: DeviceMesh, strategy: str = "node=3,cluster=1") -> nn.Module:
    return zm.shard(nn.Linear(4, 4), mesh, strategy)


@on_ranks(4)
def test_what_cannot_be_driven_is_named_on_all_ranks() -> None:
    mesh = mesh_of(4)
    data, first = mesh["cluster", "node"], mesh.get_local_rank("pp") == 0
    other = (MismatchError, r"zm.pipeline must succeed on all ranks; on rank 0 it did not: .*is not sharded")
    for kind, said in [(ModelError, "Linear is not sharded") if first else other]:
        with pytest.raises(kind, match=said):
            zm.pipeline([stage_of(nn.Linear(4, 4) if first else sharded_linear(data), mesh)])
    with pytest.raises(InputError, match=r"takes all stages of this rank, as a list; got none"):
        zm.pipeline([])
    with pytest.raises(InputError, match=r"stage \d is sharded over ranks .*, of which \[\d\] have other stages"):
        zm.pipeline([stage_of(sharded_linear(mesh["pp", "cluster", "node"], "node=3,cluster=1,pp=0"), mesh)])
    with pytest.raises(InputError, match=r"stage \d has a dw_builder"):
        zm.pipeline([stage_of(sharded_linear(data), mesh, dw_builder=lambda: lambda: None)])
    tied = sharded_linear(data)
    tied.config = SimpleNamespace(tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"stage \d ties the input embedding to the output head"):
        zm.pipeline([stage_of(tied, mesh)])
    torch.manual_seed(0)
    copies = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    copies[1].weight = copies[0].weight
    copy = zm.shard(nn.ModuleDict({"part": copies[mesh.get_local_rank("pp")]}), data, "node=3,cluster=1")
    with pytest.raises(InputError, match=r"part.weight of stage 0 and part.weight of stage 1 hold the same values"):
        zm.pipeline([stage_of(copy, mesh)])
    zm.pipeline([stage_of(copy, mesh)], untied=True)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    zm.shard(one, data, "node=3,cluster=1")
    with pytest.raises(ModelError, match=r"weight is a parameter of another model too, 'weight'"):
        zm.shard(two, data, "node=3,cluster=1")


@on_ranks(4)
def test_norms_that_are_of_other_models_than_they_should_be_are_named() -> None:
    mesh = mesh_of(4)
    ours = staged(net(num_blocks=4), "zbv", "node=3,cluster=1", mesh)
    ours.step(batch(0, dist.get_rank() % 2))
    with pytest.raises(InputError, match=r"holds stages \d, \d of a pipeline, .* got 1 model"):
        zm.clip_grad_norm_(ours.models[0], 1.0)
    with pytest.raises(InputError, match=r"joint norm needs models on the same ranks.*call zm.pipeline"):
        zm.clip_grad_norm_([sharded_linear(mesh["node"], "node=3"), sharded_linear(mesh["pp"], "pp=3")], 1.0)
