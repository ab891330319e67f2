"""Which device a rank takes, on machines that claim to have GPUs. Threads stand for ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from zeromesh.comm.device import CPU, agree_on_device, identity, local_device
from zeromesh.errors import InputError

FIRST, SECOND, THIRD = (torch.device("cuda", index) for index in range(3))


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a number of devices visible."""

    def show(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return show


def test_a_device_for_each_local_rank(see: Callable[[int], None]) -> None:
    see(2)
    assert local_device(1, 2) == SECOND
    assert local_device(1, 3) == CPU
    see(0)
    assert local_device(0, 1) == CPU


def test_the_only_one_that_is_seen_is_taken(see: Callable[[int], None]) -> None:
    see(1)
    assert local_device(0, 1) == local_device(5, 8) == FIRST


def test_leaves_of_an_emulated_cluster_share_devices(
    see: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    see(2)
    monkeypatch.setenv("ZEROMESH_LAB", "zmlab-1-0")
    assert local_device(0, 1) == CPU
    assert local_device(0, 1, in_lab=True) == FIRST


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.device | str]]:
    """What ranks with the given devices agree on, or their errors; the index of a device stands for its identity."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    assert identity(CPU) == ""

    def agree(*devices: torch.device) -> list[torch.device | str]:
        store, world = HashStore(), len(devices)

        def on_rank(rank: int) -> torch.device | str:
            try:
                return agree_on_device(devices[rank], identity(devices[rank]), store, rank, world)
            except InputError as error:
                return str(error)

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(on_rank, range(world)))

    return agree


def test_all_have_one_or_none_has(agreed: Callable[..., list[torch.device | str]]) -> None:
    assert agreed(FIRST, THIRD, SECOND) == [FIRST, THIRD, SECOND]
    assert agreed(CPU, CPU) == [CPU, CPU]


def test_one_that_all_share_is_as_good_as_none(agreed: Callable[..., list[torch.device | str]]) -> None:
    """Four local processes on a machine with one device: each sees it and no other."""
    assert agreed(FIRST, FIRST, FIRST, FIRST) == [CPU] * 4


def test_a_mix_is_an_error_on_every_rank(agreed: Callable[..., list[torch.device | str]]) -> None:
    for devices, lacking in (
        ((FIRST, CPU, SECOND), "1 see none"),
        ((THIRD, THIRD, FIRST, CPU), "3 see none; 0, 1 share one"),
    ):
        message = f"of {len(devices)} ranks, {lacking}. Look for what nvidia-smi says"
        assert all(message in str(said) for said in agreed(*devices))
