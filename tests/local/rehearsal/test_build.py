"""The simulated device is built for one torch, and says so where another is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from zeromesh.errors import InputError
from zeromesh.simdev import build


def test_another_torch_builds_another_device_or_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build._directory()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build._directory() != here and build._directory().parent == here.parent
    # Also where an extension's build is at fault: its words follow.
    calls: list[str] = []

    def fails(**options: object) -> None:
        calls.append(str(options["name"]))
        raise RuntimeError("Error building extension: no member named 'data_ptr'")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(cpp_extension, "load", fails)
    build.native.cache_clear()
    try:
        with pytest.raises(InputError, match=r"not compile with torch 2\.99\.0: use a torch that docs.*data_ptr"):
            build.native()
    finally:
        build.native.cache_clear()
    assert len(calls) == 1 and not list(tmp_path.rglob(build.DONE))
