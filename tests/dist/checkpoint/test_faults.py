"""Faults of one rank in a save: all say the same of it, and the checkpoint before stays the newest."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.checkpoint.models import Mesh, make, require_equal, slices, train
from tests.dist.pool import Pool, set_timeout
from zeromesh.checkpoint import saver
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.directory import list_checkpoints
from zeromesh.checkpoint.read import read_manifest
from zeromesh.checkpoint.storage import LocalStorage
from zeromesh.engine import meetings
from zeromesh.errors import CheckpointError, CommunicationError

WORLD = 3
TIMEOUT_S = 3.0
WAIT_S = 2.0
"""For the others to come to an exchange that has failed."""


def rank_main(rank: int, directory: Path, victim: int, number: int) -> None:
    """Saves twice; in the second save one rank sends itself a signal when it is about to write its file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(directory / "store"), WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model, optimizer = make((("cluster", 1), ("node", WORLD)), "node=3,cluster=0")
    train(model, optimizer, 1)
    checkpoints = Checkpoints(directory / "checkpoints", model, optimizer)
    meetings.WAIT_S = WAIT_S
    checkpoints.save(1)
    checkpoints.wait()
    if rank == victim:

        def write_file(*args: Any) -> Any:
            os.kill(os.getpid(), number)
            time.sleep(TIMEOUT_S * 20)  # the signal stops this thread when the kernel gets round to it

        saver.write_file = write_file  # type: ignore[assignment]
    for group in dist.distributed_c10d._world.pg_map:  # after calls that all ranks come to
        set_timeout(timedelta(seconds=TIMEOUT_S), group)
    checkpoints.save(2)
    start = time.monotonic()
    try:
        checkpoints.wait()
        text = "no error"
    except CommunicationError as error:
        text = str(error)
    seconds = time.monotonic() - start
    try:
        checkpoints.save(3)  # the group is of no use any more, and that is said at once
        checkpoints.wait()
    except CommunicationError as error:
        text += "\n" + str(error)
    (directory / f"error-{rank}").write_text(f"{seconds}\n{text}")
    os._exit(0)  # threads of the process group may wait for the victim


def alone() -> int:
    return dist.get_rank()


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)], ids=["stops", "dies"])
def test_the_others_name_it_and_keep_the_checkpoint_before(
    pool: Pool, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    pool.run(1, alone)  # starts the server from which these processes are forked too
    context = get_context("forkserver")
    ranks = [context.Process(target=rank_main, args=(rank, tmp_path, victim, number)) for rank in range(WORLD)]
    try:
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.join(400)
                assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for rank in {*range(WORLD)} - {victim}:
        seconds, first, second = (tmp_path / f"error-{rank}").read_text().splitlines()
        assert float(seconds) < TIMEOUT_S + WAIT_S + 100
        for message in (first, second):
            assert f"rank {rank} waited in vain for " in message
            assert (
                f"Missing: rank {victim} (the last that it came to: the name of the checkpoint of step 2)." in message
            )
        assert "cannot come to the name of the checkpoint of step 3" in second
        assert "what each rank has written of the checkpoint of step 2" in first
    listing = list_checkpoints(LocalStorage(tmp_path / "checkpoints"))
    assert [found.step for found in listing.complete] == [1] and listing.refused == ()


def full_disk(directory: Path, where: str) -> str:
    """Rank 1 alone finds the disk full, as it writes or as it syncs; the message to this rank."""
    model, optimizer = make((("cluster", 1), ("node", 2)), "node=3,cluster=0")
    train(model, optimizer, 1)

    def fails(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(directory, model, optimizer) as checkpoints:
        checkpoints.save(1)
        checkpoints.wait()
        target = "os.fsync" if where == "sync" else "zeromesh.checkpoint.saver.write_file"
        with mock.patch(target, fails) if dist.get_rank() == 1 else nullcontext():
            checkpoints.save(2)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.wait()
        checkpoints.save(3)  # training goes on, and so does saving
    return str(caught.value)


@pytest.mark.parametrize("where", ["write", "sync"])
def test_all_are_told_of_one_ranks_full_disk(pool: Pool, tmp_path: Path, where: str) -> None:
    first, second = pool.run(2, full_disk, tmp_path, where)
    assert first == second
    assert "the checkpoint of step 2 was not saved: cannot write " in first
    assert "__1_0.distcp: No space left on device" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001", "step-00000003"]


def refused(directory: Path) -> str:
    """Rank 1 alone has something that cannot be saved; the message to this rank."""
    model, optimizer = make((("cluster", 1), ("node", 2)), "node=3,cluster=0")
    with Checkpoints(directory, model, optimizer) as checkpoints:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, {"own": object()} if dist.get_rank() == 1 else {})
            checkpoints.wait()
        checkpoints.save(3)
    return str(caught.value)


def test_all_are_told_of_what_one_rank_cannot_save(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, refused, tmp_path, timeout_s=60.0)
    assert second.startswith("state.own ")
    assert first == f"the checkpoint of step 2 was not saved: {second}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000003"]


def damage(checkpoint: Path) -> None:
    """A byte of a slice that rank 1 alone holds changes."""
    if dist.get_rank() == 0:
        tensors = read_manifest(LocalStorage(checkpoint.parent), checkpoint.name).tensors
        sharded = (entry for name, entry in tensors.items() if name.startswith("model.blocks."))
        chunk = next(chunk for entry in sharded for chunk in entry.chunks if chunk.file == "__1_0.distcp")
        with open(checkpoint / chunk.file, "r+b") as file:
            file.seek(chunk.offset)
            byte = file.read(1)[0]
            file.seek(chunk.offset)
            file.write(bytes([byte ^ 1]))
    dist.barrier()


def fall_back(directory: Path, mesh: Mesh, strategy: str) -> list[str]:
    """Rank 1 alone finds the newest checkpoint damaged, then all of them; the warnings of this rank."""
    model, optimizer = make(mesh, strategy)
    train(model, optimizer, 1)
    with Checkpoints(directory / "run", model, optimizer) as checkpoints:
        checkpoints.save(1)
        held = {name: local for name, _, _, local in slices(model, optimizer)}
        uninterrupted = train(model, optimizer, 2, first=1)
        checkpoints.save(3)
    older, newer = directory / "run/step-00000001", directory / "run/step-00000003"
    if dist.get_rank() == 0:
        shutil.copytree(older, directory / older.name)
    damage(newer)
    model, optimizer = make(mesh, strategy, seed=5)
    checkpoints = Checkpoints(directory / "run", model, optimizer)

    def require_older(restored: Any) -> None:
        assert restored is not None and restored.step == 1
        require_equal({name: local for name, _, _, local in slices(model, optimizer)}, held)
        assert train(model, optimizer, 2, first=1) == uninterrupted

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        require_older(checkpoints.load("auto"))
        damage(older)
        with pytest.raises(CheckpointError, match="none that can be loaded"):
            checkpoints.load("auto")
        require_older(checkpoints.load(directory / older.name))
    return [str(warning.message) for warning in caught]


def test_all_fall_back_where_one_rank_alone_reads_what_is_damaged(pool: Pool, tmp_path: Path) -> None:
    told, *others = pool.run(4, fall_back, tmp_path, (("cluster", 2), ("node", 2)), "node=3,cluster=1")
    assert len(told) == 3 and all("__1_0.distcp is damaged" in text for text in told)
    assert not any(others)
