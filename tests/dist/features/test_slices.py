"""Slices know their elements: functions of them give the values of plain tensors, or are refused on all ranks alike."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeromesh as zm
from tests.dist.parity import mesh_of_world as mesh
from tests.dist.pool import on_ranks, set_timeout
from zeromesh.engine import meetings
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import Slice
from zeromesh.errors import CheckpointError, CommunicationError, InputError, MismatchError, ModelError, OptimizerError

STRATEGIES = ["node=3,cluster=1", "node=1,cluster=3", "node=1,cluster=1", "node=0,cluster=0", "node=3,cluster=0"]
SOME = pytest.mark.parametrize("strategy", STRATEGIES[1::2])
ON_TWO = pytest.mark.parametrize("strategy", ["node=1", "node=0"])


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)


def sharded(seed: int, strategy: str, dtype: torch.dtype = torch.float64) -> Any:
    return zm.shard(net(seed, dtype), mesh(), strategy, units=[nn.Linear], bucket_bytes=0)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:
        return error


def require_same_everywhere(outcomes: list[str]) -> None:
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, outcomes)
    assert [at for at in zip(*found, strict=True) if len(set(at)) > 1] == []


def close(ours: Any, plain: Any) -> None:
    """`ours` is `plain`, or this rank's slice of it."""
    if isinstance(ours, Slice):
        assert ours.shape == plain.shape
        ours, plain = ours.local, ours.elements.part_of(plain.detach(), "compare").expand(ours.elements.numel)
    assert type(ours) is type(plain) or not isinstance(plain, Tensor)
    if isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        torch.testing.assert_close(ours.detach(), plain.detach(), equal_nan=True, check_device=False)
    else:
        assert ours == pytest.approx(plain, nan_ok=True)


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "rsub": lambda a, b: torch.rsub(a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, b, a, value=0.5),
    "maximum": torch.max,
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "foreach": lambda a, b: torch._foreach_mul([a, a], [b, b])[1],
    "foreach scalar": lambda a, b: torch._foreach_add([a], 2.0)[0] * b,
    "in place": lambda a, b: a.detach().clone().mul_(b),
    "foreach in place": lambda a, b: (c := [a.detach().clone()], torch._foreach_lerp_(c, [b], 0.1))[0][0],
    "copy_": lambda a, b: a.detach().clone().copy_(b),
    "mask": lambda a, b: a.detach().clone().masked_fill_(b > 0, 3.0),
    "set by mask": lambda a, b: (c := a.detach().clone(), c.__setitem__(b > 0, 3.0))[0],
    "to": lambda a, b: a * b.to(a),
    "sum": lambda a, b: (a - b).pow(2).sum(),
    "equal": torch.equal,
    "allclose": lambda a, b: torch.allclose(a, b, rtol=1e-3),
}
OPERANDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # From (the first one's like, one of another layout, plain values of the whole).
    "alike": lambda like, other, whole: like,
    "clone": lambda like, other, whole: like.clone(),
    "zeros": lambda like, other, whole: torch.zeros_like(like),
    "deepcopy": lambda like, other, whole: copy.deepcopy(like),
    "data": lambda like, other, whole: like.data,
    "other layout": lambda like, other, whole: other,
    "clone of another layout": lambda like, other, whole: other.clone() * 1,
    "whole": lambda like, other, whole: whole,
    "row": lambda like, other, whole: whole[..., :1].clone(),
    "number": lambda like, other, whole: torch.tensor(0.3, dtype=whole.dtype),
    "one": lambda like, other, whole: torch.full((1,), 0.3, dtype=whole.dtype),
    "fragment": lambda like, other, whole: torch.ones(4, dtype=whole.dtype),
}


WRITES = {"in place", "foreach in place", "copy_", "mask", "set by mask"}


@pytest.mark.parametrize(
    ("first", "second", "dtype", "grad", "parameter"),
    [
        (STRATEGIES[0], STRATEGIES[1], torch.float64, True, "0.weight"),
        (STRATEGIES[3], STRATEGIES[3], torch.float32, False, "1.bias"),
    ],
)
@on_ranks(4)
def test_two_operands_give_what_plain_ones_give_or_are_refused_on_all_ranks(first, second, dtype, grad, parameter):
    models = sharded(0, first, dtype), sharded(1, second, dtype), net(0, dtype), net(1, dtype)
    a, b, x, y = (model.get_parameter(parameter) for model in models)
    errors, refused = [], 0
    for (name, call), (kind, make), swapped in itertools.product(PAIRS.items(), OPERANDS.items(), (False, True)):
        with torch.set_grad_enabled(grad):
            ours, plain = (a, make(a, b, y.detach())), (x, make(x, y, y.detach()))
            got, wanted = (outcome(call, *(p[::-1] if swapped else p)) for p in (ours, plain))
        errors.append(f"{name} {kind} {swapped}: {got if isinstance(got, Exception) else ''}")
        plain_target = swapped and name in WRITES and type(ours[1]) is Tensor
        if isinstance(got, Exception):
            unlike = "other layout" in kind or "another layout" in kind
            refused += 1
            assert (unlike and a.elements != b.elements) or plain_target or isinstance(wanted, Exception), errors[-1]
        else:
            assert not isinstance(wanted, Exception), errors[-1]
            close(got, wanted)
    assert refused
    require_same_everywhere(errors)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "sum of abs": lambda p: p.abs().sum(),
    "sum in whole numbers": lambda p: torch.sum(p.detach() * 10, dtype=torch.int32),
    "norm in another dtype": lambda p: p.float().norm(dtype=torch.float64),
    "sum in another dtype": lambda p: torch.sum(p, dtype=torch.float32),
    "mean": lambda p: p.mean(),
    "mean of squares": lambda p: (p**2).mean(),
    "norm": lambda p: p.norm(),
    "linalg.norm": torch.linalg.norm,
    "number of dims": lambda p: (p.ndimension(), torch.numel(p)),
    "vector_norm": lambda p: torch.linalg.vector_norm(p, 1.0),
    "foreach_norm": lambda p: torch._foreach_norm([p])[0],
    "foreach_norm of two dtypes": lambda p: torch._foreach_norm([p, p.bfloat16()])[1],
    "norm of fewer bits": lambda p: p.half().norm(),
    "amax": lambda p: p.amax(),
    "max": lambda p: p.max(),
    "amin": torch.amin,
    "min": torch.min,
    "finite": lambda p: p.isfinite().all(),
    "any": lambda p: (p > 0.3).any(),
    "count_nonzero": lambda p: (p > 0).count_nonzero(),
    "count": lambda p: (p > 0).sum(),
    "dot": lambda p: torch.dot(p, p) if p.dim() == 1 else (p * p).sum(),
    "unknown": lambda p: (p / 0).isnan().any(),
    "largest of unknown": lambda p: torch.where(p > 0, p, math.nan).amax(),
    "of the data": lambda p: p.data.sum(),
    "of one": lambda p: float(torch.ones_like(p).amin()),
}


@pytest.mark.parametrize(("strategy", "grad"), [("node=1,cluster=3", True), ("node=0,cluster=0", False)])
@on_ranks(4)
def test_numbers_of_a_slice_are_those_of_the_whole_tensor(strategy, grad):
    model, plain = sharded(0, strategy), net(0)
    model[1].bias.grad = torch.arange(3.0).double()
    plain[1].bias.grad = torch.arange(3.0).double()
    with torch.set_grad_enabled(grad):
        for look in NUMBERS.values():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                got = look(ours)
                close(got, look(theirs))
                with pytest.raises(ModelError, match=r"differentiated") if grad and requires(got) else nullcontext():
                    got.backward() if requires(got) else None
        close(model[1].bias.grad.sum(), plain[1].bias.grad.sum())


@on_ranks(4)
def test_numbers_of_frozen_parameters():
    """They are cut over fewer axes than masters, so more ranks hold the same elements."""
    plain = net()
    plain[0].requires_grad_(False)
    model = zm.shard(copy.deepcopy(plain), mesh(), "node=1,cluster=3", units=[nn.Linear], bucket_bytes=0)
    for look in NUMBERS.values():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(look(ours.detach()), look(theirs.detach()))
    close(*(nn.utils.get_total_norm([p.detach() for p in each.parameters()]) for each in (model, plain)))


def requires(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@on_ranks(2)
def test_numbers_over_a_dimension_are_refused():
    weight, bias = sharded(0, "node=3")[0].parameters()
    for look in (
        lambda: weight.sum(0),
        lambda: weight.sum(dim=0),
        lambda: weight.mean(dim=(0,)),
        lambda: weight.amax(dim=0, keepdim=True),
        lambda: weight.max(0),
        lambda: torch.all(weight > 0, dim=0),
        lambda: torch.linalg.vector_norm(weight, dim=0),
        lambda: torch.linalg.norm(weight, 2),
        lambda: torch.linalg.vector_norm(weight, keepdim=True),
        lambda: torch.linalg.vector_norm(weight, out=torch.zeros(()).double()),
        lambda: (weight > 0).norm(),
        lambda: (weight * 1j).sum(),
        lambda: (weight * 1j).norm(),
        lambda: torch.dot(bias, torch.ones(1).double()),
    ):
        with pytest.raises(OptimizerError, match=r"needs all of 0\.(weight|bias)"):
            look()
    close(weight.sum(dim=None, keepdim=False), net(0)[0].weight.sum())
    close(torch.linalg.vector_norm(weight, dtype=torch.float64), torch.linalg.vector_norm(net(0)[0].weight))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.wide = nn.Parameter(torch.tensor(0.25)), nn.Parameter(torch.tensor([[-3.0]]))

    def forward(self, x):
        return self.layer(x) * self.scale.exp() + self.wide


@ON_TWO
@on_ranks(2)
def test_a_parameter_of_one_element_is_a_number_on_every_rank(strategy):
    model = zm.shard(Scaled(), mesh(), strategy)
    assert (model.scale.item(), float(model.wide), int(model.wide), bool(model.scale)) == (0.25, -3.0, -3, True)
    assert f"{model.scale:.3f}" == "0.250" and model.scale.exp().item() == pytest.approx(math.exp(0.25))
    plain = Scaled()
    for ours, theirs in ((model.scale, plain.scale), (model.wide, plain.wide)):
        for other in (torch.tensor(2.0).double(), torch.tensor(3), torch.ones(1).double()):
            for call in (torch.mul, lambda a, b: b - a, torch.maximum):
                got, wanted = outcome(call, ours, other), outcome(call, theirs, other)
                if wanted.shape != theirs.shape:
                    assert isinstance(got, OptimizerError)  # a row of one
                else:
                    close(got, wanted)


# ---- rows, operands of the whole shape, copies


@ON_TWO
@on_ranks(2)
def test_rows_and_masks_of_the_whole_tensor(strategy):
    model, plain = sharded(0, strategy), net(0)
    changes: list[Callable[[Tensor], Any]] = [
        lambda p: p.__setitem__(slice(None, 2), 0.0),
        lambda p: p.__setitem__((..., -1), 0.5),
        lambda p: p.__setitem__(torch.tensor([0, 2]), torch.tensor(2.0).double()),
        lambda p: p.__setitem__([1], 7.0),
        lambda p: p.__setitem__(([0, 1], [1, 2])[: p.dim()], 3.0),
        lambda p: p.__setitem__(torch.arange(p.numel()).view(p.shape) % 3 == 0, -1.0),
        lambda p: p.index_fill_(0, torch.tensor([1]), 4.0),
        lambda p: p.mul_(torch.arange(p.shape[0]).double().view(-1, *(1 for _ in p.shape[1:]))),
        lambda p: p.copy_(p.index_fill(0, torch.tensor([2]), 4.0)),
    ]
    for change in changes:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                change(ours)
                change(theirs)
            close(ours, theirs)
    whole = zm.full_state_dict(model)
    assert dist.get_rank() or all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    with pytest.raises(OptimizerError, match=r"was given 5: index 5 is out of bounds"):
        model[0].weight[5] = 0.0
    with pytest.raises(OptimizerError, match=r"must be the whole tensor"), torch.no_grad():
        model[0].weight.add_(torch.ones(4))
    with pytest.raises(OptimizerError, match=r"into a plain tensor needs all of"), torch.no_grad():
        torch.zeros(5, 7).double().copy_(model[0].weight)
    with pytest.raises(OptimizerError, match=r"into a plain tensor needs all of"), torch.no_grad():
        torch.zeros(5, 7).double().add_(other=model[0].weight)


@on_ranks(2)
def test_slices_that_one_rank_alone_has_are_not_gathered():
    """The other would wait."""
    average = [param.detach().clone() for param in zm.shard(Scaled(), mesh(), "node=3").parameters()]
    with pytest.raises(InputError, match=r"all ranks gather slices together, .* not only on the first"):
        zm.full_state_dict(average if dist.get_rank() == 0 else None)
    assert (zm.full_state_dict(average)[0] is None) == bool(dist.get_rank())


@on_ranks(2)
def test_what_chooses_or_is_chosen_of_other_elements_is_refused_on_every_rank():
    model = zm.shard(Scaled(), mesh(), "node=3")
    rows = model.layer.weight.detach().clone()
    changes: list[Callable[[], Any]] = [
        lambda: rows.__setitem__(slice(None, 2), model.wide),
        lambda: rows.index_fill_(5, torch.tensor([1]), 2.0),
        lambda: model.scale.detach().index_fill_(0, torch.tensor([0]), 2.0),
    ]
    for change in changes:
        with pytest.raises(OptimizerError), torch.no_grad():
            change()
    assert torch.equal(rows, model.layer.weight) and torch.zeros_like(rows, requires_grad=True).requires_grad


@on_ranks(2)
def test_random_numbers_are_those_of_the_whole_tensor():
    model, plain = sharded(0, "node=3"), net(0)
    for draw in (torch.rand_like, torch.randn_like):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            found = []
            for each in (ours, theirs):
                torch.manual_seed(1)
                found.append(draw(each))
            close(*found)


@SOME
@on_ranks(4)
def test_gradients_that_are_assigned_are_whole_or_slices_of_the_same_elements(strategy):
    model, other = sharded(0, strategy), sharded(0, "node=3,cluster=1")
    weight = model[0].weight
    weight.grad = torch.arange(35.0).view(5, 7).double()
    close(weight.grad.sum(), torch.tensor(595.0).double())
    weight.grad = weight.grad / 2
    with pytest.raises(OptimizerError, match=r"so they cannot be combined rank by rank.*zm\.copy_values"):
        weight.grad = other[0].weight.detach()
    with pytest.raises(OptimizerError, match=r"must be a slice of the same elements, or the whole tensor"):
        weight.grad = torch.ones(3).double()
    close(weight.grad.sum(), torch.tensor(297.5).double())


@on_ranks(2)
def test_a_slice_is_not_pickled_by_itself():
    model = sharded(0, "node=3")
    weight = model[0].weight
    for each in (weight, weight.clone(), weight.data, weight * 2, copy.deepcopy(weight), torch.zeros_like(weight)):
        for save in (lambda value: torch.save(value, io.BytesIO()), lambda value: pickle.dumps([value])):
            with pytest.raises(CheckpointError, match=r"zm\.Checkpoints or zm\.full_state_dict"):
                save(each)


@on_ranks(2)
def test_values_of_other_ranks_are_missed_on_every_rank():
    """`.local` in a state dict, and states of an optimizer that has whole ones on some ranks."""
    model = sharded(0, "node=3")
    with pytest.raises(CheckpointError, match=r"load_state_dict of 0\.weight .* this rank's part alone"):
        model.load_state_dict({name: param.local for name, param in model.named_parameters()})
    owned = zm.by_owner(torch.optim.AdamW, [{"params": list(layer.parameters())} for layer in model])
    train(model, owned, 0)
    optimizers = [torch.optim.AdamW([{"params": list(layer.parameters())} for layer in model]) for _ in range(2)]
    train(model, optimizers[0], 0)
    for optimizer in optimizers:  # of which one has stepped
        with pytest.raises(CheckpointError, match=r"AdamW steps on slices, but load_state_dict got whole states"):
            optimizer.load_state_dict(owned.state_dict())
            train(model, optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1)
    owned.load_state_dict(owned.state_dict())
    train(model, owned, 1)
    assert all("by_owner" not in group for group in owned.param_groups)


@on_ranks(4)
def test_loading_a_state_of_another_layout_raises_on_every_rank():
    model, other = sharded(0, "node=3,cluster=1"), sharded(1, "node=1,cluster=3")
    with pytest.raises(CheckpointError, match=r"load_state_dict of 0\.weight.*zm\.copy_values"):
        model.load_state_dict(other.state_dict())
    model.load_state_dict(sharded(1, "node=3,cluster=1").state_dict())
    close(model[0].weight, net(1)[0].weight)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        each(torch.ones(2, 7).double()).sum().backward()
        optimizer.step()
    with pytest.raises(CheckpointError, match=r"load_state_dict of state 'momentum_buffer' of 0\.weight"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())


# ---- across layouts


@on_ranks(4)
def test_values_are_copied_between_any_two_layouts():
    x = torch.ones(2, 7).double()
    models = [sharded(0, target) for target in STRATEGIES]
    for seed, source in enumerate(STRATEGIES, start=1):
        other, plain = sharded(seed, source, torch.float32), net(seed, torch.float32)
        wanted = [param.double() for param in plain.parameters()]
        for at, ours in enumerate(models):
            average = (seed + at) % 2 == 0
            targets = [param.detach().clone() if average else param for param in ours.parameters()]
            zm.copy_values(targets, list(other.parameters()))
            for own, value in zip(targets, wanted, strict=True):
                close(own, value)
            assert average or torch.equal(ours(x), plain.double()(x))  # copies that units compute with have followed


@on_ranks(4)
def test_what_cannot_be_copied_across_layouts_is_said_on_every_rank():
    ours, other = sharded(0, "node=3,cluster=1"), sharded(1, "node=0,cluster=0")
    with pytest.raises(InputError, match=r"needs a source of the same shape for each target"):
        zm.copy_values([ours[0].weight], [other[0].bias])
    with pytest.raises(InputError, match=r"number 0 is Tensor of \(5, 7\)"):
        zm.copy_values([torch.ones(5, 7)], [other[0].weight])


# ---- calls by some ranks alone


@contextmanager
def at_once() -> Iterator[None]:
    """Without the wait for ranks that do not come, which is made long here."""
    began = time.monotonic()
    with mock.patch.object(meetings, "WAIT_S", 200.0):
        yield
    assert time.monotonic() - began < 200.0


@on_ranks(4)
def test_ranks_that_call_different_functions_or_look_at_other_models_all_raise_at_once():
    model, other = sharded(0, "node=3,cluster=1"), sharded(0, "node=1,cluster=3")
    calls = (
        lambda: model[0].weight.sum(),
        lambda: float(model[0].weight.amax()),
        lambda: other[0].weight.sum(),
        lambda: (model[0].weight > 0).sum(),
    )
    for one, others in itertools.permutations(calls, 2):
        with at_once(), pytest.raises(MismatchError, match=r"rank 2 called .*test_slices\.py:\d+\)") as caught:
            (one if dist.get_rank() == 2 else others)()
        assert "ranks 0, 1, 3 called" in str(caught.value)
    close(model[0].weight.sum(), net(0)[0].weight.sum())


@on_ranks(4, spoils=True)
def test_a_rank_that_never_comes_is_named():
    meetings.WAIT_S = 0.5
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node"))
    model = zm.shard(net(), group, "node=3,cluster=1")
    model[0].weight.sum()
    words = engine_of(model).control.group
    set_timeout(timedelta(seconds=1), words)  # after calls that all ranks come to
    if dist.get_rank() == 1:
        time.sleep(3.0)
        return
    with pytest.raises(
        CommunicationError, match=r"norm of order 2\.0 of 0\.bias .*test_slices\.py:\d+\).*Missing: rank 1 "
    ):
        model[0].bias.norm()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@on_ranks(2)
def test_states_of_optimizers_are_plain_and_of_their_parameters(options):
    """Also outside of a step, and after one that raised; a schedule-free optimizer's `eval()` does so."""
    model, plain = sharded(0, "node=3"), net()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, **options)
        optimizer.load_state_dict(optimizer.state_dict())
        train(each, optimizer, 0)
        optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(TypeError):
            train(each, optimizer, 1)
        each.zero_grad()
        with torch.no_grad():
            for param in each.parameters():
                param.lerp_(optimizer.state[param]["exp_avg"], 0.5)
                assert type(optimizer.state[param]["exp_avg"]) is Tensor
        torch.save([copy.deepcopy(state["exp_avg"]) for state in optimizer.state.values()], io.BytesIO())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours, theirs)
    with pytest.raises(OptimizerError, match=r"must be the whole tensor"), torch.no_grad():
        model[0].weight.add_(torch.ones(4).double())


# ---- moving averages


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)).double()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("strategy", "decay"), [("node=3", None), ("node=3", 0.9), ("node=0", 0.9)])
@on_ranks(2)
def test_torchs_averaged_model_is_sharded_as_the_trained_one(strategy, decay):
    plain, base = net(), net()
    options: dict[str, Any] = {} if decay is None else {"multi_avg_fn": get_ema_multi_avg_fn(decay)}
    expected, average = AveragedModel(plain, **options), AveragedModel(base, **options)
    model = zm.shard(base, mesh(), strategy)
    zm.shard(average.module, mesh(), strategy)
    for each, kept_average in ((plain, expected), (model, average)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(4):
            train(each, optimizer, step)
            kept_average.update_parameters(each)
    for ours, theirs in zip(average.module.parameters(), expected.module.parameters(), strict=True):
        close(ours, theirs)
    x = torch.ones(2, 7).double()
    torch.testing.assert_close(average(x), expected(x))
    with pytest.raises(ModelError, match=r"cannot be copied.*before zm\.shard"):
        AveragedModel(model)


# ---- steps of optimizers


@ON_TWO
@on_ranks(2)
def test_closures_and_hooks_of_a_step_see_whole_operands(strategy):
    x, found = torch.ones(2, 7).double(), []
    for each in (net(), sharded(0, strategy)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)

        def scale(*_: Any, each: nn.Module = each) -> None:
            for param in each.parameters():
                param.grad.mul_(torch.arange(float(param.shape[-1])).double())

        def closure(each: nn.Module = each, optimizer: torch.optim.Optimizer = optimizer, scale: Any = scale) -> Tensor:
            optimizer.zero_grad()
            loss = each(x).sum()
            loss.backward()
            scale()
            return loss

        optimizer.register_step_pre_hook(scale)
        for _ in range(2):
            each(x).sum().backward()
            optimizer.step()
        for _ in range(2):
            optimizer.step(closure)
        assert all(type(value) is Tensor for state in optimizer.state.values() for value in state.values())
        found.append(each)
    for theirs, ours in zip(*(each.parameters() for each in found), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("strategy", ["node=3", "host=1,node=1;step=device"])
@on_ranks(2)
def test_parameters_that_a_hook_writes_to_after_the_step_are_computed_with(strategy):
    x, found = torch.ones(2, 7).double(), []
    for each in (net(), sharded(0, strategy)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        optimizer.register_step_post_hook(
            lambda held, *_: [p.data.clamp_(-0.1, 0.1) for p in held.param_groups[0]["params"]]
        )
        for _ in range(2):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found.append(each(x))
    close(*reversed(found))


@on_ranks(4)
def test_a_step_whose_error_is_kept_is_over():
    model, other = sharded(0, "node=3,cluster=1"), sharded(0, "node=1,cluster=3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        raise ValueError("no data")

    model(torch.ones(2, 7).double()).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="no data") as kept_error:
        optimizer.step(closure)
    optimizer.param_groups[0]["lr"] = "none"  # torch's own step raises
    with pytest.raises(TypeError) as another_kept_error:
        optimizer.step()
    assert type(torch.zeros_like(model[0].weight)) is Slice
    with pytest.raises(OptimizerError, match=r"cannot be combined"), torch.no_grad():
        model[0].weight.add_(other[0].weight)
    assert kept_error.tb is not None and another_kept_error.tb is not None


class Lookahead(torch.optim.Optimizer):
    """Zhang et al., arXiv 1907.08610: every other step, slow weights move towards those of another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, self.steps = self.inner.step(closure), self.steps + 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if self.steps % 2 == 0:
                    slow.add_(param.data - slow, alpha=0.5)
                    param.data.copy_(slow)
        return loss


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@on_ranks(2)
def test_a_step_inside_of_a_step(options):
    plain, model = net(), sharded(0, "node=3")
    for each in (plain, model):
        optimizer = zm.elementwise(Lookahead(torch.optim.AdamW(each.parameters(), lr=0.1, **options)))
        for step in range(4):
            train(each, optimizer, step)
        optimizer.load_state_dict(optimizer.state_dict())
        train(each, optimizer, 4)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        close(ours, theirs)


class WholeStates(torch.optim.Optimizer):
    """As torchao's have them: of the parameter's shape, unlike those of `zeros_like`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros(param.shape, dtype=param.dtype))
            momentum.mul_(0.9).add_(param.grad)
            param.sub_(momentum, alpha=0.1)


@on_ranks(2)
def test_states_of_another_shape_are_refused_on_every_rank():
    plain, model = net(), sharded(0, "node=3")
    with pytest.raises(OptimizerError, match=r"'momentum' has another number.*zm\.by_owner\(WholeStates, params\)"):
        train(model, zm.elementwise(WholeStates(model.parameters(), {})), 0)
    zm.zero_grad(model)
    train(model, zm.by_owner(WholeStates, model.parameters(), defaults={}), 0)  # as it says
    train(plain, WholeStates(plain.parameters(), {}), 0)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("node=3", torch.optim.AdamW), ("node=1", partial(torch.optim.SGD, momentum=0.9)), ("node=0", torch.optim.AdamW)],
)
@on_ranks(2)
def test_a_compiled_step_gives_the_same_values(kind, strategy):
    torch._dynamo.reset()
    group = mesh()
    models = [zm.shard(net(), group, strategy) for _ in range(2)]
    optimizers = [kind(each.parameters(), lr=0.1) for each in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    steps = optimizers[0].step, torch.compile(optimizers[1].step, backend="eager")
    for _ in range(3):
        for each, optimizer, scheduler, step in zip(models, optimizers, schedulers, steps, strict=True):
            each(torch.ones(2, 7).double()).square().mean().backward()
            step()
            scheduler.step()
            optimizer.zero_grad()
    for eager, compiled in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(eager.local, compiled.local)
    assert torch.equal(*(each(torch.ones(2, 7).double()) for each in models))
