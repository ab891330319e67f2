"""Which device a rank takes, on a machine that claims to have two GPUs."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from zeromesh.errors import ConfigError
from zeromesh.measure import ranks as measuring
from zeromesh.train import ranks as training
from zeromesh.train.config import RunConfig


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def config(device: Literal["auto", "cuda"]) -> RunConfig:
    return RunConfig(directory=Path(), steps=1, device=device)


def chosen(local_rank: int, local_world: int) -> set[str]:
    run = config("auto")
    return {str(measuring._device(local_rank, local_world)), str(training._device(run, local_rank, local_world))}


def test_a_device_for_each_local_rank():
    assert chosen(1, 2) == {"cuda:1"}
    assert chosen(1, 3) == {"cpu"}


def test_leaves_of_an_emulated_cluster_would_share_devices(monkeypatch):
    monkeypatch.setenv("ZEROMESH_LAB", "zmlab-1-0")
    assert chosen(0, 1) == {"cpu"}
    assert training._device(config("cuda"), 0, 1).type == "cuda"  # who asks gets it


def test_devices_that_are_not_there():
    with pytest.raises(ConfigError, match="for each of the 3 ranks of this machine; found 2"):
        training._device(config("cuda"), 0, 3)
