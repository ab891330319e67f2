"""Tensor parallelism beside a strategy trains as one process does."""

from __future__ import annotations

import pytest

from tests.dist.parallel.tensor import check
from tests.dist.pool import on_ranks


@pytest.mark.parametrize("plan", ["blocks", "tensor", "sequence", "loss"])
@on_ranks(4)
def test_one_axis(plan):
    check("node=3", plan, 2)
