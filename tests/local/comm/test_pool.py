"""Communicators that models have given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

from zeromesh.comm.groups import Channel, Key, _Pool


class Model:
    def __init__(self) -> None:
        self.itself = self


def test_a_model_may_be_collected_while_ranks_agree():
    """At any allocation, which then gives communicators back: the offer is of those that were free before."""
    world: Any = mock.Mock(size=lambda: 1)
    pool, key, group = _Pool(world), Key((0, 1), 1.0, "gloo", "cpu", False), mock.Mock()
    pool.put(key, [Channel(process_group=group, serial=serial) for serial in range(5000)])
    threshold, gathered = gc.get_threshold(), mock.patch("torch.distributed.all_gather_object")
    gc.collect()
    with gathered:
        gc.disable()
        weakref.finalize(Model(), pool.put, key, [Channel(process_group=group, serial=5000)])
        gc.set_threshold(gc.get_count()[0] + 2000)  # in the middle of an iteration that makes a tuple for each
        gc.enable()
        try:
            found = pool.agree(world, {"node": key})
        finally:
            gc.set_threshold(*threshold)
    gc.collect()
    assert {*found["node"]} - {5000} == {*range(5000)} and len(pool._free[key]) == 5001
