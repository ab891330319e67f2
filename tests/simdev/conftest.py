"""Builds the device once, before the first test, or skips the tier and names the missing part."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromesh.simdev import build

TIMEOUT_S = 700
"""The first test waits for the compiler, on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of this directory."""
    here = Path(__file__).parent
    missing = build.missing()
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))
