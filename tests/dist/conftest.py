"""The worker pool as a fixture; `tests.dist.pool` says how to use it."""

from __future__ import annotations

import pytest

from tests.dist.pool import Pool, shared


@pytest.fixture(scope="session")
def pool() -> Pool:
    return shared()
