"""How tensors move between the ranks of an axis: one class for each kind of backend, chosen by `transport_of`.

Native       collectives of the backend, in place, beside the host; sums in the dtype of the wire
Messages     of `zeromesh.comm.messages`: by this rank's own threads, which sum the received terms
HostCopies   messages of copies on the host
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum

from zeromesh.comm.exchange import AxisGroup, Exchange, Message, ReduceOp, Transport, Wait, Written, own_chunk

P = ParamSpec("P")

# Under these names from torch 2.13 on, which warns under those of before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Native(Transport):
    """Collectives of the backend, on the current stream where the tensors are a device's."""

    messages, window, longest = False, 1, sys.maxsize
    nccl: bool = False  # which multiplies each value by any factor before it adds

    def scaled_sum(self, size: int, dtype: torch.dtype, scale: float) -> tuple[ReduceOp, float]:
        # The factor of a mean is held in the dtype of the wire: in bf16 a third would be .2 % off, on every step alike.
        exact = dtype in (torch.float32, torch.float64) or math.frexp(scale)[0] == 0.5
        if scale != 1 and self.device_type != "cpu" and exact:
            # Backends other than NCCL may divide after the sum, which fp16 cannot always hold.
            if scale == 1 / size and (self.nccl or dtype != torch.float16):
                return dist.ReduceOp.AVG, 1.0
            if self.nccl:
                return _make_nccl_premul_sum(scale), 1.0
        return dist.ReduceOp.SUM, scale

    def connect(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device_type), group=group)

    def sums(self, operation: str, dtype: torch.dtype) -> bool:
        return True

    def gather(self, exchange: Exchange, region: Tensor, fill: Callable[[], object]) -> Wait:
        fill()
        own, group = own_chunk(region, exchange.group), exchange.process_group
        exchange.native(lambda: gather_single(region, own, group=group), region.nbytes - own.nbytes)
        return nothing

    def swap(self, exchange: Exchange, incoming: Tensor, outgoing: Tensor, written: Written) -> Wait:
        for _ in written():
            pass
        group, sent = exchange.process_group, outgoing.nbytes - outgoing[exchange.group.rank].nbytes
        exchange.native(lambda: dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group), sent)
        return nothing

    def pass_on(self, exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
        incoming, outgoing = _by_peer(exchange, arriving), _by_peer(exchange, leaving)
        to_come, to_go = ([sum(part.numel() for part in parts) for parts in each] for each in (incoming, outgoing))
        received = torch.empty(sum(to_come), dtype=torch.uint8, device=self._device)
        sent = torch.cat([received[:0], *itertools.chain.from_iterable(outgoing)])
        group = exchange.process_group
        exchange.native(lambda: dist.all_to_all_single(received, sent, to_come, to_go, group=group), sent.numel())
        targets = [*itertools.chain.from_iterable(incoming)]
        for target, landed in zip(targets, torch.split(received, [each.numel() for each in targets]), strict=True):
            target.copy_(landed)

    @property
    def _device(self) -> torch.device | None:
        """This rank's device, even if it has no message that would tell."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.accelerator.current_accelerator()


def transport_of(backend: str, device_type: str) -> Transport:
    """The transport of groups of torch's `backend` for tensors on this type of device."""
    if backend != "gloo":
        return Native(device_type, nccl=backend == "nccl")
    from zeromesh.comm.messages import HostCopies, Messages  # of gloo

    return Messages(device_type) if device_type == "cpu" else HostCopies(device_type)


def carried(collective: Callable[P, None]) -> Callable[P, None]:
    """`collective`, as the transport of the group among its arguments runs it."""

    @functools.wraps(collective)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        next(value for value in args if isinstance(value, AxisGroup)).transport.run(collective, args, kwargs)

    return run


def pass_on(arriving: Sequence[Message], leaving: Sequence[Message], group: AxisGroup, *, reduced: bool) -> None:
    """An all-to-all of any number of flat tensors of any lengths and dtypes, which all ranks of the group call, also
    those without messages. Between any two ranks, one sends in the order in which the other expects to receive. If
    `reduced`, it takes its turn among the reductions, else among the gathers."""
    exchange = Exchange(group, group.reduce if reduced else group.gather, "all_to_all")
    group.transport.pass_on(exchange, arriving, leaving)
    exchange.finish()


def nothing() -> None:
    """Waits for nothing."""


def _by_peer(exchange: Exchange, messages: Sequence[Message]) -> list[list[Tensor]]:
    """Bytes of the messages from or to each rank of the axis."""
    found: list[list[Tensor]] = [[] for _ in range(exchange.group.size)]
    for tensor, peer in messages:
        found[peer].append(tensor.view(torch.uint8))
    return found
