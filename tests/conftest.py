"""Shared by all tiers: the directory of a test is its tier, and a tier marks its tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from zeromesh.launch.processes import schedule_as_batch

TIERS = ("pure", "local", "dist", "netlab", "gpu", "simdev")
ROOT = Path(__file__).parent

# A property test that fails on one machine fails on all: the same examples everywhere, and no clock in the verdict.
settings.register_profile("project", derandomize=True, deadline=None, print_blob=True)
# By hand, `HYPOTHESIS_PROFILE=random` draws others each time, and prints how to draw those that fail again.
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

schedule_as_batch()  # for the ranks too, which inherit it: they outnumber cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier whose directory it lies in."""
    for item in items:
        if item.path.is_relative_to(ROOT):
            tier = item.path.relative_to(ROOT).parts[0]
            if tier in TIERS:
                item.add_marker(tier)
