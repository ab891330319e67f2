"""Optimizers on whole tensors as users use them: methods, bytes and refusals."""

from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import zeromesh as zm
from tests.dist.owners.optimizers import LAMB, SOAP, EightBits
from tests.dist.owners.test_parity import MICRO_BATCHES, backward, backward_plainly, groups_of, loss_of, net, shard
from tests.dist.parity import close, same_params, sharded_params
from tests.dist.pool import on_ranks
from zeromesh.comm.transport import Native
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import WHOLE
from zeromesh.errors import MismatchError, OptimizerError
from zeromesh.owners import optimizer as by_owner_module


def elements_that_move(model: nn.Module, optimizer: Any) -> Counter[str]:
    """By axis, over all ranks of a copy: elements that lie at another index than their tensor's owner, one by one."""
    layout = engine_of(model).schedule.layout
    ranks = layout.degree(layout.significant)
    found: Counter[str] = Counter()
    for tensor, owner in zip(optimizer.placements, optimizer.owners.rank_of, strict=True):
        for element in range(math.prod(tensor.shape)):
            home, goal = (tensor.start + element) * ranks // tensor.padded, owner
            for axis in reversed(layout.significant):
                (home, here), (goal, there) = divmod(home, axis.size), divmod(goal, axis.size)
                found[axis.name] += here != there
    return found


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=0,cluster=1", "node=0,cluster=0"])
@on_ranks(4)
def test_bytes_by_axis_are_predicted(strategy):
    """Exactly on each rank; over all ranks twice 8 bytes for an element elsewhere than its owner: gradients there,
    values back. In the first step, and after others have changed values, these there too."""
    model = shard(net(), (2, 2), strategy)
    trained = [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]
    before = zm.traffic_report(model, micro_batches=MICRO_BATCHES).lines()
    optimizer = zm.by_owner(SOAP, trained, bucket_bytes=400)
    engine = engine_of(model)
    copies = engine.schedule.layout.degree(engine.schedule.layout.replica_axes)
    moved = elements_that_move(model, optimizer)
    anew = Counter[str]()
    for shipment in [shipment for bucket in engine.schedule.buckets[-1] for shipment in bucket.anew]:
        anew[shipment.axis.name] += shipment.sent_bytes
    # The first, one as any, one after a change by hand, one as any, and one after a load.
    for step, known in enumerate([False, True, False, True, False]):
        if step == 2:
            with torch.no_grad():
                for param in trained:
                    param.mul_(0.5)
        if step == 4:
            model.load_state_dict(model.state_dict())
        engine.at_rest(follow=True)  # parameters that either brings up to date before the next forward are not counted
        with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        lines = traffic.lines()
        more = {line.axis: line.sent_bytes - line.predicted_bytes for line in lines}
        assert more == {line.axis: 0 if known else anew[line.axis] for line in lines}
        own = torch.tensor([line.sent_bytes - old.predicted_bytes for line, old in zip(lines, before, strict=True)])
        dist.all_reduce(own)
        assert own.tolist() == [copies * (16 if known else 24) * moved[line.axis] for line in lines]
    assert sum(moved.values()) == 0 if strategy == "node=0,cluster=0" else sum(moved.values()) > 0


def mixed(model: nn.Module) -> list[optim.Optimizer]:
    """As users mix them: Muon on the blocks' matrices, AdamW on slices for the rest."""
    params = [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]
    return [
        zm.by_owner(optim.Muon, [p for p in params if p.ndim == 2], lr=0.02, bucket_bytes=400),
        optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
    ]


@on_ranks(4)
def test_two_optimizers_in_one_unit_send_what_is_predicted():
    """From the second step on, when both have stepped: in either order, and where either's gradients are dropped
    between them."""
    model = shard(net(), (2, 2), "node=1,cluster=1")
    optimizers = mixed(model)
    for step in range(5):
        if step > 2:
            optimizers.reverse()
        with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                if step % 2:
                    optimizer.zero_grad()
            assert not engine_of(model).changes.waiting
            engine_of(model).at_rest(follow=True)
        model.zero_grad()
        sent = {line.axis: (line.sent_bytes, line.predicted_bytes) for line in traffic.lines()}
        assert step == 0 or all(found == predicted for found, predicted in sent.values()), f"step {step}: {sent}"


@on_ranks(4)
def test_an_optimizer_that_is_skipped_keeps_no_unit_waiting():
    """As one's gradients are dropped instead (a scaler has skipped its step), parameters are sent: one rank may then
    compute alone, where nothing is gathered. Kept gradients have the next forward do it, on all ranks."""
    model, plain = shard(net(), (2, 2), "node=1,cluster=1"), net()
    ours, theirs = (
        mixed(model),
        [optim.Muon([p for p in plain.parameters() if p.requires_grad and p.ndim == 2], lr=0.02)],
    )
    theirs.append(optim.AdamW([p for p in plain.parameters() if p.ndim != 2], lr=0.01))
    changes = engine_of(model).changes
    for step, skipped in enumerate([None, 0, 1, None, 0]):
        backward(model, step)
        backward_plainly(plain, step)
        for place in [place for place in (1, 0) if place != skipped]:
            ours[place].step()
            theirs[place].step()
        assert bool(changes.waiting) == (skipped is not None)
        if step < 4:
            for optimizer in (*ours, *theirs):
                optimizer.zero_grad()
            assert not changes.waiting
        if dist.get_rank() == 0 or step == 4:
            with torch.no_grad():
                close(model(torch.arange(4)), plain(torch.arange(4)), f"outputs after step {step}")
        assert not changes.waiting
    same_params(model, plain)


@on_ranks(4)
def test_memory_is_predicted():
    """Before any step, and after one: states of tensors that this rank owns, and values of those that it owns and does
    not hold whole; inside a step, messages on their way."""
    model = shard(net(), (2, 2), "node=3,cluster=1")
    trained = [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]
    for kind, shapes in ((SOAP, True), (optim.AdamW, False), (optim.Adafactor, True)):
        optimizer = zm.by_owner(kind, trained)
        lines = {line.kind: line for line in zm.memory_report(model, optimizer)}
        predicted = lines["optimizer"].predicted_bytes
        held = sum(param.numel() for param in WHOLE[optimizer])
        kept = sum(param.numel() for param in WHOLE[optimizer] if param.local.numel() < param.numel())  # type: ignore[attr-defined]  # slices
        assert lines["step"].predicted_bytes > 0 == lines["step"].allocated_bytes
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        found = {line.kind: line for line in zm.memory_report(model, optimizer)}["optimizer"]
        assert found.allocated_bytes == found.predicted_bytes == predicted
        if not shapes:
            assert predicted == 8 * (2 * held + kept) + engine_of(model).schedule.memory.master_bytes
        after = {line.kind: line for line in zm.memory_report(model, optimizer)}["step"]
        assert after.allocated_bytes == after.predicted_bytes == lines["step"].predicted_bytes
        zm.check_replicas(model, optimizer)
    total = torch.tensor([sum(param.numel() for param in WHOLE[optimizer])])
    dist.all_reduce(total)
    assert total.item() == sum(param.numel() for param in trained), "each tensor's states are on one rank"


@on_ranks(2)
def test_schedulers_hooks_groups_closures_and_a_trace():
    """In the trace the optimizer lasts until the last bucket's step has ended."""
    plain, model = net(), shard(net(), (2,), "node=3", debug=True)
    calls: list[str] = []
    optimizers: list[Any] = [
        LAMB(groups_of(plain, matrices=False)),
        zm.by_owner(LAMB, groups_of(model, matrices=False), bucket_bytes=400),
    ]
    assert isinstance(optimizers[1], optim.Optimizer) and len(optimizers[1].param_groups) == 2
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    optimizers[1].register_step_pre_hook(lambda *_: calls.append("before"))
    optimizers[1].register_step_post_hook(lambda *_: calls.append("after"))
    inside: list[float] = []
    for bucket in optimizers[1].buckets:
        bucket.optimizer.register_step_post_hook(lambda *_: inside.append(time.perf_counter()))
    with zm.record_trace(model) as recording:
        for step in range(3):

            def closure(step: int = step) -> Any:
                backward(model, step)
                return "a loss"

            backward_plainly(plain, step)
            optimizers[0].step()
            if step < 2:
                assert optimizers[1].step(closure) == "a loss"
            else:
                backward(model, step)
                optimizers[1].step()
            for each, scheduler in zip(optimizers, schedulers, strict=True):
                each.zero_grad()
                scheduler.step()
                each.param_groups[1]["lr"] = 0.03 / (step + 1)
            same_params(model, plain)
    assert calls == ["before", "after"] * 3
    assert [group["step"] for group in optimizers[1].param_groups] == [3, 3]
    stepping = [event for event in recording.steps[-1].events if event.name == "optimizer"]  # waits lie between
    lasted = max(event.end_s for event in stepping) - min(event.start_s for event in stepping)
    assert lasted >= inside[-1] - inside[-len(optimizers[1].buckets)] > 0


@pytest.mark.parametrize("in_hook", [False, True])
@on_ranks(2)
def test_changes_by_hand_and_skipped_tensors_are_seen(in_hook):
    """The owner steps on values of now, also where somebody else has changed them; tensors without gradients rest."""
    plain, model = net(), shard(net(), (2,), "node=3")
    optimizers = [LAMB(groups_of(plain, matrices=False)), zm.by_owner(LAMB, groups_of(model, matrices=False))]

    @torch.no_grad()
    def shrink(each: nn.Module, *_: Any) -> None:
        for param in each.parameters():
            param.mul_(0.9)

    for each, optimizer in zip((plain, model), optimizers, strict=True) if in_hook else ():
        optimizer.register_step_post_hook(partial(shrink, each))
    for step in range(3):
        backward_plainly(plain, step)
        backward(model, step)
        for each in (plain, model):
            for name, param in each.named_parameters():
                if f"blocks.{step}." in name:
                    param.grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for each in () if in_hook else (plain, model):
            shrink(each)
        same_params(model, plain)


@on_ranks(2)
def test_grad_scaler_skips_on_all_ranks():
    model = shard(net().float(), (2,), "node=3")
    optimizer = zm.by_owner(LAMB, groups_of(model, matrices=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = zm.full_state_dict(model)
    scaler.scale(loss_of(model, 0, 0, dist.get_rank())).backward()
    sharded_params(model)["embed.weight"].grad.local.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for name, value in zm.full_state_dict(model).items():
        close(value, before[name], name)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0, 0, dist.get_rank())).backward()
    scaler.step(optimizer)
    after = zm.full_state_dict(model)
    assert dist.get_rank() or any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        (optim.AdamW, {"param_dtype": torch.bfloat16}),
        (optim.SGD, {"param_dtype": torch.bfloat16, "master_dtype": torch.bfloat16}),
    ],
)
@on_ranks(2)
def test_elementwise_ones_are_to_the_bit_what_they_are_on_slices(kind, dtypes):
    """With masters apart from the compute copy, and with fp32 gradients of bf16 masters."""
    models = [shard(net().float(), (2,), "node=3", **dtypes) for _ in range(2)]
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = [
        kind(groups_of(models[0], matrices=False), **options),
        zm.by_owner(kind, groups_of(models[1], matrices=False), bucket_bytes=400, **options),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            grads = [param.grad for param in sharded_params(model).values() if param.grad is not None]
            assert {grad.local.dtype for grad in grads} == {torch.float32}  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours.local, theirs.local)  # type: ignore[attr-defined]
    predicted, taken = optimizers[1].room_bytes()
    assert 0 < taken <= predicted, (predicted, taken)


@on_ranks(4)
def test_one_all_to_all_where_the_backend_has_its_own():
    """As the native transport does: bytes laid together, of two dtypes and odd lengths, once a bucket and axis."""
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "master_dtype": torch.bfloat16}
    models = [shard(net().float(), (2, 2), "node=3,cluster=1", **options) for _ in range(2)]
    optimizers = [zm.by_owner(optim.SGD, groups_of(model, matrices=False), bucket_bytes=400) for model in models]
    for bucket in optimizers[1].buckets:
        bucket.groups = {name: replace(group, transport=Native("cpu")) for name, group in bucket.groups.items()}
        for group in bucket.groups.values():
            group.record = lambda sent: calls.append((sent.axis, sent.messages))
    calls: list[tuple[str, int]] = []
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours.local, theirs.local)  # type: ignore[attr-defined]
    assert Counter(calls) == {(axis, 1): 2 * 2 * len(optimizers[1].buckets) for axis in ("node", "cluster")}


@on_ranks(2)
def test_an_optimizer_that_is_gone_leaves_nothing():
    model = shard(net(), (2,), "node=3")
    trained = [param for param in model.parameters() if param.requires_grad]
    before = [line.predicted_bytes for line in zm.traffic_report(model, micro_batches=1).lines()]
    optimizer = zm.by_owner(LAMB, trained)
    backward(model, 0)
    optimizer.step()
    state = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"]) if optimizer.state else None
    other = zm.by_owner(SOAP, trained)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert state is None or state() is None
    backward(model, 1)
    other.step()
    del other
    gc.collect()
    assert [line.predicted_bytes for line in zm.traffic_report(model, micro_batches=1).lines()] == before


class TwoModes(LAMB):
    """Evaluates at other values than it trains at, and goes from one to the other when told."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options, training=False)

    def train(self) -> None:
        self._move(True, 0.5)

    def eval(self) -> None:
        self._move(False, 2.0)

    @torch.no_grad()
    def _move(self, training: bool, factor: float) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["training"] is not training else ():
                param.mul_(factor).add_(param.norm() * sum(self.state[param].values(), torch.zeros(())).sum())
            group["training"] = training

    def step(self, closure: Any = None) -> Any:
        assert all(group["training"] for group in self.param_groups)
        return super().step(closure)


@on_ranks(2)
def test_further_methods_of_the_class_are_called_on_whole_tensors():
    plain, model = net(), shard(net(), (2,), "node=3")
    trained = [[p for n, p in m.named_parameters() if p.requires_grad and "unused" not in n] for m in (plain, model)]
    optimizers: list[Any] = [TwoModes(trained[0]), zm.by_owner(TwoModes, trained[1], bucket_bytes=400)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.train()
        backward(model, step)
        backward_plainly(plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
        same_params(model, plain)
        close(loss_of(model, 9, 0, 0), loss_of(plain, 9, 0, 0), "the loss at these values")
    zm.check_replicas(model, optimizers[1])
    assert not hasattr(optimizers[1], "evaluate")


class Codes(torch.Tensor):
    """As some optimizers keep states: of few bits."""


class FewBits(LAMB):
    def update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        coded = param.numel() > 50  # those of few elements stay as they are
        state.setdefault("mean", torch.zeros_like(param).as_subclass(Codes if coded else torch.Tensor))


@pytest.mark.parametrize("owned", [True, False])
@on_ranks(4)
def test_states_of_unknown_subclasses_are_refused_at_the_first_step(owned):
    """On all ranks, where some of them own nothing of the kind."""
    model = shard(net(), (2, 2), "node=3,cluster=1")
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = zm.by_owner(FewBits, params) if owned else zm.elementwise(FewBits(params))
    backward(model, 0)
    with pytest.raises(
        OptimizerError, match=r"states of FewBits must be plain tensors or numbers.*'mean' is of a subclass"
    ):
        optimizer.step()


@on_ranks(2)
def test_quantised_states_and_a_learning_rate_that_is_a_tensor():
    """As torchao's: whole tensors give the numbers of one process, in any layout; slices are refused."""
    model, plain = shard(net(), (2,), "node=3"), net()
    params = [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]
    optimizer, theirs = zm.by_owner(EightBits, params, bucket_bytes=400), EightBits(plain.parameters())
    assert len(optimizer.buckets) > 2
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, theirs)]
    for step in range(3):
        backward(model, step)
        backward_plainly(plain, step)
        for each, scheduler in zip((optimizer, theirs), schedulers, strict=True):
            each.step()
            scheduler.step()
            each.zero_grad()
        same_params(model, plain)
    for line in zm.memory_report(model, optimizer):
        assert line.predicted_bytes == line.allocated_bytes, line
    zm.check_replicas(model, optimizer)
    backward(model, 3)
    with pytest.raises(OptimizerError, match=r"make it as zm\.by_owner\(EightBits, params\)"):
        zm.elementwise(EightBits(params)).step()


class Clipping(LAMB):
    """Scales by a norm over all gradients inside its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Closing(LAMB):
    """Needs a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@on_ranks(4)
def test_what_is_refused():
    base = net()
    early = copy.deepcopy(base)
    model, other = shard(net(), (2, 2), "node=3,cluster=1"), shard(net(), (2, 2), "node=0,cluster=1")
    params = [param for param in model.parameters() if param.requires_grad]
    for kind in (optim.LBFGS, Clipping):
        with pytest.raises(OptimizerError, match=rf"each tensor by itself; {kind.__name__} makes"):
            zm.by_owner(kind, params)
    with pytest.raises(OptimizerError, match="without a closure"):
        zm.by_owner(Closing, params)
    with pytest.raises(OptimizerError, match=r"parameters of one sharded model; got Parameter at place 0"):
        zm.by_owner(LAMB, early.parameters())
    with pytest.raises(OptimizerError, match=rf"got ShardedParameter at place {len(params)}"):
        zm.by_owner(LAMB, [*params, *other.parameters()])
    with pytest.raises(OptimizerError, match="got none"):
        zm.by_owner(LAMB, [])
    with pytest.raises(ValueError, match="2D"):  # torch's own words
        zm.by_owner(optim.Muon, params)
    with pytest.raises(MismatchError, match=r"same tensors in zm\.by_owner"):
        zm.by_owner(LAMB, params if dist.get_rank() else params[:-1])
    optimizer = zm.by_owner(LAMB, params[:3])
    needed = optimizer.state_bytes() + optimizer.kept_bytes() + optimizer.room_bytes()[0]
    with pytest.MonkeyPatch.context() as patch:  # a device has a limit, a host has none
        patch.setattr(by_owner_module, "free_bytes", lambda device: needed - 8 * (dist.get_rank() == 2))
        with pytest.raises(OptimizerError, match=r"rank 2 owns tensors .* .* are free, 8 B too little"):
            zm.by_owner(LAMB, params[:3])
        patch.setattr(by_owner_module, "free_bytes", lambda device: needed)
        zm.by_owner(LAMB, params[:3])
    with pytest.raises(OptimizerError, match="chosen once"):
        optimizer.add_param_group({"params": params[3:]})
    with pytest.raises(OptimizerError, match=r"make it as zm\.by_owner\(LAMB, params\)"):
        LAMB(params).step()
    backward(model, 0)
    if dist.get_rank() == 2:
        params[1].grad = None
    with pytest.raises(MismatchError, match=r"must have a gradient of blocks\.0\.\S+ when its owner .* some have one"):
        optimizer.step()
    del model, params
    gc.collect()


@on_ranks(2)
def test_a_step_that_raised_leaves_no_message_under_way_at_rest():
    model = shard(net(), (2,), "node=1")
    optimizer = zm.by_owner(SOAP, [param for param in model.parameters() if param.requires_grad], bucket_bytes=400)
    backward(model, 0)
    engine = engine_of(model)
    with mock.patch.object(type(optimizer.buckets[0]), "give_back", side_effect=KeyError), pytest.raises(KeyError):
        optimizer.step()
    assert any(ticket is not None for ticket in engine.whole._steps.under_way)
    engine.at_rest()
    assert not engine.whole._steps.under_way
