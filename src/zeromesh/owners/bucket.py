"""Whole tensors on this rank: binds [Note: Passage] of `zeromesh.pieces.passage` to memory.

From step to step a bucket keeps the optimizer's own states, and the values of owned tensors. Gradients, and pieces that
pass through this rank, come to fresh memory, which is freed when the results are back in the state shards. No
activation is alive then. A parameter that this rank holds whole is stepped on in place. Slices on the host come to the
device for the step, and go back after it.

A piece that is not a range of its tensor (a slice of some of its columns) arrives in memory of its own. It is copied
into the tensor before the step, and out of it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.comm.exchange import AxisGroup, Message
from zeromesh.comm.lane import Job, Ticket
from zeromesh.comm.transport import pass_on
from zeromesh.engine.backend import DeviceBackend
from zeromesh.engine.param import ShardedParameter
from zeromesh.owners.stacks import Stacking, step_on_stacks
from zeromesh.pieces.passage import Hop, Part
from zeromesh.schedule.bucket import BucketSteps
from zeromesh.schedule.transfer import Direction

AxisJob = tuple[str, Job]
"""An axis's name, and a job over the axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One tensor of a bucket.

    `whole` is the tensor that the owner's optimizer steps on, without memory until the first step; None on other ranks.
    """

    param: ShardedParameter  # this rank's slice
    shape: tuple[int, ...]  # of the whole tensor
    grad_itemsize: int
    whole: nn.Parameter | None
    parts: tuple[Part, ...]  # of the tensor, over all ranks

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def lies_here(self) -> bool:
        """Whether this rank's slice is the whole tensor."""
        return self.param.local.numel() == self.numel

    def copied_bytes(self, device: torch.device) -> int:
        """Bytes that the slice's copies take on `device`; 0 if it lies there."""
        param, local = self.param, self.param.local
        grad_bytes = 0 if param.grads_on == device else local.numel() * self.grad_itemsize
        return grad_bytes + (0 if local.device == device else local.nbytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the values that the owner keeps."""
        return 0 if self.whole is None or self.lies_here else self.numel * self.param.local.itemsize


Held = dict[Part, tuple[Tensor, Tensor]]
"""Where this rank has a part's gradient and values, or will receive them."""

GRADIENT, VALUES = 0, 1


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class OwnedBucket:
    optimizer: Optimizer  # over the tensors that this rank owns
    members: Sequence[Member]  # all tensors of the bucket, the same on all ranks
    rank: int  # this rank's number among those that hold one copy of the states
    groups: Mapping[str, AxisGroup]  # by axis that is crossed, outermost first
    strides: Mapping[str, tuple[int, int]]  # by the same axes: distance between neighbours' numbers, and count
    stacking: Stacking
    device: torch.device  # tensors are stepped on there, and messages leave from there
    act: Callable[[Optimizer], object] | None = None  # called with the optimizer instead of a step
    room_bytes: int = 0  # temporary memory of the last step
    values: list[Tensor] = field(default_factory=list)  # kept for this rank's own tensors
    _moving: list[Member] = field(default_factory=list)
    _here: dict[Member, tuple[Tensor, Tensor]] = field(default_factory=dict)  # gradient and values of slices, here
    _held: Held = field(default_factory=dict)
    _landing: list[tuple[Member, Part, int]] = field(default_factory=list)  # with the kind
    _known: set[Member] = field(default_factory=set)  # whose values their owners have; the same on all ranks

    def forget(self, params: Collection[ShardedParameter]) -> None:
        """Marks the owners' values of `params` as out of date, since something else has changed them."""
        self._known -= {member for member in self.members if member.param in params}

    def collect(self) -> list[AxisJob]:
        """Returns the jobs that bring gradients and values to the owners, in order."""
        self._moving = [member for member in self.members if member.param.grad is not None]
        self._held, self._landing = {}, []
        self._here = {m: (m.param.grad.local.to(self.device), self._values_of(m)) for m in self._moving}  # type: ignore[union-attr]  # slices
        self.room_bytes = sum(member.copied_bytes(self.device) for member in self._moving)
        for member in self.members:
            if member.whole is not None:
                member.whole.grad = None
        self._show_wholes()
        for member in self._moving:
            self._make_room(member)
        jobs: list[AxisJob] = []
        for axis in self.strides:
            arriving, leaving = self._messages(axis, back=False)
            jobs.append((axis, partial(pass_on, arriving, leaving, self.groups[axis], reduced=True)))
        self._known.difference_update(self._moving)  # until they have been given back
        return jobs

    def step(self) -> None:
        """Steps on the tensors that this rank owns."""
        for member, part, kind in self._landing:
            for inside, apart in _boxes(member, part, kind, self._held[part][kind]):
                inside.copy_(apart)
        if self.act is None:
            step_on_stacks(self.optimizer, self.stacking)
        else:
            self.act(self.optimizer)

    def give_back(self) -> list[AxisJob]:
        jobs: list[AxisJob] = []
        for member, part, _ in (each for each in self._landing if each[2] == GRADIENT):
            for inside, apart in _boxes(member, part, VALUES, self._held[part][VALUES]):
                apart.copy_(inside)
        for axis in reversed([*self.strides]):
            leaving, arriving = self._messages(axis, back=True)
            jobs.append((axis, partial(pass_on, arriving, leaving, self.groups[axis], reduced=False)))
        self._put_back()
        self._known.update(self._moving)
        down = [(m.param.local, self._here[m][VALUES]) for m in self._moving if m.param.local.device != self.device]
        if jobs and down:
            jobs.append((jobs[-1][0], partial(_copy, down)))
        else:
            _copy(down)
        self._held, self._landing, self._moving, self._here = {}, [], [], {}
        return jobs

    def _show_wholes(self) -> None:
        """Gives memory to tensors that are owned here (the slice's own, if it is the whole tensor). Tensors of one
        stack lie side by side."""
        by_whole = {m.whole: m for m in self.members if m.whole is not None}
        own = [by_whole[whole] for stack in self.stacking.stacks(self.optimizer) for whole in stack]
        if not self.values:
            like = torch.empty(0, device=self.device)
            self.values = _together([(m.numel, like.to(m.param.local.dtype)) for m in own if not m.lies_here])
        moving = [member for member in own if member in self._here]
        grads = [self._here[member][GRADIENT] for member in moving]
        apart = [(m.numel, grad) for m, grad in zip(moving, grads, strict=True) if not m.lies_here]
        rooms, values = iter(_together(apart)), iter(self.values)
        self.room_bytes += sum(numel * grad.itemsize for numel, grad in apart)
        for member in own:
            assert member.whole is not None
            here = self._values_of(member) if member.lies_here else next(values)
            member.whole.data = here.view(member.shape)
        for member, grad in zip(moving, grads, strict=True):
            assert member.whole is not None
            here = grad.contiguous() if member.lies_here else next(rooms)
            if here.dtype != member.whole.dtype:
                member.whole.grad_dtype = here.dtype
            member.whole.grad = here.view(member.whole.shape)

    def _values_of(self, member: Member) -> Tensor:
        """The values of this rank's slice, on `device`."""
        return self._here[member][VALUES] if member in self._here else member.param.local.to(self.device)

    def _make_room(self, member: Member) -> None:
        """Makes room for the parts of a tensor: where it is owned, where they start, and where they pass through. A
        part that lies here but is not a range of its tensor is copied in with the arriving ones."""
        grad, local = self._here[member][GRADIENT].contiguous(), self._here[member][VALUES]
        for part in member.parts:
            if self.rank == part.owner and part.region is not None:
                kinds = self._kinds(member) if part.hops else (GRADIENT, VALUES)
                self._landing += [(member, part, kind) for kind in kinds]
            if self.rank == part.owner and part.region is None:
                whole = member.whole
                assert whole is not None and whole.grad is not None
                own = whole.grad.view(-1)[part.start : part.stop], whole.data.view(-1)[part.start : part.stop]
                self._held[part] = own
                if self.rank == part.home and not member.lies_here:
                    own[GRADIENT].copy_(grad)
                    own[VALUES].copy_(local)
            elif self.rank == part.home:
                self._held[part] = grad, local
            elif self.rank in part.passed_by:
                self._held[part] = grad.new_empty(part.numel), local.new_empty(part.numel)
                self.room_bytes += sum(tensor.nbytes for tensor in self._held[part])

    def _messages(self, axis: str, *, back: bool) -> tuple[list[Message], list[Message]]:
        """Returns the messages that arrive and leave over one axis, as seen on the way to the owners. That way carries
        each part's gradient, with its values if the owner's are out of date. The way back carries values."""
        arriving, leaving = list[Message](), list[Message]()
        for member in self._moving:
            kinds = (VALUES,) if back else self._kinds(member)
            for part in member.parts:
                for hop in (hop for hop in part.hops if hop.axis == axis):
                    if self.rank == hop.source:
                        leaving += [(self._held[part][kind], self._index(hop, hop.target)) for kind in kinds]
                    elif self.rank == hop.target:
                        arriving += [(self._held[part][kind], self._index(hop, hop.source)) for kind in kinds]
        return arriving, leaving

    def _kinds(self, member: Member) -> tuple[int, ...]:
        """The kinds that are sent to a tensor's owner."""
        return (GRADIENT,) if member in self._known else (GRADIENT, VALUES)

    def _index(self, hop: Hop, rank: int) -> int:
        stride, size = self.strides[hop.axis]
        return rank // stride % size

    def _put_back(self) -> None:
        """Writes the parts that stay on this rank. Bumps versions so that autograd and views notice the change."""
        for member in self._moving:
            local = self._here[member][VALUES]
            for part in member.parts:
                if self.rank == part.owner == part.home and part.region is None and not member.lies_here:
                    local.copy_(self._held[part][VALUES])
            torch.autograd.graph.increment_version(member.param.local)
            if member.whole is not None:
                member.whole.grad = None


class WholeSteps:
    """Steps on buckets of one engine, for all of its optimizers in turn. It is a `schedule.bucket.BucketBackend` on the
    engine's lanes, which are idle meanwhile. Messages to owners use the lanes of reductions, messages from them those
    of gathers; each lane has its axis's communicator."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend, self._steps = backend, BucketSteps[OwnedBucket, Ticket]()

    def step(self, buckets: Sequence[OwnedBucket]) -> None:
        self._steps.step(self, buckets)

    def settle(self) -> None:
        """Waits for the messages of a step that raised."""
        self._steps.settle(self)

    def wait(self, ticket: Ticket) -> None:
        self._backend.wait(ticket)

    def collect(self, bucket: OwnedBucket) -> Ticket | None:
        return self._along(bucket.collect(), "reduce", "collect whole tensors")

    def update(self, bucket: OwnedBucket) -> Ticket | None:
        for unit in self._backend.units:
            unit.take_fresh()  # masters change, so compute copies are out of date
        bucket.step()
        return self._along(bucket.give_back(), "gather", "give back whole tensors")

    def _along(self, jobs: Sequence[AxisJob], direction: Direction, label: str) -> Ticket | None:
        ticket = None
        for axis, job in jobs:
            lane = self._backend.lanes[self._backend.names.lane(direction, axis)]
            ticket = lane.submit(job, label, after=ticket)
        return ticket


def _boxes(member: Member, part: Part, kind: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for a part owned here that is not a range of its tensor, each box's place inside the tensor and in
    `flat`, where its elements are contiguous."""
    assert part.region is not None and member.whole is not None
    tensor = member.whole.grad if kind == GRADIENT else member.whole.data
    assert tensor is not None
    for box in part.region.boxes(part.start, part.stop):
        first = box.start - part.start
        yield tensor[box.index], flat[first : first + box.numel].view(box.sizes)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _together(wanted: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """Allocates memory for each (elements, tensor whose dtype and device to use); contiguous if all have one dtype."""
    if len({like.dtype for _, like in wanted}) != 1:
        return [like.new_empty(numel) for numel, like in wanted]
    sizes = [numel for numel, _ in wanted]
    return [*torch.split(wanted[0][1].new_empty(sum(sizes)), sizes)]


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
