"""Small models and clusters that planner tests share."""

from __future__ import annotations

from dataclasses import replace

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.model.shape import TransformerShape
from zeromesh.model.spec import ModelSpec, UnitKind, UnitSpec
from zeromesh.model.transformer import build


def small_model(layers: int = 4, hidden: int = 512, *, tied: bool = False) -> ModelSpec:
    """A Llama of a few blocks."""
    return build(
        TransformerShape(
            name="small", family="llama", hidden=hidden, layers=layers, heads=8, ffn=3 * hidden, vocab=2048, tied=tied
        )
    )


def mixed_model() -> ModelSpec:
    """Small blocks, then larger ones, as where dense layers come before those of experts."""
    small, wide = small_model(3, 256), small_model(6, 1024)
    blocks = [unit for model in (small, wide) for unit in model.units if unit.kind is UnitKind.BLOCK]
    first = next(index for index, unit in enumerate(wide.units) if unit.kind is UnitKind.BLOCK)
    units = [unit for unit in wide.units if unit.kind is not UnitKind.BLOCK]
    renamed = [replace(unit, name=f"blocks.{index}.0") for index, unit in enumerate(blocks)]
    return replace(wide, name="mixed", units=(*units[:first], *renamed, *units[first:]))


def model_of_root() -> ModelSpec:
    """Whose root, positions that are learned, is larger than a block."""
    return build(
        TransformerShape(
            name="positions", family="gpt2", hidden=256, layers=2, heads=8, ffn=1024, vocab=2048, max_positions=32768
        )
    )


def frozen(unit: UnitSpec) -> UnitSpec:
    """The same with nothing that trains."""
    tensors = tuple(replace(tensor, trainable=False) for tensor in unit.tensors)
    return replace(unit, tensors=tensors, matmuls=tuple(replace(m, trainable_share=0.0) for m in unit.matmuls))


def frozen_first_model() -> ModelSpec:
    """A model whose embedding and first four of six blocks are frozen."""
    model = small_model(6)
    units = []
    for unit in model.units:
        if unit.kind is UnitKind.EMBEDDING:
            units.append(frozen(unit))
        elif unit.kind is UnitKind.BLOCK:
            first, *_, index = unit.name.rpartition(".")
            units += [replace(frozen(unit), count=4), replace(unit, name=f"{first}.{int(index) + 4}", count=2)]
        else:
            units.append(unit)
    return replace(model, name="frozen first", units=tuple(units))


def rootless_model() -> ModelSpec:
    """Blocks alone."""
    model = small_model()
    return replace(model, units=tuple(unit for unit in model.units if unit.kind is UnitKind.BLOCK))


def small_cluster(*sizes: int, memory_bytes: float = 8e9, outer_bytes_per_s: float = 12e9) -> Cluster:
    """Levels of the given sizes, innermost first, each four times slower than the one inside it."""
    names = ("node", "rack", "cluster")
    levels = [
        Level(
            name=names[index] if len(sizes) == 3 else ("node", "cluster")[index],
            size=size,
            bandwidth_bytes_per_s=outer_bytes_per_s * 4 ** (len(sizes) - 1 - index),
            latency_s=5e-6 * (index + 1),
            kind="nvlink" if index == 0 else "infiniband",
        )
        for index, size in enumerate(sizes)
    ]
    device = Device(name="small", memory_bytes=memory_bytes, peak_flops={"bf16": 50e12}, memory_bytes_per_s=1e12)
    return Cluster(name="small", device=device, levels=tuple(levels))
