"""A model's units as the schedule wants them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zeromesh.model import ModelSpec, UnitKind, UnitSpec
from zeromesh.schedule import FlatBuffer, Role, Unit, join_units
from zeromesh.simulator.division import EXPERTS, NOTHING
from zeromesh.simulator.workload import FixedWorkload


def schedule_units(
    model: ModelSpec, workload: FixedWorkload, bucket_bytes: int = 0
) -> tuple[tuple[Unit, ...], tuple[tuple[UnitSpec, ...], ...]]:
    """The units that the engine would cut `model` into, root first, each with the description of what it holds: one
    unit of the model, or several neighbours, joined up to `bucket_bytes`. The root is there also where it holds
    nothing: it is what is open for the whole of a step."""
    pairs = sorted(_pairs(model, workload), key=lambda pair: pair[1].kind is not UnitKind.ROOT)
    if pairs[0][1].kind is not UnitKind.ROOT:
        pairs.insert(0, (Unit(name="", role=Role.RESIDENT, buffers=()), NOTHING))
    units, specs = [unit for unit, _ in pairs], [spec for _, spec in pairs]
    joined, groups = join_units(units, bucket_bytes)
    return tuple(joined), tuple(tuple(specs[index] for index in group) for group in groups)


def _pairs(model: ModelSpec, workload: FixedWorkload) -> Iterator[tuple[Unit, UnitSpec]]:
    for spec in model.units:
        role = Role.BLOCK if spec.kind is UnitKind.BLOCK else Role.RESIDENT
        buffers = _buffers(spec, workload)
        for index in range(spec.count):
            name = f"{spec.name.removesuffix('.0')}.{index}" if spec.count > 1 else spec.name
            yield Unit(name=name, role=role, buffers=buffers), spec


def _buffers(spec: UnitSpec, workload: FixedWorkload) -> tuple[FlatBuffer, ...]:
    reduce = workload.reduce_dtype or workload.param_dtype
    sizes: Counter[tuple[str, bool]] = Counter()
    for tensor in spec.tensors:
        sizes[EXPERTS if tensor.ep > 1 else "", tensor.trainable] += tensor.num_elements
    return tuple(
        FlatBuffer(
            numel=sizes[part, trainable],
            param_dtype=workload.param_dtype,
            master_dtype=workload.master_dtype if trainable else None,
            grad_dtype=workload.grad_dtype,
            reduce_dtype=reduce,
            part=part,
        )
        for part in ("", EXPERTS)
        for trainable in (True, False)
        if sizes[part, trainable]
    )
