"""Safetensors files of one process: an export that is killed leaves the one before, or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.safetensors import Spec, read_headers, write_safetensors
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import whole


def export(directory: Path, value: float, *, files: int) -> None:
    specs = [Spec(name=name, shape=(4,), dtype=torch.float32) for name in "abc"]
    pieces = [whole(spec.name, torch.full((4,), value)) for spec in specs]
    write_safetensors(directory, specs, pieces, Peers(), max_file_bytes=48 // files)


def values(directory: Path) -> set[float]:
    stored = read_headers(directory)
    assert sorted(stored) == ["a", "b", "c"]
    return {float(load_file(place.path)[name][0]) for name, place in stored.items()}


@pytest.mark.parametrize("renames", range(4))
@pytest.mark.parametrize("before", [1, 3])
def test_no_index_is_of_two_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, renames: int) -> None:
    export(tmp_path, 1.0, files=before)
    done: list[Any] = []
    replace = os.replace

    def killed(*paths: Any) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        replace(*paths)
        done.append(paths)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        export(tmp_path, 2.0, files=3)
    if before == 1:
        assert values(tmp_path) == {1.0}
    else:
        with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
            values(tmp_path)
    export(tmp_path, 2.0, files=3)
    assert values(tmp_path) == {2.0}
