"""Whole tensors on their owners: Muon's matrices in a model's blocks, and with `ownership="owners"` all others. AdamW
steps on these in slices otherwise; owners are AMSP's setting (arXiv 2311.00257).

[Note: Ways to owners] All engines share the functions by which `zm.by_owner` chooses owners and buckets. So who owns
which tensor, which values owners keep and how long the slowest takes is one description. How tensors get to their
owners and back depends on the engine (`Mechanics.owners`):

- exchange (ours): gradients are reduced to state shards, and parameters refreshed from these, as for slices. In
  between, parts go from shards to owners and back, bucket by bucket. Beside its shard, an owner keeps the values of
  tensors that are not whole there.
- broadcast (amsp): a rank's own tensors are its state shard. Sums of gradients go to all ranks with the same
  parameters, and they drop those that they do not own. Each owner broadcasts its updated parameters as the refresh.
  Everything that is trained has an owner. If parameters are sharded, each rank has only a part of a tensor, and each
  part has its own owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from zeromesh.cost.compute import ComputeModel
from zeromesh.errors import InputError
from zeromesh.model.spec import TensorSpec, UnitKind, UnitSpec
from zeromesh.pieces.owners import (
    BUCKET_BYTES,
    NEWTON_SCHULZ_STEPS,
    Owners,
    Placement,
    choose_owners,
    cut,
    newton_schulz_flops,
)
from zeromesh.pieces.passage import Part, passage, rooms_of
from zeromesh.schedule.bucket import Bucket, Shipment, most_room
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.simulator.mechanics import Mechanics
from zeromesh.simulator.memory import MOMENTS
from zeromesh.simulator.result import OwnersShare
from zeromesh.simulator.workload import FixedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensors:
    """The tensors that one optimizer steps on by owners.

    Owners are among the ranks that hold one copy of the states. With `broadcast`, they also have the same parameters.
    """

    optimizer: str
    tensors: tuple[Placement, ...]
    owners: Owners
    buckets: tuple[Bucket, ...]  # the buckets in which they are stepped on
    held_bytes: tuple[float, ...]  # by owner: its states, and the values that it keeps
    sliced_bytes: float  # the same for AdamW on slices of the same tensors
    room_bytes: tuple[float, ...]  # by owner: peak temporary memory of a step

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def share(self) -> OwnersShare:
        held, ranks = self.held_bytes, len(self.held_bytes)
        mean = sum(self.owners.loads) / ranks
        return OwnersShare(
            optimizer=self.optimizer,
            tensors=len(self.tensors),
            ranks=ranks,
            balance=self.owners.balance,
            bound=self.owners.bound / mean if mean else 1.0,
            fullest=held.index(max(held)),
            held_bytes=max(held),
            sliced_bytes=self.sliced_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stepping:
    """How one optimizer steps on a tensor."""

    optimizer: str
    wanted: Callable[[UnitSpec, TensorSpec], bool]  # whether it steps on the tensor
    cost: Callable[[Sequence[int]], float]  # by shape; owners are balanced by it
    seconds: Callable[[Sequence[int]], float]
    state_bytes: int  # per element


def by_owners(optimizer: str, ownership: str, mechanics: Mechanics) -> bool:
    """Whether any tensor is stepped on by owners."""
    return optimizer == "muon" or ownership == "owners" or mechanics.owners == "broadcast"


def owned_tensors(
    schedule: Schedule,
    specs: Sequence[Sequence[UnitSpec]],
    compute: ComputeModel,
    workload: FixedWorkload,
    mechanics: Mechanics,
) -> tuple[OwnedTensors, ...]:
    """Returns the owned tensors of the model with units `specs`, with the functions by which the engine chooses owners.
    Raises InputError if Muon's matrices would not be whole."""
    layout, broadcast = schedule.layout, mechanics.owners == "broadcast"
    muon, adamw = workload.optimizer == "muon", workload.ownership == "owners" or broadcast
    if muon and broadcast and layout.degree(layout.param_axes) > 1:
        raise InputError(
            f"engine {mechanics.name} has parts of tensors where parameters are sharded, and muon needs whole ones; "
            f"parameters are sharded over {', '.join(axis.name for axis in layout.param_axes)}: give a strategy of "
            f"stages 0, 1 and 2, or engine zeromesh"
        )
    found = []
    if muon:
        found.append(
            _Stepping(
                optimizer="muon",
                wanted=is_matrix,
                cost=newton_schulz_flops,
                # The second term is a pass over all owned elements.
                seconds=lambda shape: newton_schulz_s(compute, shape) + compute.optimizer(prod(shape)),
                state_bytes=ITEM_BYTES[workload.grad_dtype],
            )
        )
    if adamw:
        found.append(
            _Stepping(
                optimizer="adamw",
                wanted=lambda unit, tensor: not (muon and is_matrix(unit, tensor)),
                cost=lambda shape: float(prod(shape)),
                seconds=lambda shape: compute.optimizer(prod(shape)),
                state_bytes=MOMENTS * ITEM_BYTES[workload.master_dtype],
            )
        )
    placed = [(stepping, [*_placements(schedule, specs, stepping.wanted)]) for stepping in found]
    owned = _broadcast if broadcast else _exchanged
    return tuple(owned(schedule, tensors, stepping) for stepping, tensors in placed)


def is_matrix(unit: UnitSpec, tensor: TensorSpec) -> bool:
    """Whether Muon steps on it: a trained matrix of a block, or a stack of such with one for each expert."""
    matrices = len(tensor.shape) == 2 or (len(tensor.shape) == 3 and tensor.active_share < 1)
    return tensor.trainable and unit.kind is UnitKind.BLOCK and matrices


def newton_schulz_s(compute: ComputeModel, shape: Sequence[int]) -> float:
    """Seconds of the products that `newton_schulz_flops` counts, for each matrix of a batch."""
    m, n = sorted(shape[-2:])
    steps = prod(shape[:-2]) * NEWTON_SCHULZ_STEPS
    long, square = 2.0 * m * m * n, 2.0 * m**3
    once = compute.product(m, n, m, flops=long) + compute.product(m, m, n, flops=long)
    return steps * (once + compute.product(m, m, m, flops=square))


def _placements(
    schedule: Schedule, specs: Sequence[Sequence[UnitSpec]], wanted: Callable[[UnitSpec, TensorSpec], bool]
) -> Iterator[Placement]:
    for placed, held in zip(schedule.placed, specs, strict=True):
        padded = next((p.padded for p in placed if p.buffer.trainable), 0)
        start = 0
        for spec in held:
            for tensor in spec.tensors:
                if not tensor.trainable:
                    continue
                if wanted(spec, tensor) and tensor.ep == 1:  # experts that ep divides have their own layout
                    yield Placement(name=tensor.name, shape=tensor.shape, start=start, padded=padded)
                start += tensor.num_elements


def _exchanged(schedule: Schedule, tensors: Sequence[Placement], stepping: _Stepping) -> OwnedTensors:
    """Describes one optimizer whose parts come from state shards and go back there."""
    layout = schedule.layout
    costs = [stepping.cost(tensor.shape) for tensor in tensors]
    owners = choose_owners(layout, tensors, costs)
    dtypes = _dtypes(schedule)
    most = BUCKET_BYTES // sum(ITEM_BYTES[dtype] for dtype in dtypes)
    parts: list[list[Part]] = [[] for _ in tensors]
    for part in passage(layout, tensors, owners.rank_of):
        parts[part.tensor].append(part)
    buckets, rooms = list[Bucket](), list[Counter[int]]()
    for indices in cut(tensors, owners, costs, most):
        together = [part for index in indices for part in parts[index]]
        step_s = _slowest_s(tensors, owners, stepping, indices)
        buckets.append(_bucket(schedule, together, dtypes, step_s))
        rooms.append(rooms_of(tensors, together, [dtypes] * len(tensors)))
    held = [0.0] * len(owners.loads)
    for tensor, rank, own in zip(tensors, owners.rank_of, parts, strict=True):
        lies_there = all(part.home == rank for part in own)
        held[rank] += tensor.numel * (stepping.state_bytes + (0 if lies_there else ITEM_BYTES[dtypes[1]]))
    return OwnedTensors(
        optimizer=stepping.optimizer,
        tensors=tuple(tensors),
        owners=owners,
        buckets=tuple(buckets),
        held_bytes=tuple(held),
        sliced_bytes=sum(tensor.numel for tensor in tensors) * MOMENTS * ITEM_BYTES[dtypes[1]] / len(held),
        room_bytes=tuple(float(most_room([room[rank] for room in rooms])) for rank in range(len(held))),
    )


def _broadcast(schedule: Schedule, tensors: Sequence[Placement], stepping: _Stepping) -> OwnedTensors:
    """Describes one optimizer that gets whole sums, and whose tensors are the state shard. Nothing more moves for it,
    and masters lie with their states."""
    layout = schedule.layout
    copies = replace(layout, axes=tuple(axis for axis in layout.axes if not axis.stage.shards_params))
    params = layout.degree(layout.param_axes)
    costs = [stepping.cost(tensor.shape) for tensor in tensors]
    owners = choose_owners(copies, tensors, costs, anywhere=True)
    step_s = _slowest_s(tensors, owners, stepping, range(len(tensors))) / params
    width = ITEM_BYTES[_dtypes(schedule)[1]]
    master = width if schedule.memory.master_bytes else 0
    held = [0.0] * len(owners.loads)
    for tensor, rank in zip(tensors, owners.rank_of, strict=True):
        held[rank] += tensor.numel / params * (stepping.state_bytes + master)
    sliced = MOMENTS * width + master
    return OwnedTensors(
        optimizer=stepping.optimizer,
        tensors=tuple(tensors),
        owners=owners,
        buckets=(Bucket(there=(), back=(), step_s=step_s),),
        held_bytes=tuple(held),
        sliced_bytes=sum(tensor.numel for tensor in tensors) * sliced / params / len(held),
        room_bytes=(0.0,) * len(held),
    )


def _dtypes(schedule: Schedule) -> tuple[str, str]:
    """The dtypes of gradients and masters."""
    found = next((p.buffer for unit in schedule.placed for p in unit if p.buffer.trainable), None)
    return (found.grad_dtype, cast(str, found.master_dtype)) if found else ("fp32", "fp32")


def _slowest_s(tensors: Sequence[Placement], owners: Owners, stepping: _Stepping, indices: Iterable[int]) -> float:
    """Seconds of the owner with the most work on these tensors."""
    busy = [0.0] * len(owners.loads)
    for index in indices:
        busy[owners.rank_of[index]] += stepping.seconds(tensors[index].shape)
    return max(busy)


def _bucket(schedule: Schedule, parts: Sequence[Part], dtypes: tuple[str, str], step_s: float) -> Bucket:
    """Makes a bucket with the bytes that an average rank sends."""
    layout = schedule.layout
    ranks = layout.degree(layout.significant)
    moved: Counter[str] = Counter()
    for part in parts:
        for hop in part.hops:
            moved[hop.axis] += part.numel

    def sent(wire: str) -> list[Shipment]:
        axes = [axis for axis in layout.axes if moved[axis.name]]
        return [Shipment(axis=axis, numel=-(-moved[axis.name] // ranks), wire=wire) for axis in axes]

    grad, values = dtypes
    return Bucket(there=tuple(reversed(sent(grad))), back=tuple(sent(values)), step_s=step_s)
