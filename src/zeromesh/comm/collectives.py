"""Collectives over one axis: blocking, in place, without allocating.

They are called from a lane's job. Regions are flat and contiguous: n equal chunks, chunk i belonging to the rank with
index i on the axis::

    all_gather       every rank: [. b . .]  ->  [a b c d]
    reduce_scatter   every rank: [a b c d]  ->  out = b0 + b1 + b2 + b3      (on the rank with index 1)
    all_reduce       every rank: t          ->  t0 + t1 + t2 + t3

Messages are summed in fp32 (fp64 for fp64), in the order of the ranks' indices and not of their arrival, so a result
depends on neither timing nor receiver; an all_reduce in fp32 or fp64 is the backend's own, in its own order.
Elsewhere all are the backend's own, in place, with its sums in the dtype of the wire. Replicas are equal to the bit.
One rank sends (n-1)/n of the region in a gather or a reduce-scatter and twice that in an all-reduce.

[Note: Arguments] All collectives take some of these:

    region      flat, contiguous, of n equal chunks
    form        of a quantised wire, the same on all ranks: [Note: Rounds] of `zeromesh.comm.quantised`
    workspace   as many bytes on all ranks: those of `schedule.workspace`, or `workspace_bytes(group)`
    scale       factor of the sum
    accumulate  add to `out`, with one rounding to its dtype, instead of overwriting it
    residual    error feedback, as long as the region: rounding errors of earlier calls, added to the next messages
    generator   of stochastic rounding: `noise_generator(group)`, kept from call to call

They raise CommunicationError where a peer died or stalled, or issued something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.exchange import AxisGroup, Channel, Exchange, own_chunk
from zeromesh.comm.transport import carried, nothing, reduce_scatter_single
from zeromesh.schedule.memory import MESSAGES_BYTES
from zeromesh.wires.target import Target

if TYPE_CHECKING:
    from zeromesh.wires.format import WireFormat


def workspace_bytes(group: AxisGroup) -> int:
    """Bytes of workspace with which lossless reductions over `group` run well; all ranks must pass as much."""
    return MESSAGES_BYTES if group.transport.messages else 0


@carried
def all_gather(
    region: Tensor,
    group: AxisGroup,
    form: WireFormat | None = None,
    *,
    workspace: Tensor | None = None,
    generator: torch.Generator | None = None,
    keep: Tensor | None = None,
) -> None:
    """Fills `region`, of which this rank's chunk is filled, with every rank's: [Note: Arguments].

    Args:
        keep: of a quantised wire, room for all messages, `group.size * form.message_bytes(chunk)` bytes, which
            `restore_kept` reads.
    """
    if form is None:
        _all_gather(region, group, group.gather, "all_gather")
    else:
        from zeromesh.comm.quantised import gather_coded  # a quantised wire is asked for by name

        assert workspace is not None
        gather_coded(region, group, form, workspace=workspace, generator=generator, keep=keep)


@carried
def reduce_scatter(
    region: Tensor,
    out: Tensor,
    group: AxisGroup,
    form: WireFormat | None = None,
    *,
    workspace: Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    **coding: Any,
) -> None:
    """Sums this rank's chunk of every rank's `region`, in the dtype of the wire, into `out`: [Note: Arguments].
    `out` is as long as one chunk, in any floating dtype, and may be this rank's chunk of `region`; `coding` is
    `residual` and `generator`."""
    target = Target(out=out, scale=scale, accumulate=accumulate)
    if form is not None:
        from zeromesh.comm.quantised import reduce_coded

        reduce_coded("reduce_scatter", region, target, group, form, workspace=workspace, **coding)
    elif group.transport.sums("reduce_scatter", region.dtype):
        _native_reduce_scatter(region, target, group)
    else:
        from zeromesh.comm.messages import sum_messages  # of gloo

        sum_messages(region, target, group, workspace, "reduce_scatter")


@carried
def all_reduce(
    tensor: Tensor,
    group: AxisGroup,
    form: WireFormat | None = None,
    *,
    workspace: Tensor,
    scale: float = 1.0,
    **coding: Any,
) -> None:
    """Replaces `tensor`, a region, by its sum over the group, the same bits on every rank: [Note: Arguments].
    `coding` is `residual`, whose part for the own chunk holds the rounding error of the sum, and `generator`."""
    if form is None and group.transport.sums("all_reduce", tensor.dtype):
        _native_all_reduce(tensor, group, scale)
        return
    target = Target(out=own_chunk(tensor, group), scale=scale, accumulate=False)
    if form is not None:
        from zeromesh.comm.quantised import reduce_coded

        reduce_coded("all_reduce", tensor, target, group, form, workspace=workspace, **coding)
    else:
        from zeromesh.comm.messages import sum_messages

        sum_messages(tensor, target, group, workspace, "all_reduce")
        _all_gather(tensor, group, group.reduce, "all_reduce")


@carried
def all_reduce_max(words: Tensor, group: AxisGroup) -> None:
    """Replaces a few `words` by their maximum over the group, in the order of its reductions; no traffic is counted."""
    exchange = Exchange(group, group.reduce, "all_reduce_max", words.numel())
    exchange.native(lambda: dist.all_reduce(words, dist.ReduceOp.MAX, group=group.reduce.process_group), 0)


def _all_gather(region: Tensor, group: AxisGroup, channel: Channel, operation: str) -> None:
    exchange = Exchange(group, channel, operation, region.numel(), region.element_size())
    group.transport.gather(exchange, region, nothing)()
    exchange.finish()


def _native_reduce_scatter(region: Tensor, target: Target, group: AxisGroup) -> None:
    """Into this rank's chunk of the region, in place, and from there in one kernel."""
    own = own_chunk(region, group)
    exchange = Exchange(group, group.reduce, "reduce_scatter", region.numel(), region.element_size())
    op, scale = group.transport.scaled_sum(group.size, region.dtype, target.scale)
    pg = group.reduce.process_group
    exchange.native(lambda: reduce_scatter_single(own, region, op, group=pg), region.nbytes - own.nbytes)
    exchange.finish()
    Target(out=target.out, scale=scale, accumulate=target.accumulate).take(own)


def _native_all_reduce(tensor: Tensor, group: AxisGroup, scale: float) -> None:
    exchange = Exchange(group, group.reduce, "all_reduce", tensor.numel(), tensor.element_size())
    sent = 2 * (tensor.nbytes - tensor.nbytes // group.size)
    op, scale = group.transport.scaled_sum(group.size, tensor.dtype, scale)
    exchange.native(lambda: dist.all_reduce(tensor, op, group=group.reduce.process_group), sent)
    exchange.finish()
    if scale != 1:
        tensor.mul_(scale)
