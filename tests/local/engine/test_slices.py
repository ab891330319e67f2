"""What may be done with a slice of a parameter, and that nothing else touches its memory: [Note: Slices]."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh as zm
from zeromesh.engine.param import _ALLOWED, ShardedParameter
from zeromesh.errors import OptimizerError, ZeromeshError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()


def functions() -> dict[str, Callable[..., Any]]:
    """All that torch has and lets subclasses decide about, by name."""
    found = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            found[f"{getattr(function, '__module__', '')}.{torch.overrides.resolve_name(function)}"] = function
    return found


def test_what_is_not_on_the_list_is_refused_before_it_does_anything():
    """Every function that torch lets a subclass decide about, in a dozen ways of calling each."""
    model = zm.shard(net(), None, "node=3")
    params = list(model.parameters())
    weight, bias = params[:2]
    before = [param.local.clone() for param in params]
    calls = (
        (weight,),
        (bias,),
        (weight, weight),
        (weight, 0),
        (weight, 0, 0),
        ([weight, bias],),
        (weight, [0]),
        (weight, [1, 1]),
    )
    refused = 0
    for name, function in functions().items():
        if function in _ALLOWED:
            continue
        for args in calls:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = function(*args)
            except OptimizerError as error:
                refused += "`.local`" in str(error)
            except Exception:
                continue  # not called like this
            else:
                assert not tensors_in(result), f"{name} of {len(args)} arguments gave numbers of a slice"
        now = [param.local for param in params]
        assert all(map(torch.equal, now, before)), f"{name} changed memory"
    assert refused > 1000


def tensors_in(result: object) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, list | tuple) and any(map(tensors_in, result)))


@pytest.mark.parametrize(
    ("name", "act"),
    {
        "eye": nn.init.eye_,
        "mul(out=...)": lambda p: torch.mul(p, 2.0, out=p),
        "special_softmax": lambda p: torch.special.softmax(p, 0),
        "msort": torch.msort,
        "fft_fft": torch.fft.fft,
        "cumsum_": lambda p: p.cumsum_(0),
        "put_": lambda p: p.put_(torch.tensor([0]), torch.ones(1).double()),
        "as_strided": lambda p: p.as_strided((2,), (1,)),
        "kaiming_uniform_": nn.init.kaiming_uniform_,
        "where": torch.where,
        "sum over a dimension, or into a tensor,": lambda p: p.data.sum(0),
        "__getitem__": lambda p: p.detach()[0],
        "T": lambda p: p.T,
        "__bool__": bool,
    }.items(),
)
def test_a_refusal_names_function_parameter_and_what_to_do(name, act):
    model = zm.shard(net(), None, "node=3")
    with (
        torch.no_grad(),
        pytest.raises(OptimizerError) as caught,
    ):
        act(model[0].weight)
    text = str(caught.value)
    assert text.startswith(f"{name} needs all of 0.weight (4, 4)") and "zm.full_state_dict(model)" in text
    assert "`.local`" in text


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "data": lambda p: p.data.mul_(0.5),
    "detach": lambda p: p.detach().add_(0.25),
    "copy_": lambda p: p.copy_(p.clamp(-0.2, 0.2)),
    "copy_ of a whole": lambda p: p.copy_(torch.arange(float(p.numel())).view(p.shape) / 10),
    "constant_": lambda p: nn.init.constant_(p, 0.3),
    "zeros_": nn.init.zeros_,
    "operator": lambda p: p.__imul__(2.0),
    "foreach": lambda p: torch._foreach_mul_([p], 3.0),
    "mask": lambda p: p.__setitem__(p > 0, 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_computed_with(change):
    """As in plain torch, without zm.refresh: before the next forward, and after an optimizer's step."""
    plain, x = net(), torch.randn(2, 4).double()
    model = zm.shard(copy.deepcopy(plain), None, "node=3")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for _ in range(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in each.parameters():
                    CHANGES[change](param)
        assert torch.equal(model(x), plain(x))
    assert all(
        torch.equal(state, param)
        for state, param in zip(zm.full_state_dict(model).values(), plain.parameters(), strict=True)
    )


def test_a_change_between_a_forward_and_its_backward_is_seen():
    model = zm.shard(net(), None, "node=3")
    loss = model(torch.ones(2, 4).double()).sum()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    with pytest.raises(
        (ZeromeshError, RuntimeError), match=r"1\.weight has changed since|modified by an inplace operation"
    ):
        loss.backward()


def test_a_change_inside_a_forward_is_refused():
    model = zm.shard(net(), None, "node=3", units=[nn.Linear], bucket_bytes=0)
    later = model[2].weight
    assert isinstance(later, ShardedParameter)
    model[1].register_forward_hook(lambda *_: later.data.zero_() and None)
    with pytest.raises(ZeromeshError, match=r"2\.weight is written to inside a forward"):
        model(torch.ones(2, 4).double())
