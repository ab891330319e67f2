"""What a configuration and a launcher say about devices, on a machine that claims to have two GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from zeromesh.errors import ConfigError
from zeromesh.train import ranks, summary
from zeromesh.train.config import RunConfig
from zeromesh.train.environment import Launched
from zeromesh.train.loop import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def config(device: Literal["auto", "cpu", "cuda"]) -> RunConfig:
    return RunConfig(directory=Path(), steps=1, device=device)


def launched(world: int, local_world: int) -> Launched:
    return Launched(rank=0, world=world, local_rank=0, local_world=local_world)


def test_who_asks_for_a_device_gets_it_in_an_emulated_cluster_too(monkeypatch):
    monkeypatch.setenv("ZEROMESH_LAB", "zmlab-1-0")
    found = {device: ranks._device(config(device), launched(1, 1)).type for device in ("auto", "cpu", "cuda")}
    assert found == {"auto": "cpu", "cpu": "cpu", "cuda": "cuda"}


def test_devices_that_are_not_there(monkeypatch):
    with pytest.raises(ConfigError, match=r"own for each rank; this machine shows 2 to its 3 ranks$"):
        ranks._require_device(config("cuda"), CPU, CPU, launched(3, 3))
    ranks._require_device(config("cuda"), GPU, GPU, launched(2, 2))
    ranks._require_device(config("auto"), CPU, CPU, launched(3, 3))
    monkeypatch.setenv("LOCAL_RANK", "0")
    ranks._require_device(config("auto"), GPU, CPU, launched(4, 4))
    with pytest.raises(ConfigError, match="and other ranks take the same"):
        ranks._require_device(config("cuda"), GPU, CPU, launched(4, 4))


def test_of_several_devices_a_rank_must_know_its_own(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"not LOCAL_RANK, and this machine has 2 devices: .* SLURM_LOCALID"):
        ranks._require_device(config("auto"), GPU, CPU, launched(4, 1))  # all have taken the first
    ranks._require_device(config("auto"), GPU, GPU, launched(4, 1))  # a rank on each machine
    assert ranks._device(config("cpu"), launched(4, 1)) == CPU
    assert ranks._device(config("auto"), launched(1, 1)) == GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert ranks._device(config("auto"), launched(4, 1)) == GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks._device(config("auto"), launched(4, 2)) == GPU


def test_cores_are_shared_whatever_the_device(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(20)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ranks._set_threads(config("cuda"), 8)
    assert threads == [2]


class Rows:
    """A batch that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def contiguous(self):
        self.done.append("contiguous")
        return self

    def pin_memory(self):
        self.done.append("pinned")
        return self

    def to(self, device, *, non_blocking):
        self.done += [device, non_blocking]
        return self


def test_batches_reach_a_device_while_the_host_goes_on():
    for device, done in ((CPU, []), (GPU, ["contiguous", "pinned", GPU, True])):
        rows = Rows()
        assert Trainer._moved(SimpleNamespace(ranks=SimpleNamespace(device=device)), rows) is rows
        assert rows.done == done


def test_the_device_has_a_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert [summary._name(device) for device in (CPU, GPU)] == ["CPU", "GPU 0"]
