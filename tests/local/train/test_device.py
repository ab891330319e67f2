"""How batches reach a device."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from zeromesh.train.loop import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
