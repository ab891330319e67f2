"""Skips the tier where there is no device, but for kernels that Triton interprets on the host.

CUDA is not initialised here: the workers that use it are forked.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

TIMEOUT_S = 120
"""Four processes start CUDA and share one device."""

NATIVE = "cpu:gloo,cuda:nccl"
"""The device's own collectives, whose ranks share it. Over gloo they go through copies on the host, which wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of this directory."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            interpreted = item.path.name == "test_kernels.py" and os.environ.get("TRITON_INTERPRET") == "1"
            if not (interpreted or torch.cuda.is_available()):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))
