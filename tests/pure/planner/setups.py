"""Small models and clusters that planner tests share."""

from __future__ import annotations

from zeromesh.cluster import Cluster, Device, Level
from zeromesh.model import ModelSpec
from zeromesh.model.shape import TransformerShape
from zeromesh.model.transformer import build


def small_model(layers: int = 4, hidden: int = 512, *, tied: bool = False) -> ModelSpec:
    """A Llama of a few blocks."""
    return build(
        TransformerShape(
            name="small",
            family="llama",
            hidden=hidden,
            layers=layers,
            heads=8,
            ffn=3 * hidden,
            vocab=2048,
            tied=tied,
        )
    )


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
    device = Device(
        name="small",
        memory_bytes=memory_bytes,
        peak_flops={"bf16": 50e12},
        memory_bytes_per_s=1e12,
    )
    return Cluster(name="small", device=device, levels=tuple(levels))
