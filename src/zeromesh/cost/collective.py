"""Seconds of a collective on a hierarchy of links.

[Note: Ring] A ring over n ranks in rank order takes n-1 steps. Over each level's links it sends S = (n-1)/n * B out of
every member, with B the whole buffer; an all-reduce sends twice that in twice the steps. A member's ring edge is one
stream, so::

    seconds = launch + sum over levels of steps * latency + max over levels of t * (1 + (scale / t)**power)
    t = S / (the group's share of the level's links)

The term in brackets is a short transfer's loss to protocol and chunking. NCCL's measured curves need it only inside a
node: between nodes, the latency of the steps explains them. The sum is monotone in B, since power <= 1.

If a level's file has curves, the measured time is taken instead: `cluster.level`. Without curves, it may give the share
of the level's rate that an operation reaches.

An all-reduce may also be a double binary tree, whose latency grows with the logarithm. The faster of the two is taken,
as in NCCL. For other ways over several levels see `zeromesh.collectives`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from zeromesh.cost.constants import Constants
from zeromesh.cost.group import Group, Hop, ring_steps
from zeromesh.errors import InternalError
from zeromesh.strategy.collective import Collective, find_collective

if TYPE_CHECKING:
    from zeromesh.schedule.transfer import Transfer

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """The cost of one collective if nothing else runs.

    `busy` has (level index, seconds): how long the collective keeps its share of the level's links busy. Other
    communicators wait for the links, or share them.
    """

    seconds: float
    busy: tuple[tuple[int, float], ...] = ()
    sent_bytes: float = 0.0  # out of one rank, over all levels together
    busy_latency_s: float = 0.0  # additional latency while the device computes
    taken: float = 0.0  # share of the device's rate of computation that it takes while it runs
    memory_s: float = 0.0  # for its bytes through the device's memory, at the rate of kernels

    @property
    def transfer_s(self) -> float:
        """The part of `seconds` in which bytes move."""
        return max((seconds for _, seconds in self.busy), default=0.0)

    @property
    def latency_s(self) -> float:
        return self.seconds - self.transfer_s

    def with_kernels(self, seconds: float, cores: float | None) -> CollectiveCost:
        """Adds kernels on the device: quantisers, sums, copies. Each uses all of the device to read and write memory,
        so concurrent computation waits as long. If the device has `cores`, a kernel needs one, as computation does."""
        whole = self.seconds + seconds
        if cores is None or not seconds:
            taken = (self.taken * self.seconds + seconds) / whole if whole else 0.0
            return replace(self, seconds=whole, taken=taken)
        return replace(self, seconds=whole, busy=merge_busy(self.busy, ((HOST, seconds * min(1.0, cores) / cores),)))


class JointCost(ABC):
    """Costs of a collective over several levels, which `zeromesh.strategy.Collective` carries out."""

    @abstractmethod
    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        """The cost of one collective over a group of several levels, in engines that issue it as one."""

    def pair_cost(
        self, first: CollectiveCost, second: CollectiveCost, steps: tuple[Transfer, Transfer]
    ) -> CollectiveCost:
        """The cost of two steps at once, given the cost of each."""
        raise NotImplementedError(f"{type(self).__name__} is of one step at a time")


def costs_of(collective: Collective) -> JointCost:
    """Returns the costs that a collective's `costs` names."""
    return _found(collective.costs)


@cache
def _found(costs: str | type) -> JointCost:
    found: JointCost = (resolve_name(costs) if isinstance(costs, str) else costs)()
    return found


HOST = -1
"""The level index for a device's own processor in `busy`, if it moves the bytes."""

FREE = CollectiveCost(seconds=0.0)


def collective_cost(
    group: Group, operation: Operation, full_bytes: float, constants: Constants, *, algorithm: str = "flat"
) -> CollectiveCost:
    """Returns the cost of `operation` over `group`; zero for a group of one. `algorithm` is the collective's name in
    the notation.

    `full_bytes` are those of the whole buffer on the wire: a gather's result, a reduction's input, one rank's buffer
    before an all-to-all, or a broadcast's message.
    """
    if full_bytes < 0:
        raise InternalError(f"a collective of {full_bytes} bytes")
    if group.size == 1 or full_bytes == 0:
        return FREE
    if operation == "all_to_all":
        return _all_to_all(group, full_bytes, constants)
    if algorithm != "flat":
        return costs_of(find_collective(algorithm)).joint_cost(group, operation, full_bytes, constants)
    ring = ring_cost(group, operation, full_bytes, constants)
    if operation != "all_reduce":
        return ring
    if any(hop.links.curve(operation, hop.size) for hop in group.hops):
        return ring  # in measurements, the library has already chosen
    tree = _tree(group, full_bytes, constants)
    return min(ring, tree, key=lambda cost: cost.seconds)


def ring_cost(group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
    """The cost of one ring over all ranks: [Note: Ring]."""
    passes = 2 if operation == "all_reduce" else 1
    # A pipelined broadcast sends the whole buffer over every edge except the last.
    share = 1.0 if operation == "broadcast" else (group.size - 1) / group.size
    sent = passes * share * full_bytes
    steps = zip(ring_steps([hop.size for hop in group.hops]), group.hops, strict=True)
    latency = constants.launch_s + passes * sum(count * hop.step_s for count, hop in steps)
    return _transfer(group.hops, operation, sent, latency, constants)


def _tree(group: Group, full_bytes: float, constants: Constants) -> CollectiveCost:
    *inner, outer = group.hops
    chain = sum((hop.size - 1) * hop.step_s * constants.tree_step_share for hop in inner)
    latency = constants.launch_s + 2 * (math.ceil(math.log2(outer.size)) * outer.step_s + chain)
    sent = 2 * (group.size - 1) / group.size * full_bytes
    slower = _transfer(group.hops, "all_reduce", sent / constants.tree_share, latency, constants)
    return CollectiveCost(seconds=slower.seconds, busy=slower.busy, sent_bytes=sent)


def _transfer(
    hops: tuple[Hop, ...], operation: Operation, sent: float, latency: float, constants: Constants
) -> CollectiveCost:
    busy = tuple((hop.level, _link_seconds(hop, operation, sent, constants)) for hop in hops)
    return CollectiveCost(seconds=latency + max(t for _, t in busy), busy=busy, sent_bytes=sent)


def _link_seconds(hop: Hop, operation: Operation, sent: float, constants: Constants) -> float:
    rate = hop.rate_bytes_per_s * hop.links.share(operation)
    curve = hop.links.curve(operation, hop.size)
    if curve is not None:
        latency = constants.launch_s + curve.passes * (curve.ranks - 1) * hop.step_s
        return curve.busy_s(sent * hop.sharing, latency, rate * hop.sharing)
    full_rate = sent / rate
    if hop.outer or full_rate == 0:
        return full_rate
    # t + scale**p * t**(1-p) equals (1 + (scale/t)**p) * t, without overflow for tiny t.
    power = constants.size_power
    lost: float = constants.size_scale_s**power * full_rate ** (1 - power)
    return full_rate + lost


def _all_to_all(group: Group, full_bytes: float, constants: Constants) -> CollectiveCost:
    """The cost of sending every other rank its own part. Over a level, a rank sends to all ranks outside its member."""
    latency = constants.launch_s + (group.size - 1) * constants.peer_s + max(hop.step_s for hop in group.hops)
    busy = []
    inside = 1
    for hop in group.hops:
        # `inside` ranks of this group share a member. Each sends (n - inside)/n of its buffer over the hop.
        leaving = inside * (group.size - inside) / group.size * full_bytes
        busy.append((hop.level, _link_seconds(hop, "all_to_all", leaving, constants)))
        inside *= hop.size
    sent = (group.size - 1) / group.size * full_bytes
    return CollectiveCost(seconds=latency + max(t for _, t in busy), busy=tuple(busy), sent_bytes=sent)


def one_after_another(*costs: CollectiveCost) -> CollectiveCost:
    """The cost of collectives that each wait for the one before."""
    return CollectiveCost(
        seconds=sum(cost.seconds for cost in costs),
        busy=merge_busy(*[cost.busy for cost in costs]),
        sent_bytes=sum(cost.sent_bytes for cost in costs),
        busy_latency_s=sum(cost.busy_latency_s for cost in costs),
        taken=mean_taken(costs, sum(cost.seconds for cost in costs)),
        memory_s=sum(cost.memory_s for cost in costs),
    )


def mean_taken(costs: Sequence[CollectiveCost], seconds: float) -> float:
    """The mean share of the device that several collectives take, given their total duration."""
    return sum(cost.taken * cost.seconds for cost in costs) / seconds if seconds else 0.0


def merge_busy(*parts: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Adds up seconds by level over several collectives."""
    total: dict[int, float] = {}
    for part in parts:
        for level, seconds in part:
            total[level] = total.get(level, 0.0) + seconds
    return tuple(sorted(total.items()))
