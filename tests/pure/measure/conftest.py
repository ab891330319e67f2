import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No torchrun around the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
