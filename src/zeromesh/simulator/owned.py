"""Whole tensors on their owners, as `zm.by_owner` steps on them: Muon's matrices of a model's blocks, and with
`ownership="owners"` whatever else AdamW would step on in slices, which is AMSP's own setting (arXiv 2311.00257)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from zeromesh.cost.compute import ComputeModel
from zeromesh.model import TensorSpec, UnitKind, UnitSpec
from zeromesh.pieces.owners import BUCKET_BYTES, Owners, Placement, choose_owners, cut, newton_schulz_flops
from zeromesh.pieces.passage import Part, passage, rooms_of
from zeromesh.schedule import ITEM_BYTES, Bucket, Schedule, Shipment, most_room
from zeromesh.simulator.memory import MOMENTS
from zeromesh.simulator.workload import FixedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensors:
    """What one optimizer steps on by owners.

    Args:
        tensors: all of them.
        owners: who has which.
        buckets: in which they are stepped.
        held_bytes: by rank of those that hold one copy of the states: its states, and the values that it keeps.
        room_bytes: by the same: what comes to it in a step and goes with it, at its most.
    """

    tensors: tuple[Placement, ...]
    owners: Owners
    buckets: tuple[Bucket, ...]
    held_bytes: tuple[float, ...]
    room_bytes: tuple[float, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)


def owned_tensors(
    schedule: Schedule, specs: Sequence[Sequence[UnitSpec]], compute: ComputeModel, workload: FixedWorkload
) -> tuple[OwnedTensors, ...]:
    """Of the model whose units are `specs`, with the same functions that the engine chooses and cuts by."""
    muon, found = workload.optimizer == "muon", list[OwnedTensors]()
    rate = compute.matrix_flops * compute.constants.matmul_share
    if muon:
        found.append(
            _owned(
                schedule,
                [*_placements(schedule, specs, is_matrix)],
                cost=newton_schulz_flops,
                # Newton-Schulz at the rate of matrix products, and a pass over what is owned.
                seconds=lambda flops, numel: flops / rate + compute.optimizer(numel),
                state_bytes=ITEM_BYTES[workload.grad_dtype],
            )
        )
    if workload.ownership == "owners":
        found.append(
            _owned(
                schedule,
                [*_placements(schedule, specs, lambda unit, tensor: not (muon and is_matrix(unit, tensor)))],
                cost=lambda shape: float(prod(shape)),
                seconds=lambda _, numel: compute.optimizer(numel),
                state_bytes=MOMENTS * ITEM_BYTES[workload.master_dtype],
            )
        )
    return tuple(found)


def is_matrix(unit: UnitSpec, tensor: TensorSpec) -> bool:
    """Whether Muon is for it: a trained one of a block."""
    return tensor.trainable and unit.kind is UnitKind.BLOCK and len(tensor.shape) == 2


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
                if wanted(spec, tensor):
                    yield Placement(name=tensor.name, shape=tensor.shape, start=start, padded=padded)
                start += tensor.num_elements


def _owned(
    schedule: Schedule,
    tensors: Sequence[Placement],
    *,
    cost: Callable[[Sequence[int]], float],
    seconds: Callable[[float, int], float],
    state_bytes: int,
) -> OwnedTensors:
    """Of one optimizer.

    Args:
        cost: of a tensor of a shape, which owners are balanced by.
        seconds: of stepping on a tensor of so much cost, and so many elements.
        state_bytes: that the optimizer keeps for each element.
    """
    layout = schedule.layout
    costs = [cost(tensor.shape) for tensor in tensors]
    owners = choose_owners(layout, tensors, costs)
    found = next((p.buffer for unit in schedule.placed for p in unit if p.buffer.trainable), None)
    dtypes = (found.grad_dtype, found.master_dtype or found.param_dtype) if found else ("fp32", "fp32")
    most = BUCKET_BYTES // sum(ITEM_BYTES[dtype] for dtype in dtypes)
    parts: list[list[Part]] = [[] for _ in tensors]
    for part in passage(layout, tensors, owners.rank_of):
        parts[part.tensor].append(part)
    buckets, rooms = list[Bucket](), list[Counter[int]]()
    for indices in cut(tensors, owners, costs, most):
        busy: Counter[int] = Counter()
        for index in indices:
            busy[owners.rank_of[index]] += seconds(costs[index], tensors[index].numel)  # type: ignore[assignment]  # a counter of seconds
        together = [part for index in indices for part in parts[index]]
        buckets.append(_bucket(schedule, together, dtypes, max(busy.values(), default=0.0)))
        rooms.append(rooms_of(tensors, together, [dtypes] * len(tensors)))
    held = [0.0] * len(owners.loads)
    for tensor, rank, own in zip(tensors, owners.rank_of, parts, strict=True):
        lies_there = all(part.home == rank for part in own)
        held[rank] += tensor.numel * (state_bytes + (0 if lies_there else ITEM_BYTES[dtypes[1]]))
    return OwnedTensors(
        tensors=tuple(tensors),
        owners=owners,
        buckets=tuple(buckets),
        held_bytes=tuple(held),
        room_bytes=tuple(float(most_room([room[rank] for room in rooms])) for rank in range(len(held))),
    )


def _bucket(schedule: Schedule, parts: Sequence[Part], dtypes: tuple[str, str], step_s: float) -> Bucket:
    """With what an average rank sends."""
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
