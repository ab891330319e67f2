"""A rank that dies in the middle of a collective: every other rank gets an error that names operation, axis and ranks,
long before the timeout, and the first ones name the rank that died."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.comm.axes import make_axes, room
from tests.dist.pool import Pool, RanksFailed
from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter
from zeromesh.comm.exchange import AxisGroup, Exchange
from zeromesh.errors import CommunicationError
from zeromesh.wires.blocks import QuantFormat

TIMEOUT_S = 400.0
INT8 = QuantFormat(bits=8)


def scatter(node: AxisGroup, numel: int) -> None:
    reduce_scatter(torch.zeros(numel), torch.zeros(numel // node.size), node, workspace=room(node))


def reduce(node: AxisGroup, numel: int) -> None:
    all_reduce(torch.zeros(numel, dtype=torch.bfloat16), node, workspace=room(node))


def native_reduce(node: AxisGroup, numel: int) -> None:
    all_reduce(torch.zeros(numel), node, workspace=room(node))


def quantised_gather(node: AxisGroup, numel: int) -> None:
    all_gather(torch.zeros(numel), node, INT8, workspace=room(node))


def quantised_reduce(node: AxisGroup, numel: int) -> None:
    all_reduce(torch.zeros(numel), node, INT8, workspace=room(node))


def ring_gather(node: AxisGroup, cluster: AxisGroup, numel: int) -> None:
    ho_ring_all_gather(torch.zeros(numel), node, cluster)


def die_after_pieces(count: int) -> Any:
    """At the send after the first `count`, which have arrived."""
    post, waits = Exchange.post_send, list[Callable[[], None]]()

    def counted(self: Exchange, tensor: torch.Tensor, target: int) -> Callable[[], None]:
        if len(waits) == count:
            for wait in waits:
                wait()
            os._exit(1)
        waits.append(functools.cache(post(self, tensor, target)))  # gloo's works are waited for once
        return waits[-1]

    return mock.patch.object(Exchange, "post_send", counted)


def die_in_the_backend(name: str) -> Any:
    """While the backend's own collective is under way, or before it, where it is so short that it could be over."""
    call = getattr(dist, name)

    def begin(*args: Any, **kwargs: Any) -> None:
        if name == "all_reduce":
            call(*args, **kwargs, async_op=True)
        os._exit(1)

    return mock.patch.object(dist, name, begin)


def survive(folder: str, collective: Any, shape: tuple[int, ...], numel: int, dead: int, after: int | str) -> None:
    """Goes through a whole collective, then through one in which `dead` dies; leaves its error and how long it took."""
    groups = make_axes(*shape, timeout_s=TIMEOUT_S)
    collective(*groups, numel=numel)
    if dist.get_rank() == dead:
        with die_after_pieces(after) if isinstance(after, int) else die_in_the_backend(after):
            collective(*groups, numel=numel)
        return
    start = time.monotonic()
    try:
        collective(*groups, numel=numel)
    except CommunicationError as error:
        at = time.monotonic()  # one clock for all processes
        found = {"message": str(error), "at": at, "seconds": at - start}
        Path(folder, str(dist.get_rank())).write_text(json.dumps(found))
        os._exit(1)  # as training ends; ranks that have nothing to do with the dead one hear of it from this one


@pytest.mark.parametrize(
    ("collective", "shape", "numel", "after", "operation"),
    [
        (scatter, (3,), 3_000_000, 5, "reduce_scatter"),
        (reduce, (3,), 6_000_000, 10, "all_reduce"),  # while it gathers
        (quantised_gather, (3,), 6_000_000, 5, "all_gather"),
        (quantised_reduce, (3,), 6_000_000, 18, "all_reduce"),
        (ring_gather, (2, 3), 3_000_000, 4, "all_gather"),
    ],
)
def test_a_rank_that_dies_inside_a_collective_is_named(
    pool: Pool, tmp_path, collective, shape, numel, after, operation
):
    dead = 1
    found = errors(pool, tmp_path, collective, shape, numel, dead, after)
    for rank, (message, _) in found.items():
        assert message.startswith(f"{operation} over axis "), message
        assert f"failed on rank {rank} with rank " in message, message
    axis = {0: "node", 2: "node"} if len(shape) == 1 else {0: "node", 3: "cluster", 5: "cluster"}
    # The first to fail can have failed for one reason only.
    first = min(found, key=lambda rank: found[rank][1])
    assert f"over axis {axis[first]} failed on rank {first} with rank {dead} " in found[first][0]


@pytest.mark.parametrize(
    ("collective", "numel", "call", "operation"),
    [(scatter, 30_000, "all_to_all_single", "reduce_scatter"), (native_reduce, 8_000_000, "all_reduce", "all_reduce")],
)
def test_a_rank_that_dies_inside_a_collective_of_the_backend(pool: Pool, tmp_path, collective, numel, call, operation):
    """Gloo does not say which rank it was; all of the axis are named."""
    found = errors(pool, tmp_path, collective, (3,), numel, 1, call)
    for rank, (message, _) in found.items():
        assert message.startswith(f"{operation} over axis node failed on rank {rank} (ranks 0, 1, 2, "), message


def errors(
    pool: Pool, folder: Path, collective: Any, shape: tuple[int, ...], numel: int, dead: int, after: int | str
) -> dict[int, tuple[str, float]]:
    """Message and moment of every rank that survived, all of them in time."""
    world = torch.Size(shape).numel()
    with pytest.raises(RanksFailed, match=rf"failed on {world} of {world} ranks"):
        pool.run(world, survive, str(folder), collective, shape, numel, dead, after)
    found = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}
    assert sorted(found) == [rank for rank in range(world) if rank != dead], "a rank hung, or did not fail"
    assert all(one["seconds"] < TIMEOUT_S / 4 for one in found.values())
    return {rank: (one["message"], one["at"]) for rank, one in found.items()}
