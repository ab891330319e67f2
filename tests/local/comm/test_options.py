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

from zeromesh.comm.nccl import SLOW_CTAS, Options, options_of


def stand_in(**constants: int) -> Any:
    return SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()), **constants)


@pytest.mark.parametrize(
    ("lines", "registered", "in_turn", "expected"),
    [
        ("aaaa", False, True, None),
        ("aaaa", True, True, Options(zero_ctas=True)),
        ("abcd", False, False, Options(max_ctas=SLOW_CTAS)),
        ("abcd", False, True, Options(max_ctas=SLOW_CTAS, shared=True)),
        ("abcd", True, True, Options(max_ctas=SLOW_CTAS)),
        ("aabb", True, True, None),  # over every network card of a machine at once
        ("abcd aabb", False, True, None),  # all ranks split communicators off together
        ("aaaa abcd", True, True, None),
    ],
)
def test_by_level(lines: str, registered: bool, in_turn: bool, expected: Options | None) -> None:
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"):
        assert options_of(lines.split(), registered=registered, in_turn=in_turn) == expected


def test_nvlink_between_machines_has_no_limit() -> None:
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA GB200"):
        assert options_of(["abcd"], registered=False, in_turn=True) is None


def test_where_the_user_lets_all_share_buffers_all_have_the_same_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    with mock.patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"):
        assert options_of(["abcd"], registered=False, in_turn=True) is None


def test_as_torch_has_them() -> None:
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in(NCCL_CTA_POLICY_ZERO=2), create=True):
        made = Options(max_ctas=4, zero_ctas=True).made(60.0, None)
        assert vars(made.config) == {"max_ctas": 4, "cta_policy": 2} and made._timeout == timedelta(seconds=60)
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in(), create=True):  # a torch over an older NCCL
        assert vars(Options(zero_ctas=True).made(60.0, None).config) == {}


@pytest.mark.parametrize("debug", [False, True])
def test_the_second_of_a_pair_that_shares_is_split_off_the_first(debug: bool) -> None:
    backend = SimpleNamespace()
    inner = SimpleNamespace(wrapped_pg=backend) if debug else backend
    parent: Any = SimpleNamespace(_get_backend=lambda device: inner)
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in(), create=True):
        first, second = (Options(max_ctas=4, shared=True).made(60.0, group) for group in (None, parent))
        assert vars(first.config) == vars(second.config) == {"max_ctas": 4, "split_share": 1}
        assert not hasattr(first, "split_from")
        assert second.split_from is backend and second.split_color == 0


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL; no GPU")
def test_torch_s_own_class_has_them() -> None:
    made = Options(max_ctas=4, zero_ctas=True, shared=True).made(60.0, None)
    assert (made.config.max_ctas, made.config.split_share, made.split_from) == (4, 1, None)
    made.split_color = 0
