"""Allowed operations on a slice of a parameter; nothing else touches its memory: [Note: Slices]."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product, takewhile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh as zm
from zeromesh.engine.build import make_control
from zeromesh.engine.elements import Home
from zeromesh.engine.param import _ALLOWED, ShardedParameter, Slice
from zeromesh.engine.reductions import slice_norms
from zeromesh.errors import OptimizerError, ZeromeshError
from zeromesh.strategy import Layout


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
    calls = ((weight,), (bias,), (weight, weight), (weight, 0), (weight, 0, 0), ([weight, bias],), (weight, [0]))
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
        "put_": lambda p: p.put_(torch.tensor([0]), torch.ones(1).double()),
        "sum over a dimension, or into a tensor,": lambda p: p.data.sum(0),
        "__getitem__": lambda p: p.detach()[0],
        "__bool__": bool,
    }.items(),
)
def test_a_refusal_names_function_parameter_and_what_to_do(name, act):
    model = zm.shard(net(), None, "node=3")
    with torch.no_grad(), pytest.raises(OptimizerError) as caught:
        act(model[0].weight)
    text = str(caught.value)
    assert text.startswith(f"{name} needs all of 0.weight (4, 4)") and "zm.full_state_dict(model)" in text
    assert "`.local`" in text


def forms(function: Callable[..., Any]) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """(name, type) of the parameters of each form of a function, those without a default and one more at a time; and
    how many may be given by position."""
    if hasattr(function, "__code__"):
        names = function.__code__.co_varnames[: min(function.__code__.co_argcount, 2)]
        yield [(name, "float" if name in ("p", "ord") else "Tensor") for name in names], len(names)
        return
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}"):
        needed = [arg for arg in schema.arguments if not arg.has_default_value()]
        for further in ([], *([arg] for arg in schema.arguments if arg.has_default_value())):
            chosen = sorted([*needed, *further], key=lambda arg: arg.kwarg_only)
            names = [("input" if arg.name == "self" else arg.name, str(arg.type)) for arg in chosen]
            pairs = zip(chosen, schema.arguments, strict=False)
            yield (
                names,
                sum(1 for _ in takewhile(lambda pair: pair[0].name == pair[1].name and not pair[0].kwarg_only, pairs)),
            )


ROW = torch.tensor([1])


def value_of(name: str, kind: str, one: Any, other: Any) -> Any:
    if name in ("mask", "condition"):
        return other > 0
    by_name = {"input": one, "self": one, "index": ROW}
    by_kind = {"Tensor": other, "Scalar": 0.5, "number": 0.5, "float": 1.0, "int": 1, "bool": False}
    if kind.startswith("List[") and kind[5:-1] in by_kind:
        return [value_of(name, kind[5:-1], one, other)] * 2
    kind = kind.removeprefix("Optional[").rstrip("]")
    return by_name.get(name, by_kind.get(kind, torch.float32 if name == "dtype" else None))


def test_arguments_by_name_act_as_by_position():
    """Each function of the list, in each of its forms, with each of its arguments, at each place."""
    plain, model = net(), zm.shard(net(), None, "node=3")
    tried, wrong = set(), []
    weights = [[layer.weight for layer in each[:2]] for each in (plain, model)]
    without = re.compile("__|.*empty|to$|_has_compatible")  # names, values, schemas that are Python's
    for function in (each for each in _ALLOWED if not without.match(each.__name__)):
        for form, most in forms(function):
            names = [name for name, _ in form]
            for at in range(most):
                found = []
                for each, place in ((0, at), (1, at), (1, most)):
                    one, other = (weight.detach().clone() for weight in weights[each])
                    values = [value_of(*parameter, one, other) for parameter in form]
                    torch.default_generator.manual_seed(0)
                    named = dict(zip(names[place:], values[place:], strict=True))
                    found.append(result_of(function, values[:place], named))
                wanted, by_name, by_position = found
                if isinstance(wanted, Exception) or wanted is NotImplemented:
                    continue
                tried.add(function.__name__)
                if not same(by_name, by_position) or not (isinstance(by_name, OptimizerError) or same(by_name, wanted)):
                    wrong.append((function, names, at, *found))
    assert not wrong
    assert len(tried) > 200 and tried >= {"add", "sum", "linalg_vector_norm", "index_fill_", "zeros_like", "clone"}


def result_of(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*args, **kwargs)
    except Exception as error:
        return error
    return (args[0] if args else next(iter(kwargs.values()))) if result is None else result


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        ours, theirs = (each.local.view(each.shape) if isinstance(each, Slice) else each for each in (one, other))
        return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, equal_nan=True)
    return type(one) is type(other) and (isinstance(one, Exception) or one == other)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, lambda f: partial(torch.func.vjp, f)])
def test_torchs_transforms_of_functions_are_refused(transform):
    model = zm.shard(net(), None, "node=3")
    for each in (model[0].weight, model[0].weight.detach()):
        with pytest.raises(OptimizerError, match=r"torch\.func needs all of 0\.weight \(4, 4\)"):
            transform(lambda x: (x * x).sum())(each)
    values = torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(1, 4).double())
    assert torch.equal(values, model(torch.ones(1, 4).double()))


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


def test_a_change_inside_a_forward_is_refused():
    model = zm.shard(net(), None, "node=3", units=[nn.Linear], bucket_bytes=0)
    later = model[2].weight
    assert isinstance(later, ShardedParameter)
    model[1].register_forward_hook(lambda *_: later.data.zero_() and None)
    with pytest.raises(ZeromeshError, match=r"2\.weight is written to inside a forward"):
        model(torch.ones(2, 4).double())


def test_a_joint_norm_is_in_the_widest_dtype() -> None:
    """Also if the first model has no gradients."""
    first, second = (zm.shard(nn.Linear(3, 3).double(), None, "node=3") for _ in range(2))
    second(torch.ones(2, 3).double() / 3).sum().backward()
    whole = torch.cat([param.grad.local for param in second.parameters()]).clone()
    assert float(zm.clip_grad_norm_([first, second], 0.1)) == pytest.approx(float(whole.norm()), rel=1e-14)
    found = torch.cat([param.grad.local for param in second.parameters()])
    torch.testing.assert_close(found, whole * (0.1 / (whole.norm() + 1e-6)), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("value", [1.0, 0.0, 1e-30, 1e30, math.inf, math.nan])
def test_the_norm_of_a_long_slice_is_that_of_fp64(value: float) -> None:
    """It is added up by blocks on the host, and the last one is shorter."""
    torch.manual_seed(0)
    values = torch.rand(300_001) + 0.5
    values[140_000:] *= value
    found = slice_norms([values, torch.ones(3)], [(), ()], 2.0)
    torch.testing.assert_close(found[0], values.double().norm(), rtol=2e-7, atol=0.0, equal_nan=True)
    assert found.dtype == torch.float64 and float(found[1]) == pytest.approx(3**0.5)
    tiny = torch.full((200_000,), 1e-30)
    assert float(slice_norms([tiny], [()], 2.0)) == pytest.approx(float(tiny.double().norm()))


@pytest.mark.parametrize("strategy", ["node=3,cluster=2", "node=3,cluster=0", "node=0,cluster=0"])
def test_places_of_two_tensors_are_equal_where_every_rank_has_the_same_of_both(strategy):
    """Slices of equal places are combined rank by rank. Where shards of two lengths cut two tensors alike, their places
    differ."""
    layout, numel = Layout.of(strategy, [("node", 2), ("cluster", 2)]), 12
    home = Home(layout=layout, mesh=None, control=make_control(None))

    def held(padded: int, start: int) -> list[tuple[int, int] | None]:
        shards = [layout.shard(padded, layout.significant, layout.coordinates(rank)) for rank in range(layout.world)]
        parts = [(max(start, each.start) - start, min(start + numel, each.stop) - start) for each in shards]
        return [part if part[0] < part[1] else None for part in parts]

    tensors = [(padded, start) for padded in (32, 64) for start in range(padded - numel + 1)]
    place = {each: home.place(each[0], layout.significant, each[1], numel) for each in tensors}
    for one, other in product(tensors, repeat=2):
        same = held(*one) == held(*other)
        assert same if place[one] == place[other] else not same or one[0] != other[0]


@pytest.mark.parametrize("options", [{"grad_dtype": "bf16"}, {"param_dtype": "bf16", "master_dtype": "bf16"}])
def test_adam_says_that_gradients_are_in_another_dtype_than_their_masters(options):
    """Torch names two dtypes and an argument of a kernel. SGD takes both."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = zm.shard(nn.Linear(4, 4), None, "node=1", **options)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        if kind is torch.optim.SGD:
            optimizer.step()
            continue
        with pytest.raises(OptimizerError, match=r"AdamW takes gradients in the dtype of its .*grad_dtype= and master"):
            optimizer.step()
