"""The constants of the cost model: one set for all devices and networks, each with its origin.

`tools/fit_costs.py` writes `data/constants.toml` from micro-benchmarks only, or it cites a source. Nothing is fitted to
the tables with which predictions are validated.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.level import LINK_KINDS
from zeromesh.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of this package's formulas that a cluster's description does not have.

    A transfer that takes t seconds at full rate takes `t * (1 + (size_scale_s / t)**size_power)` over links inside a
    node; see `collective`. Shares of matrix products and of fused causal attention are relative to the device's
    achievable rate; attention counts the half of the scores that it computes.
    """

    link_share: Mapping[str, float] | tuple[tuple[str, float], ...] = field(default=())  # by kind, for large messages
    size_scale_s: float
    size_power: float
    launch_s: float  # of any collective, before its first step
    tree_share: float  # a tree all-reduce's bandwidth over a ring's
    tree_step_share: float  # a step's latency inside a node, in a tree over in a ring
    peer_s: float  # latency per peer of an all-to-all
    matmul_share: float  # that large products reach
    matmul_backward_share: float
    matmul_scale: float  # dimension d at which a d x d x d product loses a further three quarters; see `compute`
    achievable_share: float  # achievable rate over the peak, for a device without a measurement
    attention_forward_share: float
    attention_backward_share: float
    flops_per_byte: float  # peak FLOP/s per byte/s of memory bandwidth, for a device that states no bandwidth
    memory_share: float  # of the device's memory bandwidth, that elementwise kernels reach
    traffic: float  # bytes that elementwise kernels move in a forward, over `ActivationSpec.elementwise`
    optimizer_bytes: float  # read and written by AdamW per element of the state shard
    node_channels: float  # of a collective inside a node; see `contention`
    card_channels: float  # the same for each network card
    channel_share: float  # of a multiprocessor's computation, that a channel takes
    node_passes: float  # of sent bytes through a device's memory, inside a node
    card_passes: float  # the same over a network
    multiprocessors: float  # of a device whose file has no number
    host_issue_s: float  # host's seconds for a unit's transfer; `simulator.clock` says when they matter
    host_copy_bytes_per_s: float  # between a device and its host's memory, in one direction
    host_memory_bytes_per_s: float  # of a host's memory, for an optimizer's step there
    host_ahead_s: float  # seconds by which the host can be ahead of the device
    context_bytes: float  # of the driver's context and libraries
    communicator_bytes: float  # of one communicator's buffers
    allocator_share: float  # unusable share of the allocator's reserved memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "link_share", tuple(sorted(dict(self.link_share).items())))
        missing = set(LINK_KINDS) - {"auto"} - set(dict(self.link_share))
        if missing:
            raise InternalError(f"constants have no link_share for {', '.join(sorted(missing))}")
        negative = [f.name for f in fields(self) if f.name != "link_share" and getattr(self, f.name) < 0]
        if negative or not 0 <= self.size_power <= 1:
            raise InternalError(f"constants out of range: {', '.join(negative) or 'size_power'}")

    def at(self, name: str, value: float) -> Constants:
        """Returns a copy with another value of one constant, named as in the file: `link_share.nvlink`."""
        kind = name.removeprefix("link_share.")
        if kind != name:
            return replace(self, link_share=dict(self.link_share) | {kind: value})
        return replace(self, **{name: value})  # type: ignore[arg-type]  # all others are floats

    def on(self, cluster: Cluster) -> Constants:
        """Returns a copy with the rates that were measured on the cluster's machines."""
        copies, steps = cluster.host_copy_bytes_per_s, cluster.host_step_bytes_per_s
        found = self if copies is None else replace(self, host_copy_bytes_per_s=copies)
        return found if steps is None else replace(found, host_memory_bytes_per_s=steps)

    def overhead_bytes(self, *, messages: bool, communicators: int, dynamic_bytes: float) -> float:
        """Bytes of a process on one device apart from model state, buffers and activations: the driver's context,
        communicators, and the allocator's unusable part.

        Args:
            messages: True if ranks exchange messages. Then there is no context, and communicators hold no buffers.
            communicators: process groups that have been used on the device.
            dynamic_bytes: memory that is allocated and freed during a step (activations). Memory that is allocated once
                loses nothing to fragmentation.
        """
        driver = 0.0 if messages else self.context_bytes + communicators * self.communicator_bytes
        return driver + dynamic_bytes * self.allocator_share

    def share_of(self, kind: str) -> float:
        """The achieved share of nominal bandwidth over links of this kind."""
        return dict(self.link_share)[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of one constant: `how` is "fitted", "cited" or "assumed", and `source` names the source.

    `low` and `high` are given if public measurements leave the value open; `between` says which measurements.
    """

    name: str
    value: float
    how: str
    source: str
    low: float | None = None
    high: float | None = None
    between: str = ""


@cache
def default_constants() -> Constants:
    table = _table()
    links = {kind: entry["value"] for kind, entry in table["link_share"].items()}
    rest = {name: entry["value"] for name, entry in table.items() if name != "link_share"}
    return Constants(link_share=links, **rest)


@cache
def provenance() -> tuple[Provenance, ...]:
    """Returns the origin of each shipped constant, in the file's order."""
    entries = []
    for name, entry in _table().items():
        if name == "link_share":
            entries += [Provenance(name=f"link_share.{kind}", **e) for kind, e in entry.items()]
        else:
            entries.append(Provenance(name=name, **entry))
    return tuple(entries)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("zeromesh.cost") / "data" / "constants.toml").read_text(encoding="utf-8"))
