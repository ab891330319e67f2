"""Process groups for tensors of the device."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zeromesh.simdev.build import native

BACKEND = "simccl"
"""Ordered by streams as NCCL's; data goes through gloo."""

COUNTING = "simcount"
"""The same for one process that is a rank of any world: the others are taken to hold what this one holds."""


def register_backends(*, alone: bool) -> None:
    """The first is what torch takes for the device by default: without gloo where a process is `alone`."""
    names = {BACKEND: _through_gloo, COUNTING: _counting}
    for name in sorted(names, reverse=alone):
        devices = ["simdev"] if name == BACKEND else ["simdev", "cpu"]
        dist.Backend.register_backend(name, names[name], extended_api=True, devices=devices)


def _timeout(options: Any) -> datetime.timedelta:
    given = options.timeout
    return given if isinstance(given, datetime.timedelta) else datetime.timedelta(seconds=float(given))


def _through_gloo(options: Any, _: Any) -> Any:
    store = PrefixStore("simccl", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, _timeout(options))
    return native().make_group(options.group_rank, options.group_size, gloo, _timeout(options))


def _counting(options: Any, _: Any) -> Any:
    return native().make_group(options.group_rank, options.group_size, None, _timeout(options))
