"""Muon on the matrices of a model's blocks, each on its owner, as `zm.by_owner(torch.optim.Muon, ...)` steps them; what
is left has AdamW on slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeromesh.cost.compute import ComputeModel
from zeromesh.model import UnitKind, UnitSpec
from zeromesh.pieces.owners import BUCKET_BYTES, Owners, Placement, choose_owners, cut, newton_schulz_flops
from zeromesh.pieces.passage import Part, passage
from zeromesh.schedule import ITEM_BYTES, Bucket, Schedule, Shipment


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrices:
    """What Muon steps on.

    Args:
        tensors: all of them.
        owners: who has which.
        buckets: in which they are stepped.
    """

    tensors: tuple[Placement, ...]
    owners: Owners
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, schedule: Schedule, specs: Sequence[Sequence[UnitSpec]], compute: ComputeModel) -> OwnedMatrices:
        """Of the model whose units are `specs`, with the same functions that the engine chooses and cuts by."""
        tensors = tuple(_matrices(schedule, specs))
        costs = [newton_schulz_flops(tensor.shape) for tensor in tensors]
        owners = choose_owners(schedule.layout, tensors, costs)
        found = next((p.buffer for unit in schedule.placed for p in unit if p.buffer.trainable), None)
        dtypes = (found.grad_dtype, found.master_dtype or found.param_dtype) if found else ("fp32", "fp32")
        most = BUCKET_BYTES // sum(ITEM_BYTES[dtype] for dtype in dtypes)
        parts = _by_tensor(passage(schedule.layout, tensors, owners.rank_of), len(tensors))
        buckets = tuple(
            _bucket(
                schedule,
                [p for index in indices for p in parts[index]],
                dtypes,
                _step_s(compute, [(owners.rank_of[index], costs[index], tensors[index].numel) for index in indices]),
            )
            for indices in cut(tensors, owners, costs, most)
        )
        return cls(tensors=tensors, owners=owners, buckets=buckets)

    @property
    def numel(self) -> int:
        """Elements of all matrices."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def most_numel(self) -> int:
        """Elements that the rank with the most of them owns, with one momentum for each."""
        held: Counter[int] = Counter()
        for tensor, rank in zip(self.tensors, self.owners.rank_of, strict=True):
            held[rank] += tensor.numel
        return max(held.values(), default=0)


def _matrices(schedule: Schedule, specs: Sequence[Sequence[UnitSpec]]) -> Iterator[Placement]:
    for placed, held in zip(schedule.placed, specs, strict=True):
        padded = next((p.padded for p in placed if p.buffer.trainable), 0)
        start = 0
        for spec in held:
            for tensor in spec.tensors:
                if not tensor.trainable:
                    continue
                if spec.kind is UnitKind.BLOCK and len(tensor.shape) == 2:
                    yield Placement(name=tensor.name, shape=tensor.shape, start=start, padded=padded)
                start += tensor.num_elements


def _by_tensor(parts: Sequence[Part], count: int) -> list[list[Part]]:
    found: list[list[Part]] = [[] for _ in range(count)]
    for part in parts:
        found[part.tensor].append(part)
    return found


def _bucket(schedule: Schedule, parts: Sequence[Part], dtypes: tuple[str, str], step_s: float) -> Bucket:
    """With what an average rank sends."""
    layout = schedule.layout
    ranks = layout.degree(layout.significant)
    moved: Counter[str] = Counter()
    for part in parts:
        for hop in part.hops:
            moved[hop.axis] += part.numel
    there = tuple(
        Shipment(axis=axis, numel=-(-moved[axis.name] // ranks), wire=wire)
        for axis in reversed(layout.axes)
        if moved[axis.name]
        for wire in dtypes
    )
    back = tuple(each for each in reversed(there[1::2]))
    return Bucket(there=there, back=back, step_s=step_s)


def _step_s(compute: ComputeModel, owned: Sequence[tuple[int, float, int]]) -> float:
    """Of the rank with the most to do: Newton-Schulz at the rate of matrix products, and a pass over what it owns.

    Args:
        owned: rank, operations and elements of each tensor.
    """
    seconds: Counter[int] = Counter()
    rate = compute.matrix_flops * compute.constants.matmul_share
    for rank, flops, numel in owned:
        seconds[rank] += flops / rate + compute.optimizer(numel)  # type: ignore[assignment]  # a counter of seconds
    return max(seconds.values(), default=0.0)
