"""NCCL's options of a communicator, by the machines of its ranks, as torch's class has them: a stand-in for it, since
NCCL itself is not run."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeromesh.comm.groups import SLOW_CTAS, Options


def stand_in(**constants: int) -> Any:
    return SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()), **constants)


@pytest.mark.parametrize(
    ("machines", "registered", "expected"),
    [
        ("aaaa", False, Options()),
        ("aaaa", True, Options(zero_ctas=True)),
        ("abcd", False, Options(max_ctas=SLOW_CTAS)),
        ("abcd", True, Options(max_ctas=SLOW_CTAS)),
        ("aabb", True, Options()),  # over every network card of a machine at once
    ],
)
def test_by_level(machines: str, registered: bool, expected: Options) -> None:
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"):
        assert Options.of(list(machines), registered=registered) == expected


def test_nvlink_between_machines_has_no_limit() -> None:
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA GB200"):
        assert Options.of(list("abcd"), registered=False) == Options()


@pytest.mark.parametrize(("share", "most"), [("1", 0), ("0", SLOW_CTAS)])
def test_communicators_that_share_buffers_all_have_the_same_ctas(
    share: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", share)
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"):
        assert Options.of(list("abcd"), registered=False).max_ctas == most


def test_as_torch_has_them() -> None:
    assert Options().made(60.0) is None
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in(NCCL_CTA_POLICY_ZERO=2), create=True):
        made = Options(max_ctas=4, zero_ctas=True).made(60.0)
        assert vars(made.config) == {"max_ctas": 4, "cta_policy": 2} and made._timeout == timedelta(seconds=60)
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in(), create=True):  # a torch over an older NCCL
        assert vars(Options(zero_ctas=True).made(60.0).config) == {}
