"""The strategies that people know by name, on a given mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.level import Level
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.strategy import AxisStage

_BY_PRESET = (
    ("ZeRO-1", "zero1", 1),
    ("ZeRO-2", "zero2", 1),
    ("ZeRO-3 / FSDP", "zero3", 1),
    ("HSDP", "hsdp", 2),
    ("HSDP, optimizer sharded globally", "hfsdp", 2),
    ("ZeRO++ hpZ", "hpz", 2),
    ("ZeRO++", "zero++", 2),
)


def known_strategies(cluster: Cluster) -> dict[str, Strategy]:
    """The known strategies that differ on this mesh, by name. Levels of one member do not count."""
    levels = [level for level in cluster.levels if level.size > 1]
    axes = [level.name for level in levels]
    found = {name: Strategy.parse(preset, axes) for name, preset, least in _BY_PRESET if len(axes) >= least}
    if len(levels) > 1:
        found |= _mics(levels)
    return {name: _with_others(strategy, cluster) for name, strategy in found.items()}


def _with_others(strategy: Strategy, cluster: Cluster) -> Strategy:
    """The strategy, completed with stage 0 for levels of one member."""
    parts = {name: [term for term in strategy.axes if term.name == name] for name, _ in cluster.axes}
    terms = [term for name, own in parts.items() for term in own or [AxisStage(name=name, stage=Stage.ZERO)]]
    return replace(strategy, axes=tuple(terms))


def _mics(levels: Sequence[Level]) -> dict[str, Strategy]:
    """MiCS (arXiv 2205.00119): everything is sharded over a group of whole nodes, here of 2, 4, 8, ... members of the
    outermost level. A group of one member is HSDP."""
    *inner, outer = levels
    sizes = [2**power for power in range(1, 12) if 2**power < outer.size and outer.size % 2**power == 0]
    inside = "".join(f"{level.name}=3," for level in inner)
    group = {size: f"{inside}{outer.name}[{size}]=3,{outer.name}[*]=0" for size in sizes}
    return {f"MiCS over {size}": Strategy.parse(strategy) for size, strategy in group.items()}
