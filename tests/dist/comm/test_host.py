"""Tensors of a device over gloo. The device is forged: host memory that says it is elsewhere and reports its copies."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.dist.comm.axes import make_axes
from tests.dist.pool import on_ranks
from zeromesh.comm.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter
from zeromesh.comm.exchange import AxisGroup
from zeromesh.comm.messages import HostCopies
from zeromesh.comm.transport import Native, Transport, carried, transport_of
from zeromesh.wires.blocks import QuantFormat

CHUNK = 640
HOST_COPIES = HostCopies("cuda")


class Elsewhere(torch.Tensor):
    """Reports copies from and to it, and that pinned memory on the host is asked for, which only CUDA has."""

    seen: list[str] = []  # noqa: RUF012  # of one test at a time

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # torch declares an attribute
        return False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.empty_like and kwargs.pop("pin_memory", False):
            assert kwargs == {"device": "cpu"}
            cls.seen.append("pin")
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        if function is torch.Tensor.copy_:
            if not isinstance(args[0], cls):
                # The host reads the copy next, so it has to wait for it.
                assert "non_blocking" not in kwargs and len(args) == 2
                cls.seen.append("to host")
                return args[0].copy_(args[1].as_subclass(torch.Tensor))
            if not isinstance(args[1], cls):
                cls.seen.append("back")
        return super().__torch_function__(function, types, args, kwargs)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().as_subclass(Elsewhere)


def group_of_two(transport: Transport | None = None) -> AxisGroup:
    Elsewhere.seen.clear()
    (group,) = make_axes(2)
    group.transport = transport or group.transport
    return group


def region() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(2 * CHUNK, generator=generator)


FORM = QuantFormat(bits=8)
COLLECTIVES = {
    "all_gather": lambda region, out, group, workspace: all_gather(region, group),
    "reduce_scatter": lambda region, out, group, workspace: reduce_scatter(region, out, group, workspace=workspace),
    "reduce_scatter, added": lambda region, out, group, workspace: reduce_scatter(
        region, out, group, workspace=workspace, scale=0.5, accumulate=True
    ),
    "reduce_scatter, inside": lambda region, out, group, workspace: reduce_scatter(
        region, region[group.rank * CHUNK :][:CHUNK], group, workspace=workspace
    ),
    "all_reduce": lambda region, out, group, workspace: all_reduce(region, group, workspace=workspace),
    "all_reduce_max": lambda region, out, group, workspace: all_reduce_max(region, group),
    "quantised_all_gather": lambda region, out, group, workspace: all_gather(region, group, FORM, workspace=workspace),
    "quantised_reduce_scatter": lambda region, out, group, workspace: reduce_scatter(
        region, out, group, FORM, workspace=workspace
    ),
    "quantised_all_reduce": lambda region, out, group, workspace: all_reduce(region, group, FORM, workspace=workspace),
}


@on_ranks(2)
def test_collectives_give_what_they_give_on_the_host():
    host, device = group_of_two(), group_of_two(HOST_COPIES)
    for name, collective in COLLECTIVES.items():
        results = []
        for make, group in ((torch.Tensor.clone, host), (elsewhere, device)):
            whole, out = make(region()), make(torch.ones(CHUNK))
            collective(whole, out, group, make(torch.zeros(1 << 20, dtype=torch.uint8)))
            results.append([tensor.as_subclass(torch.Tensor) for tensor in (whole, out)])
        assert all(map(torch.equal, *results)), name
        assert not torch.equal(torch.cat(results[0]), torch.cat((region(), torch.ones(CHUNK)))), name
        copies = len(Elsewhere.seen) // 3
        assert copies and Elsewhere.seen == ["pin"] * copies + ["to host"] * copies + ["back"] * copies, name
        Elsewhere.seen.clear()


@carried
def doubled(whole: torch.Tensor, own: torch.Tensor, group: AxisGroup, *, other: torch.Tensor) -> None:
    """A collective's effect on its arguments: `own` may be a part of `whole`."""
    assert all(isinstance(tensor, Elsewhere) == isinstance(group.transport, Native) for tensor in (whole, own, other))
    whole.mul_(2)
    own.copy_(torch.full_like(own, 7.0))
    other.add_(1)


@on_ranks(2)
def test_what_is_part_of_another_argument_comes_back_last():
    whole, other = elsewhere(torch.ones(4)), elsewhere(torch.zeros(2))
    doubled(whole, whole[1:3], group_of_two(HOST_COPIES), other=other)
    assert whole.tolist() == [2, 7, 7, 2]
    assert other.tolist() == [1, 1]


@on_ranks(2)
def test_only_a_device_over_gloo_is_copied():
    assert transport_of("gloo", "cuda") == HOST_COPIES
    for make, backend, device in ((elsewhere, "nccl", "cuda"), (torch.Tensor.clone, "gloo", "cpu")):
        group = group_of_two(transport_of(backend, device))
        whole = make(torch.ones(4))
        doubled(whole, whole[1:3], group, other=make(torch.zeros(2)))
        assert whole.tolist() == [2, 7, 7, 2]
        assert "pin" not in Elsewhere.seen
