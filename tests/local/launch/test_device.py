"""Which device a rank takes, on machines that claim to have some. Threads stand for ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from zeromesh.cli.env import env
from zeromesh.errors import InputError
from zeromesh.launch.device import (
    CPU,
    CUDA_QUEUES,
    NCCL_SHARED,
    PROMISES,
    Claim,
    agree_on_device,
    backend_for,
    device_name,
    find_device,
    set_variables,
)

FIRST, SECOND = (torch.device("cuda", index) for index in range(2))
See = Callable[..., None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    """Makes a number of devices of a type visible, whose properties the given ones are."""

    for name in PROMISES:
        monkeypatch.delenv(name, raising=False)

    def show(count: int, kind: str = "cuda", **properties: object) -> None:
        found = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

        def of(device: torch.device) -> SimpleNamespace:
            return SimpleNamespace(**{"pci_bus_id": 16 + (device.index or 0), "uuid": "the card's", **properties})

        module = SimpleNamespace(get_device_properties=of, get_device_name=lambda device: f"GPU {device.index}")
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    return show


def test_a_device_for_each_local_rank(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    see(2)
    assert find_device("auto", 1, 2)[0] == find_device("cuda", 1, 2)[0] == SECOND
    assert find_device("cpu", 1, 2) == (CPU, Claim(type="cpu"))
    see(0)
    assert find_device("auto", 0, 1) == (CPU, Claim(type="cpu"))
    see(2, "xpu")
    assert find_device("auto", 1, 2)[0] == torch.device("xpu", 1)
    see(1)  # the only one that is seen is taken
    assert find_device("auto", 0, 1)[0] == find_device("auto", 5, 8)[0] == FIRST
    assert [device_name(device) for device in (CPU, FIRST)] == ["CPU", "GPU 0"]
    assert [backend_for(device) for device in (CPU, FIRST)] == ["gloo", "cpu:gloo,cuda:nccl"]
    see(2)
    monkeypatch.setenv("ZEROMESH_LAB", "zmlab-1-0")  # leaves of an emulated cluster share devices
    assert find_device("auto", 0, 1)[0] == CPU
    assert find_device("cuda", 0, 1)[0] == FIRST


def test_ranks_share_a_device_where_they_are_told_to(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMESH_SHARE_DEVICES", "1")
    for variable in ("NCCL_HOSTID", *CUDA_QUEUES, *NCCL_SHARED):
        monkeypatch.setenv(variable, "")  # so that it is as before afterwards
        monkeypatch.delenv(variable)
    see(2)
    devices, claims = zip(*(find_device("auto", rank, 4) for rank in range(4)), strict=True)
    assert devices == (FIRST, SECOND, FIRST, SECOND) and agree(*claims) == [""] * 4
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    set_variables(rank=3)
    assert os.environ["NCCL_HOSTID"] == "rank3" and os.environ["NCCL_MAX_CTAS"] == "2"


def test_dies_of_a_card_and_parts_of_a_die_are_told_apart(see: See) -> None:
    see(2)
    names = {find_device("auto", rank, 2)[1].identity for rank in (0, 1, 0)}
    assert len(names) == 2 and all(name.endswith("/the card's") for name in names)
    see(1, pci_bus_id=1, uuid="one part")
    part = find_device("auto", 0, 1)[1].identity
    see(1, pci_bus_id=1, uuid="another")
    assert part != find_device("auto", 0, 1)[1].identity


def agree(*claims: Claim) -> list[str]:
    """The message to each rank; empty where all is well."""
    store, world = HashStore(), len(claims)

    def on_rank(rank: int) -> str:
        try:
            agree_on_device(claims[rank], store, rank, world)
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(on_rank, range(world)))


def own(place: int, kind: str = "cuda") -> Claim:
    return Claim(type=kind, identity=f"machine/{place}")


NONE = Claim(type="cpu")


@pytest.mark.parametrize(
    ("claims", "wrong"),
    [
        ([own(0)] * 4, "of 4 ranks, 0, 1, 2, 3 share one"),  # four local processes: each sees one and no other
        ([own(0)] * 11, "of 11 ranks, 0, 1, 2, 3, 4, 5, 6, 7 and 3 more share one"),
        ([own(0), NONE, own(1)], "of 3 ranks, 1 see none"),
        ([own(2), own(2), own(0), NONE], "of 4 ranks, 0, 1 share one; 3 see none"),
        ([own(0), own(1), own(3, "xpu")], "of 3 ranks, 2 see xpu where others see cuda"),
    ],
)
def test_a_mix_is_an_error_on_every_rank(claims: list[Claim], wrong: str) -> None:
    for well in ([own(0), own(2), own(1)], [NONE, NONE], [NONE], [own(0)]):
        assert agree(*well) == [""] * len(well)
    told = agree(*claims)
    assert len(set(told)) == 1 and f"{wrong}. Start no more ranks on a machine than it has devices" in told[0]
    assert "under srun they are SLURM_LOCALID" in told[0] and 'run.device = "cpu"' in told[0]


def test_who_has_none_and_should_says_why(see: See) -> None:
    """Nobody computes on the CPU of a machine with devices without having said so."""
    see(2)
    few = [find_device("auto", rank, 3)[1] for rank in range(3)]
    assert all("of 3 ranks, 0, 1, 2 are 3 on a machine of 2 devices. Start" in told for told in agree(*few))
    other = find_device("xpu", 0, 1)[1]
    assert "0 are to have a device of type xpu, where torch sees 2 of type cuda." in agree(other)[0]
    see(0)
    assert "0 are to have a device of type cuda, where torch sees none." in agree(find_device("cuda", 0, 1)[1])[0]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "8"}, ""),  # hidden by whoever started it
        ({"SLURM_GPUS_ON_NODE": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, "ROCR_VISIBLE_DEVICES=0,1, SLURM_GPUS_ON_NODE=2"),
    ],
)
def test_nobody_who_was_given_devices_trains_on_the_cpu(
    see: See, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    see(0)
    device, claim = find_device("auto", 0, 1)
    assert device == CPU
    (told,) = agree(claim)
    assert (f"of 1 ranks, 0 were given devices by {said}, where torch sees none." in told) if said else not told
    assert find_device("cpu", 0, 1)[1] == NONE


@pytest.mark.parametrize("cuda", ["12.8", None])
def test_cuda_gets_queues_for_all_streams_and_nccl_no_order_of_launches(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    set_variables(rank=0)
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("32" if cuda else None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    set_variables(rank=0)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_env_prints_what_is_set_and_what_a_run_would_set(
    see: See, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    see(2)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    env()
    printed = capsys.readouterr().out.splitlines()
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    env()
    assert "communicators: split_share=1; inside" in capsys.readouterr().out
    assert {"cuda: 12.8", "nccl: 2.28.9", "devices: 1 x GPU 0, 1 x GPU 1"} <= set(printed)
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=0" in printed
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32  (set by zeromesh)" in printed
    assert any(line.startswith("communicators: between machines max_ctas=4, split_share=1") for line in printed)
