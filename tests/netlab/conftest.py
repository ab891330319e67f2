"""Tests on emulated clusters: skipped, with the reason, where network namespaces are not to be had."""

from __future__ import annotations

import pytest

from lab import unavailable_reason


@pytest.fixture(scope="session", autouse=True)
def _network_namespaces() -> None:
    if (reason := unavailable_reason()) is not None:
        pytest.skip(f"no emulated cluster here: {reason}")
