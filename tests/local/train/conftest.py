"""A process group of one rank, for collective functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, no network."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
