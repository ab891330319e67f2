"""Whole tensors on this rank: [Note: Passage] of `zeromesh.pieces.passage` bound to memory.

Nothing is kept from step to step but the optimizer's own states: gradients and values of a bucket come to fresh memory,
which goes when what was made of them is back in the state shards. That is when no activation is alive. A parameter
that this rank holds whole is stepped on where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.comm import AxisGroup, Message, pass_on
from zeromesh.engine.backend import AxisJob
from zeromesh.engine.param import ShardedParameter
from zeromesh.pieces.passage import Hop, Part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One tensor of a bucket.

    Args:
        param: this rank's slice.
        whole: what the owner's optimizer steps on; between steps without memory. None on other ranks.
        parts: of the tensor on all ranks.
    """

    param: ShardedParameter
    whole: nn.Parameter | None
    parts: tuple[Part, ...]


Held = dict[Part, tuple[Tensor, Tensor]]
"""Where this rank has a part's gradient and values, or will have them."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class OwnedBucket:
    """A bucket on this rank; one of `engine.backend.WholeTensors`.

    Args:
        optimizer: over the tensors that this rank owns.
        members: all tensors of the bucket, the same on all ranks.
        rank: this one, among those that hold one copy of the states.
        groups: by axis that is crossed, outermost first.
        strides: by the same: distance between neighbours' numbers, and how many there are.
    """

    optimizer: Optimizer
    members: Sequence[Member]
    rank: int
    groups: Mapping[str, AxisGroup]
    strides: Mapping[str, tuple[int, int]]
    _moving: list[Member] = field(default_factory=list)
    _held: Held = field(default_factory=dict)

    def collect(self) -> list[AxisJob]:
        self._moving = [member for member in self.members if member.param.grad is not None]
        self._held = {}
        for member in self.members:
            if member.whole is not None:
                member.whole.grad = None
        for member in self._moving:
            self._make_room(member)
        return [
            (axis, partial(pass_on, *self._messages(axis), self.groups[axis], reduced=True)) for axis in self.strides
        ]

    def step(self) -> None:
        self.optimizer.step()

    def give_back(self) -> list[AxisJob]:
        jobs: list[AxisJob] = []
        for axis in reversed([*self.strides]):
            arriving, leaving = self._messages(axis)
            # In reverse, and of values only.
            back = [message for message, kind in zip(leaving, _kinds(leaving), strict=True) if kind]
            away = [message for message, kind in zip(arriving, _kinds(arriving), strict=True) if kind]
            jobs.append((axis, partial(pass_on, back, away, self.groups[axis], reduced=False)))
        self._put_back()
        self._held, self._moving = {}, []
        return jobs

    def _make_room(self, member: Member) -> None:
        """For a tensor that is owned here, and for parts of others that pass by."""
        grad, local = member.param.grad.local.contiguous(), member.param.local  # type: ignore[union-attr]  # a slice
        if member.whole is not None:
            self._show(member.whole, grad, local, tuple(member.param.global_shape))
        for part in member.parts:
            if self.rank == part.owner:
                assert member.whole is not None and member.whole.grad is not None
                own = (
                    member.whole.grad.view(-1)[part.start : part.stop],
                    member.whole.data.view(-1)[part.start : part.stop],
                )
                self._held[part] = own
                if self.rank == part.home and own[1].data_ptr() != local.data_ptr():
                    own[0].copy_(grad)
                    own[1].copy_(local)
            elif self.rank == part.home:
                self._held[part] = grad, local
            elif any(self.rank == hop.target for hop in part.hops):
                self._held[part] = grad.new_empty(part.numel), local.new_empty(part.numel)

    def _show(self, whole: nn.Parameter, grad: Tensor, local: Tensor, shape: tuple[int, ...]) -> None:
        """Gives a tensor that is owned here memory, or the slice's if that is all of it."""
        if local.numel() == whole.numel():
            whole.data, grad = local.view(shape), grad.view(shape)
        else:
            whole.data, grad = local.new_empty(shape), grad.new_empty(shape)
        if grad.dtype != whole.dtype:
            whole.grad_dtype = grad.dtype
        whole.grad = grad

    def _messages(self, axis: str) -> tuple[list[Message], list[Message]]:
        """What arrives and what leaves over one axis on the way to the owners: of each part gradient and values."""
        arriving, leaving = list[Message](), list[Message]()
        for member in self._moving:
            for part in member.parts:
                for hop in (hop for hop in part.hops if hop.axis == axis):
                    if self.rank == hop.source:
                        leaving += [(tensor, self._index(hop, hop.target)) for tensor in self._held[part]]
                    elif self.rank == hop.target:
                        arriving += [(tensor, self._index(hop, hop.source)) for tensor in self._held[part]]
        return arriving, leaving

    def _index(self, hop: Hop, rank: int) -> int:
        stride, size = self.strides[hop.axis]
        return rank // stride % size

    def _put_back(self) -> None:
        """What stays on this rank; and tells autograd, and whoever holds a view, that values have changed."""
        for member in self._moving:
            local = member.param.local
            for part in member.parts:
                if self.rank == part.owner == part.home and self._held[part][1].data_ptr() != local.data_ptr():
                    local.copy_(self._held[part][1])
            torch.autograd.graph.increment_version(local)
            if member.whole is not None:
                member.whole.grad = None
                member.whole.data = without_memory(member.whole.shape, member.whole.dtype, member.whole.device)


def _kinds(messages: Sequence[Message]) -> list[bool]:
    """Of messages in pairs, which one is of values."""
    return [index % 2 == 1 for index in range(len(messages))]


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape whose elements are all one."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
