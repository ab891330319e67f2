"""Tensor parallelism beside a strategy trains as one process does, and faults that would change that are found."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.parallel.tensor import check, momentum
from tests.dist.parity import adamw
from tests.dist.pool import on_ranks
from tests.pure.strategy.mixes import mixes, notation

PLANS = ("blocks", "tensor", "sequence", "loss")
MIXES = [notation(mix) for mix in mixes(2, kept=True)]


@pytest.mark.parametrize("plan", ["blocks", "loss"])
@on_ranks(4)
def test_one_axis(plan):
    check("node=3", plan, 2, debug=plan == "loss")


@on_ranks(8)
def test_two_axes():
    for index, strategy in enumerate(MIXES[4::20]):
        check(strategy, PLANS[1 + index], 2, 2, make_optimizer=(adamw, momentum)[index % 2], steps=1)


@on_ranks(4)
def test_activation_checkpointing():
    def wrap(layer: nn.Module) -> None:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)

    check("host=2,node=3", "sequence", 2, wrap=wrap)
