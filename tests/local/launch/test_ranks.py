"""A process that meets no others joins them all the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeromesh.errors import InputError
from zeromesh.launch import ranks
from zeromesh.launch.ranks import join_ranks


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that torch is told to use on a machine of 20 cores."""
    told: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)))
    return told


def test_a_rank_alone_has_a_mesh_and_the_cores(tmp_path: Path, threads: list[int]) -> None:
    with join_ranks({"node": 1}, tmp_path / "store", device="cpu") as own:
        assert (own.rank, own.world, own.device.type, own.mesh.mesh_dim_names) == (0, 1, "cpu", ("node",))
        assert dist.is_initialized()
    assert not dist.is_initialized() and threads == [20]


def test_what_is_asked_for_and_not_there_is_said_before_there_is_a_group(tmp_path: Path) -> None:
    missing = pytest.raises(InputError, match=r"0 are to have a device of type nosuch, where torch sees")
    with missing, join_ranks({"node": 1}, tmp_path / "store", device="nosuch"):
        pass
    assert not dist.is_initialized()


def test_cores_are_shared_by_a_machines_ranks(tmp_path: Path, threads: list[int]) -> None:
    with join_ranks({"node": 1}, tmp_path / "store", device="cpu", threads=3):
        ranks._set_threads(None, 8)  # of a rank that has others beside it
    assert threads == [3, 2]
