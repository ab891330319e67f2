"""The extensions of docs/extending.md: parsed, predicted in bytes, run, right, and gone again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.engine.api import engine_of
from zeromesh.errors import NotationError
from zeromesh.planner.search import Options, search
from zeromesh.planner.workload import Workload
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy.collective import registered_collective
from zeromesh.wires import registered_wire

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def documented(name: str) -> Any:
    """The value of `name` in the page's block of Python that defines it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if f"class {name}(" in block)
    names: dict[str, Any] = {"__name__": "extending"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names[name]


def gradients(strategy: str, *shape: int) -> tuple[torch.Tensor, int, int]:
    """This rank's part, on values that the ranks share; bytes that it sent, and that were predicted."""
    torch.manual_seed(0)
    model = zm.shard(nn.Linear(64, 32, bias=False), mesh_of(*shape or (2,)), strategy)
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
    form = documented("TopByte")
    exact, sent, predicted = gradients("node=3")
    assert sent == predicted
    with registered_wire(form):
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


@on_ranks(4)
def test_a_collective_of_the_page():
    collective = documented("InTurn")()
    strategies = ("node=3,cluster=3", "node=2,cluster=2", "node=1,cluster=1", "node=0,cluster=0")
    plain = {strategy: gradients(strategy, 2, 2) for strategy in strategies}
    gather = mock.patch.object(collective, "all_gather", wraps=collective.all_gather)
    reduce = mock.patch.object(collective, "reduce_scatter", wraps=collective.reduce_scatter)
    with registered_collective(collective), gather as gathered, reduce as reduced:
        for strategy in strategies:
            reduced.reset_mock()
            found, sent, predicted = gradients(f"{strategy};collective=in_turn", 2, 2)
            assert torch.equal(found, plain[strategy][0]) and (sent, predicted) == plain[strategy][1:]
            assert sent == predicted or any(stage in strategy for stage in "12")  # no step, so no refresh
            assert reduced.called
        assert gathered.called
    with pytest.raises(NotationError, match=r"collective must be one of auto, .*got 'in_turn'"):
        zm.Strategy.parse("node=3;collective=in_turn")


def test_a_collective_of_the_page_is_planned_and_simulated():
    work = FixedWorkload(seq_len=256, global_batch_tokens=256 * 16)
    with registered_collective(documented("InTurn")()):
        one, other = (
            simulate(small_model(), small_cluster(4, 4), f"node=3,cluster=3{option}", work)
            for option in ("", ";collective=in_turn")
        )
        assert one.step_s <= other.step_s <= 1.2 * one.step_s  # the links of both levels are taken for both
        options = Options(collective="in_turn", splits="none")
        workload = Workload(seq_len=256, global_batch_tokens=256 * 16)
        found, evaluator = search(small_model(), small_cluster(4, 4), workload, options=options)
        tried = {estimate.candidate.strategy.collective for estimate in evaluator.evaluated}
        assert found.best and tried == {"auto", "in_turn"}
