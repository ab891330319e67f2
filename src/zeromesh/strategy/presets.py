"""Well-known systems, each a line of the notation. Only a preset's name loads this."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.errors import NotationError, nearest
from zeromesh.strategy.stage import HOST

# PaRO (arXiv 2310.06003) names p, g, os each N (not sharded), I (inside the node) or G (global); (node, cluster).
PARO: dict[str, tuple[str, str]] = {
    "NNN": ("0", "0"),
    "NNI": ("1", "0"),
    "NII": ("2", "0"),
    "INI": ("3d", "0"),
    "III": ("3", "0"),
    "NNG": ("1", "1"),
    "NIG": ("2", "1"),
    "NGG": ("2", "2"),
    "ING": ("3d", "1"),
    "IIG": ("3", "1"),
    "IGG": ("3", "2"),
    "GNG": ("3d", "3d"),
    "GIG": ("3", "3d"),
    "GGG": ("3", "3"),
}


# Sources: DDP, ZeRO (1910.02054), HSDP = MiCS (2205.00119) = PaRO III, HFSDP (Megatron-FSDP) = pytorch#148257,
# ZeRO++ (2306.10209), Frontier (2501.04266, layout assumed), FCDP (2602.06499), ZeRO-Offload (2101.06840); FSDP2's
# CPUOffloadPolicy.
_SYSTEMS: dict[str, tuple[str, ...]] = {
    "ddp": ("0",),
    "zero1": ("1",),
    "zero2": ("2",),
    "zero3": ("3",),
    "fsdp": ("3",),
    "hsdp": ("3", "0"),
    "mics": ("3", "0"),
    "hfsdp": ("3", "1"),
    "hpz": ("3", "3k"),
    "zero++": ("3@int8/int4", "3k@int8/int4"),
    "frontier": ("3@int8/", "2@/int4", "1"),
    "fcdp": ("3", "3h"),
    "zero-offload": ("host=2", "2"),
    "cpu-offload": ("host=3", "3"),
} | {f"paro:{name}": stages for name, stages in PARO.items()}
"""Stages by level, innermost first, behind the host's if it has one. Where a mesh has more axes than a preset has
levels, the one before the outermost stands for several: "inside the node" is all but the outermost axis."""

PRESETS = tuple(_SYSTEMS)


def preset_axes(name: str, axes: Sequence[str] | None) -> str:
    """The notation of preset `name` (in upper or lower case) on axes of these names, innermost first.

    Raises:
        NotationError: unknown name, no axes, or fewer axes than the preset has levels.
    """
    known = {key.lower(): key for key in PRESETS}
    if name.lower() not in known:
        raise NotationError(
            f"a strategy is axis=stage terms, as in node=3,cluster=1, or a preset; got {name!r}: "
            f"{nearest(name.lower(), known)}"
        )
    if axes is None:
        raise NotationError(f"preset {name} needs the names of the mesh's axes; give them, or write axis=stage terms")
    stages = _SYSTEMS[known[name.lower()]]
    host, stages = (stages[:1], stages[1:]) if stages[0].startswith(HOST) else ((), stages)
    if len(axes) < len(stages):
        raise NotationError(f"preset {name} has {len(stages)} levels, the mesh has {len(axes)}: {', '.join(axes)}")
    inner = max(0, len(stages) - 2)
    by_axis = stages[:inner] + stages[inner : inner + 1] * (1 + len(axes) - len(stages)) + stages[inner + 1 :]
    return ",".join([*host, *(f"{axis}={stage}" for axis, stage in zip(axes, by_axis, strict=True))])
