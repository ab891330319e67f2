"""Every byte of model state and working buffers is predicted, allocated once, and freed with the model."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

import zeromesh as zm
from tests.dist.engine.test_communication import LOSSLESS
from tests.dist.parity import Awkward, Case, backward, mesh_of, sharded, take_step
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import ModelError
from zeromesh.files import available_memory_bytes

SPECIAL = ["node=3,cluster=3k;prefetch=3", "node=1@/fp32,cluster=3@fp32/bf16", "host=1,node=3,cluster=1"]
HOSTED = [
    "host=2,node=1,cluster=0",
    "host=1,node=3,cluster=1;step=device",
    "host[60%]=2,node=3,cluster=1",
    "host[30%]=3,node=3,cluster=2",
    "host=3d,node=3,cluster=3h",
]


@pytest.mark.parametrize(
    ("precision", "strategies"),
    [("bf16-wire", [*LOSSLESS[::6], *SPECIAL[::2], *HOSTED]), ("fp64", [*SPECIAL[1:], *HOSTED[1::2]])],
)
@on_ranks(4)
def test_predicted_is_allocated(precision, strategies):
    case = Case(precision=precision, micro_batches=1)
    for strategy in strategies:
        with sharded(strategy, case, mesh_of(2, 2)) as (model, optimizer):
            buffers = [tensor.data_ptr() for tensor in engine_of(model).backend.working_buffers()]
            take_step(model, optimizer, case, 0)
            # Torch's optimizers make no states where there never is a gradient: two moments, in the master's dtype.
            idle = [b for unit in engine_of(model).units for b in unit.buffers if b.placed.streamed and not b.states]
            never = [p for p in engine_of(model).optimizer_params() if p.requires_grad and "unused" in p.full_name]
            for line in zm.memory_report(model, optimizer.members[0]):
                unmade = [param.local.nbytes for param in never if param.on_host == (line.place == "host")]
                if "step=device" in strategy:  # states lie as the buffer does
                    unmade = [buffer.optimizer_shard[0].nbytes for buffer in idle if line.place == "host"]
                missing = 2 * sum(unmade) if line.kind in ("optimizer", "total") else 0
                assert line.predicted_bytes == line.allocated_bytes + missing, (strategy, line)
            assert [tensor.data_ptr() for tensor in engine_of(model).backend.working_buffers()] == buffers


@on_ranks(4)
def test_only_the_stages_of_the_host_lie_there():
    on_host = {"1": {"optimizer"}, "2": {"optimizer", "grads"}, "3": {"optimizer", "grads", "params"}}
    for host, kinds in (on_host | {"3d": {"optimizer", "params"}}).items():
        with sharded(f"host={host},node=3,cluster=1", Case(precision="bf16-wire"), mesh_of(2, 2)) as (model, optimizer):
            lines = zm.memory_report(model, optimizer.members[0])
            arena = engine_of(model).backend.host.arena  # CUDA copies from it as long as it is there
            assert arena is not None
            places = {p.local.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
            assert places == {arena.memory.data_ptr()}
        held = {(line.place, line.kind): line.allocated_bytes for line in lines}
        for kind in ("params", "grads", "optimizer"):
            assert (held["device", kind] == 0) == (kind in kinds), (host, kind)
            assert held["host", kind] or kind not in kinds, (host, kind)


ADAM = {"lr": 1e-3}
MOMENTUM = {"lr": 1e-3, "momentum": 0.9}


class Extra(optim.SGD):
    """Keeps one state more than an optimizer of the same name would; the user vouches for it."""

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("average", torch.zeros_like(param.local))
        return result


# Optimizer of two groups of parameters, and how many states of the master's size it keeps for an element of each.
OPTIMIZERS = {
    "AdamW": (lambda a, b: optim.AdamW([*a, *b], **ADAM), 2, 2),
    "foreach AdamW": (lambda a, b: optim.AdamW([*a, *b], **ADAM, foreach=True), 2, 2),
    "fused AdamW": (lambda a, b: optim.AdamW([*a, *b], **ADAM, fused=True), 2, 2),
    "AMSGrad for some": (lambda a, b: optim.Adam([{"params": a, "amsgrad": True}, {"params": b}], **ADAM), 3, 2),
    "SGD": (lambda a, b: optim.SGD([*a, *b], lr=1e-3), 0, 0),
    "fused SGD": (lambda a, b: optim.SGD([*a, *b], **MOMENTUM, fused=True), 1, 1),
    "momentum for some": (lambda a, b: optim.SGD([{"params": a}, {"params": b, "momentum": 0.0}], **MOMENTUM), 1, 0),
    "some alone": (lambda a, b: optim.AdamW(b, **ADAM), 0, 2),
    "RMSprop": (lambda a, b: optim.RMSprop([*a, *b], **MOMENTUM, centered=True), 3, 3),
    "vouched for": (lambda a, b: zm.elementwise(Extra([*a, *b], **MOMENTUM)), 2, 2),
}


@on_ranks(4)
def test_several_optimizers_count_together():
    model = zm.shard(Awkward().double(), mesh_of(2, 2), "node=3,cluster=1")
    params = list(model.parameters())
    several = [optim.AdamW(params[::2], **ADAM), optim.SGD(params[1::2], **MOMENTUM)]
    masters, *own = (optimizer_line(model, each).predicted_bytes for each in (None, *several))
    assert masters < own[0] and sum(own) - masters == optimizer_line(model, several).predicted_bytes


def optimizer_line(model, optimizer):
    return next(line for line in zm.memory_report(model, optimizer) if line.kind == "optimizer")


@pytest.mark.parametrize("precision", ["fp32", "bf16-wire"])  # in the first, masters are parts of the compute copies
@on_ranks(2)
def test_optimizer_states_are_predicted_before_the_first_step(precision):
    case = Case(precision=precision, micro_batches=1, world=2)
    for name in [*OPTIMIZERS][precision == "fp32" :: 2]:
        make, first_states, second_states = OPTIMIZERS[name]
        model = zm.shard(case.build(), mesh_of(2), "node=3", **case.shard_options())
        masters = optimizer_line(model, None).predicted_bytes
        assert (masters > 0) == (precision != "fp32")
        params = list(model.parameters())  # the frozen ones too
        optimizer = make(params[::2], params[1::2])
        optim.lr_scheduler.ConstantLR(optimizer)  # puts its own `step` on the object
        optimizer.register_step_post_hook(lambda *_: pytest.fail("stepped"))
        rates = {id(param): first_states for param in params[::2]} | {
            id(param): second_states for param in params[1::2]
        }
        states = {p: rates[id(p)] * p.local.nbytes for p in params if p.requires_grad}
        before = [param.local.clone() for param in params]
        line = optimizer_line(model, optimizer)
        assert (line.predicted_bytes, line.allocated_bytes) == (masters + sum(states.values()), masters), name
        assert not optimizer.state and all(p.local.equal(b) for p, b in zip(params, before, strict=True))
        optimizer._optimizer_step_post_hooks.clear()
        backward(model, case, 0)
        optimizer.step()
        unmade = sum(size for param, size in states.items() if "unused" in param.full_name)
        line = optimizer_line(model, optimizer)
        assert line.predicted_bytes == masters + sum(states.values()) == line.allocated_bytes + unmade, name
        engine_of(model).at_rest()


@on_ranks(4)
def test_a_state_too_few_or_too_many_is_seen():
    case = Case(precision="fp32", micro_batches=1)
    with sharded("node=3,cluster=1", case, mesh_of(2, 2)) as (model, members):
        optimizer = members.members[0]
        backward(model, case, 0)
        optimizer.step()
        right = optimizer_line(model, optimizer)
        param = max(optimizer.state, key=lambda param: param.local.numel())
        state = optimizer.state[param]
        state["max_exp_avg_sq"] = torch.zeros_like(param.local)
        more = optimizer_line(model, optimizer)
        del state["max_exp_avg_sq"], state["exp_avg"]
        fewer = optimizer_line(model, optimizer)
    assert right.predicted_bytes == more.predicted_bytes == fewer.predicted_bytes
    assert more.allocated_bytes - right.allocated_bytes == param.local.nbytes > 0
    assert right.allocated_bytes - fewer.allocated_bytes == param.local.nbytes


class Allocated(TorchDispatchMode):
    """Notes the length of each flat fp32 tensor that is made: gradients, where all else computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        new = func._schema.returns and func._schema.returns[0].alias_info is None
        if new and isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.dim() == 1:
            self.lengths.append(made.numel())
        return made


@on_ranks(4)
def test_a_further_backward_before_the_step_sets_aside_what_is_shown():
    """This rank's part of each gradient, and nothing else; nothing where they were dropped."""
    case = Case(precision="bf16-wire", micro_batches=1)
    for strategy in ("node=2,cluster=0", "node=3,cluster=3", "node=1,cluster=1"):
        with sharded(f"{strategy};overlap=none", case, mesh_of(2, 2)) as (model, _):
            backward(model, case, 0)
            shown = sorted(p.grad.local.numel() for p in model.parameters() if p.grad is not None)
            with Allocated() as first:
                backward(model, case, 1)
            model.zero_grad()
            with Allocated() as again:
                backward(model, case, 2)
        assert sorted(first.lengths) == shown, strategy
        assert again.lengths == [], strategy


def storages_alive():
    """Bytes and a description of each storage that any tensor in Python holds, by address."""
    found = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes(), f"{tensor.dtype} {tuple(tensor.shape)}"
    return found


@pytest.mark.parametrize("strategy", ["node=1,cluster=1", "node=3,cluster=3k"])
@on_ranks(4)
def test_nothing_is_held_that_the_report_does_not_count(strategy):
    case = Case(precision="bf16-wire", micro_batches=3)
    gc.collect()
    older = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]  # alive, so that addresses stay theirs
    before = storages_alive()
    with sharded(strategy, case, mesh_of(2, 2)) as (model, optimizer):
        for step in range(2):
            take_step(model, optimizer, case, step)
        engine = engine_of(model)
        engine.at_rest()
        gc.collect()
        alive = {address: found for address, found in storages_alive().items() if address not in before}
        counted = zm.memory_report(model, optimizer.members[0])[-1].allocated_bytes
    shards = [tensor for unit in engine.units for buffer in unit.buffers for tensor in buffer.persistent().values()]
    moments = [v for state in optimizer.members[0].state.values() for v in state.values() if v.dim()]
    listed = {
        t.untyped_storage().data_ptr() for t in (*shards, *engine.backend.working_buffers(), *moments) if t.numel()
    }
    assert sum(alive[address][0] for address in listed) == counted
    # Besides Adam's step counts: words of the ranks' on each parameter's gradient, and ranks of a mesh.
    unlisted = sorted(found for address, found in alive.items() if address not in listed and found[0] > 4)
    assert all(kind.startswith("torch.int") for _, kind in unlisted), unlisted
    assert sum(num_bytes for num_bytes, _ in unlisted) <= 256 + 4 * len(list(engine.optimizer_params())), unlisted
    del older


@pytest.mark.parametrize("strategy", ["node=1,cluster=2", "node=3,cluster=3k"])
@on_ranks(4)
def test_deleting_the_model_frees_everything_at_once(strategy):
    case = Case()
    model = zm.shard(case.build(), mesh_of(2, 2), strategy, **case.shard_options())
    optimizer = case.make_optimizer(model.parameters())
    take_step(model, optimizer, case, 0)
    engine = engine_of(model)
    with zm.record_trace(model) as recording:
        backward(model, case, 0)
        optimizer.step()  # its work under way was recorded
    assert recording.steps
    engine.at_rest()
    held = [tensor for unit in engine.units for buffer in unit.buffers for tensor in buffer.persistent().values()]
    held += [tensor for s in engine.backend.scratch.values() for tensor in (s.staging, s.workspace)]
    held += [*engine.backend.working_buffers(), *engine.optimizer_params()]
    watched = [weakref.ref(each) for each in (model, engine, *engine.backend.lanes.values(), *held)]
    gc.collect()
    gc.disable()  # memory that only the collector can free is held until it happens to run
    try:
        del engine, held, model, optimizer, recording
        alive = [one for ref in watched if (one := ref()) is not None]
        assert not alive, [type(one) for one in alive]
    finally:
        gc.enable()


@on_ranks(2)
def test_originals_are_freed_by_sharding():
    net = Awkward()
    originals = list(net.parameters())
    zm.shard(net, mesh_of(2), "node=3")
    assert all(param.untyped_storage().nbytes() == 0 for param in originals)


@on_ranks(2)
def test_more_than_the_machine_has_is_refused_before_the_model_is_touched():
    model = Awkward()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    said = pytest.raises(ModelError, match=r"2 rank\(s\) of this machine need .* lower stage than host=2")
    with mock.patch("zeromesh.comm.host.available_memory_bytes", lambda: 1000), said:
        zm.shard(model, mesh_of(2), "host=2,node=3")
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert available_memory_bytes() > 1 << 20
