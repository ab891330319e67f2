"""Tensor parallelism beside a strategy trains as one process does, and what would make it not do so is found."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.parallel.tensor import (
    check,
    params_of,
)
from tests.dist.pool import on_ranks
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Span

PLANS = ("blocks", "tensor", "sequence", "loss")
MIXES = [notation(mix) for mix in mixes(2, kept=True)]


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(4)
def test_one_axis(plan):
    check("node=3", plan, 2, debug=plan == "loss")


@on_ranks(8)
def test_two_axes():
    for index, strategy in enumerate(MIXES[4::14]):
        check(strategy, PLANS[1 + index], 2, 2, optimizer=("adamw", "sgd")[index % 2])


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(4)
def test_activation_checkpointing(reentrant):
    def wrap(layer: nn.Module) -> None:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)

    check("node=3", "sequence", 2, wrap=wrap)


def counts_replicas(param: Any, beyond: tuple[dist.ProcessGroup, ...]) -> None:
    """A norm that sums over a dimension of replicas too."""
    own = param.elements.spans
    param.elements = replace(param.elements, spans=(own[0], *(Span(group=group) for group in beyond)))


def counts_one_part(param: Any, beyond: tuple[dist.ProcessGroup, ...]) -> None:
    """A norm of this rank's part alone."""
    param.elements = replace(param.elements, spans=param.elements.spans[:1])


def takes_for_whole(param: Any, beyond: tuple[dist.ProcessGroup, ...]) -> None:
    """A gradient of which each rank has a summand, taken for the sum."""
    place = next(p for u in param.engine().units for b in u.buffers for p in b.places if p.info.name == param.full_name)
    if place.info.spread is not None and param.region.is_whole:
        object.__setattr__(place.info, "spread", mock.Mock(local_grad=lambda grad: grad.to_local()))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (counts_replicas, r"norm 0"),
        (counts_one_part, r"norm 0"),
        (takes_for_whole, r"gradient 0 of .*norm\."),
    ],
)
@on_ranks(4)
def test_faults_are_found(fault, message):
    def spoil(model: nn.Module) -> None:
        for param in params_of(model):
            fault(param, engine_of(model).control.beyond)

    found = ""
    try:
        check("node=3", "sequence", 2, spoil=spoil)
    except AssertionError as error:
        found = str(error)
    assert re.match(message, found), found
