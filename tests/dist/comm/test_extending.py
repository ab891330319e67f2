"""The wire format that docs/extending.md makes: parsed, predicted in bytes, run, within its bound, and gone again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh as zm
from tests.dist.engine.reference import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import NotationError
from zeromesh.schedule import sent_bytes_per_axis
from zeromesh.wires import registered

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def documented() -> dict[str, Any]:
    """What the page's first block of Python defines."""
    first = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert first is not None
    names: dict[str, Any] = {"__name__": "extending"}
    exec(compile(first[1], str(PAGE), "exec"), names)
    return names


def gradients(strategy: str) -> tuple[torch.Tensor, int, int]:
    """This rank's part, on values that the ranks share; bytes that it sent, and that were predicted."""
    torch.manual_seed(0)
    model = zm.shard(nn.Linear(64, 32, bias=False), mesh_of(2), strategy)
    engine, sent = engine_of(model), Counter[str]()
    for name, group in engine.backend.groups.items():
        group.record = lambda one, name=name: sent.update({name: one.sent_bytes})
    model(torch.randn(4, 64)).square().mean().backward()
    predicted = sent_bytes_per_axis(engine.schedule, micro_batches=1)
    (param,) = model.parameters()
    assert param.grad is not None
    return param.grad.local.clone(), sum(sent.values()), sum(predicted.values())


@on_ranks(2)
def test_a_wire_format_of_the_page():
    form = documented()["TopByte"]
    exact, sent, predicted = gradients("node=3")
    assert sent == predicted
    with registered(form):
        assert str(zm.Strategy.parse("node=3@e5m2/e5m2+ef")) == "node=3@e5m2/e5m2+ef"
        for strategy in ("node=3@/e5m2", "node=3@/e5m2+ef", "node=0@/e5m2"):
            lossy, sent, predicted = gradients(strategy)
            whole = exact if "=0" not in strategy else gradients("node=0")[0]
            bound = form().error_bound(2 if "=0" in strategy else 1) * whole.abs().max()
            assert 0 < (lossy - whole).abs().max() <= bound and sent == predicted
        gathered, sent, predicted = gradients("node=3@e5m2/")
        assert not torch.equal(gathered, exact) and sent == predicted
    with pytest.raises(NotationError, match=r"a wire must be one of .*got 'e5m2'"):
        zm.Strategy.parse("node=3@e5m2")
