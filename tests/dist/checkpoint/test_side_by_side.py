"""Several that save one model at the same time: their words go to whom they are for, however threads take turns."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.dist.checkpoint.models import Mesh, make, require_equal, slices, train
from tests.dist.pool import Pool
from zeromesh.checkpoint import saver
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.peers import Peers
from zeromesh.integrations.huggingface import save_safetensors

TWO: Mesh = (("cluster", 1), ("node", 2))
STRATEGY = "node=3,cluster=0"
WAIT_S = 10.0


def local_slices(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: local for name, _, _, local in slices(model, optimizer)}


def require_saved(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    model, optimizer = make(TWO, STRATEGY, seed=1)
    assert Checkpoints(directory, model, optimizer).load("auto") is not None
    require_equal(local_slices(model, optimizer), expected)


def export_while_saving(directory: Path) -> None:
    """The export comes after the save's exchange on rank 0, and before it on rank 1."""
    model, optimizer = make(TWO, STRATEGY)
    train(model, optimizer, 1)
    gathering, exported = threading.Event(), threading.Event()
    gather, write_file = Peers.gather, saver.write_file

    def watched(self: Peers, value: Any, what: str) -> Any:
        gathering.set()
        return gather(self, value, what)

    def late(*args: Any) -> Any:
        assert dist.get_rank() == 0 or exported.wait(WAIT_S)
        return write_file(*args)

    checkpoints = Checkpoints(directory / "run", model, optimizer)
    with mock.patch.object(Peers, "gather", watched), mock.patch.object(saver, "write_file", late):
        checkpoints.save(1)
        assert dist.get_rank() or gathering.wait(WAIT_S)
        save_safetensors(model, directory / "final")
        exported.set()
        checkpoints.close()
    require_saved(directory / "run", local_slices(model, optimizer))


def test_an_export_while_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, export_while_saving, tmp_path)
    assert "embed.weight" in load_file(tmp_path / "final" / "model.safetensors")


def two_at_once(directory: Path) -> None:
    """Two directories, the same step; the ranks write in opposite orders."""
    model, optimizer = make(TWO, STRATEGY)
    train(model, optimizer, 1)
    a, b = (Checkpoints(directory / name, model, optimizer) for name in "ab")
    later = ("b", "a")[dist.get_rank()]
    written = threading.Event()
    write_file = saver.write_file

    def in_turn(storage: Any, *args: Any) -> Any:
        assert storage.root.name != later or written.wait(WAIT_S)
        result = write_file(storage, *args)
        written.set()
        return result

    with mock.patch.object(saver, "write_file", in_turn):
        a.save(1)
        first = local_slices(model, optimizer)
        train(model, optimizer, 1, first=1)
        b.save(1)
        second = local_slices(model, optimizer)
        a.close()
        b.close()
    require_saved(directory / "a", first)
    require_saved(directory / "b", second)


def test_two_directories_at_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, two_at_once, tmp_path)
