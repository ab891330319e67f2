"""Sizes of messages that a probe times, and the wait around them, without a link."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeromesh.measure import links


@pytest.mark.parametrize(("on_cpu", "largest"), [(True, 64 << 20), (False, 512 << 20)])
def test_messages_are_as_long_as_links_of_devices_need(on_cpu: bool, largest: int) -> None:
    def calls(group: Any, size: int, *_: Any) -> dict[str, tuple[links.Call, int]]:
        return {"all_gather": (lambda: None, size)}

    ranks: Any = mock.Mock(on_cpu=on_cpu, device=torch.device("cpu"))
    instead: dict[str, Any] = {"_calls": calls, "_repeats": lambda *_: (1, 1e-9), "workspace_bytes": lambda _: 0}
    with mock.patch.multiple(links, **instead):
        sizes = [sample.sent_bytes for sample in links._samples(mock.Mock(), ranks, 1.0, 20.0)]
        few = [sample.sent_bytes for sample in links._samples(mock.Mock(), ranks, 0.0, 20.0)]
    assert sizes[0] == links.SMALLEST_BYTES and sizes[-1] == largest and sizes == sorted(set(sizes))
    assert few[-1] == links.LEAST_BYTES


def test_a_sample_does_not_wait_for_products_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    ranks = mock.Mock()
    links._timed(lambda: None, 1, ranks)
    assert ranks.method_calls == [mock.call.settle_stream()] * 2
