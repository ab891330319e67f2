"""Tensors in containers that units are given are cast too, and tensors that units put there reach the caller."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers.utils import ModelOutput

import zeromesh as zm
from zeromesh.engine.calls import tensors_of

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    step: int = 0


@dataclass
class Output(ModelOutput):
    x: Tensor | None = None
    none: Tensor | None = None


KINDS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "ordered": lambda x: OrderedDict(x=x),
    "default": lambda x: defaultdict(list, x=x),
    "user dict": lambda x: UserDict(x=x),
    "deque": lambda x: deque([x]),
    "named tuple": lambda x: Pair(0, x),
    "packed": lambda x: pack_sequence([x[0]]),
    "frozen dataclass": Frozen,
    "model output": Output,
    "set": lambda x: {x},
    "nested": lambda x: {"a": [(Frozen(x), "word")], "b": SimpleNamespace()},
}


class Using(nn.Linear):
    def forward(self, given):
        self.given = given
        (x,) = (x for x in tensors_of(given) if x.is_floating_point())
        return super().forward(x)


class Handing(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.inner, self.make = Using(4, 4), make

    def forward(self, x):
        self.made = self.make(x.float())
        return self.inner(self.made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_computes_with_what_containers_hold_in_its_dtype(kind):
    model = zm.shard(Handing(KINDS[kind]), None, "node=3", units=[Using], param_dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    assert type(model.inner.given) is type(model.made)
    (kept,) = (x for x in tensors_of(model.made) if x.is_floating_point())
    assert kept.dtype == torch.float32  # the caller's own are not touched
    whole = zm.shard(Using(4, 4), None, "node=3", param_dtype=torch.bfloat16)
    assert whole(KINDS[kind](x)).dtype == torch.bfloat16


@dataclass
class State:
    x: Tensor
    seen: list[Tensor] = field(default_factory=list)


class Filling(nn.Linear):
    """Puts into, replaces in and takes out of all that it is given."""

    def forward(self, x, losses, cache, *, state, fails=False):  # type: ignore[override]
        x = super().forward(x)
        assert {t.dtype for t in (losses[0], cache["old"], state.x)} == {torch.bfloat16}
        losses.append(x.float().mean())
        cache["new"] = x
        del cache["gone"]
        state.seen.append(x)
        state.x = state.x + 1
        if fails:
            raise ArithmeticError
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_unit_puts_into_containers_reaches_the_caller(fails):
    blocks = nn.Sequential(nn.ModuleList(Filling(4, 4) for _ in range(2)))
    model = zm.shard(blocks, None, "node=3", units=[Filling], param_dtype=torch.bfloat16)
    first, old, seen = torch.zeros(()), torch.zeros(4), []
    for block in model[0]:
        losses, cache, state = [first], {"old": old, "gone": torch.ones(1), "keep": 5}, State(torch.zeros(2), seen)
        cache["same"] = cache
        with pytest.raises(ArithmeticError) if fails else torch.no_grad():
            block(torch.randn(2, 4), losses, cache, state=state, fails=fails)
        assert losses[0] is first and len(losses) == 2 and losses[1].dtype == torch.float32
        assert list(cache) == ["old", "keep", "same", "new"] and cache["old"] is old and cache["same"] is cache
        assert state.seen is seen and state.x.tolist() == [1, 1]
    assert len(seen) == 2


def test_containers_in_which_nothing_is_cast_stay_what_they_are():
    model = zm.shard(Using(4, 4), None, "node=3", param_dtype=torch.bfloat16)
    given = {"x": torch.randn(2, 4).bfloat16(), "ids": torch.arange(3), "cache": [None, {}]}
    model(given)
    assert model.given is given
