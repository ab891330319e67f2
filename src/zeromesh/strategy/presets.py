"""Well-known systems, each one line in the notation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeromesh.errors import NotationError, nearest

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


def _uniform(stage: str) -> Callable[[Sequence[str]], tuple[str, ...]]:
    return lambda axes: (stage,) * len(axes)


def _two_level(inner: str, outer: str) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """`outer` on the slowest axis, `inner` on all inside it."""
    return lambda axes: (inner,) * (len(axes) - 1) + (outer,)


# Sources: DDP, ZeRO (1910.02054), HSDP = MiCS (2205.00119) = PaRO III, HFSDP (Megatron-FSDP) = pytorch#148257,
# ZeRO++ (2306.10209), Frontier (2501.04266, layout assumed).
_SYSTEMS: dict[str, tuple[int, Callable[[Sequence[str]], tuple[str, ...]]]] = {
    "ddp": (1, _uniform("0")),
    "zero1": (1, _uniform("1")),
    "zero2": (1, _uniform("2")),
    "zero3": (1, _uniform("3")),
    "fsdp": (1, _uniform("3")),
    "hsdp": (2, _two_level("3", "0")),
    "mics": (2, _two_level("3", "0")),
    "hfsdp": (2, _two_level("3", "1")),
    "hpz": (2, _two_level("3", "3k")),
    "zero++": (2, _two_level("3@int8/int4", "3k@int8/int4")),
    "frontier": (3, lambda axes: ("3@int8/", *("2@/int4",) * (len(axes) - 2), "1")),
} | {f"paro:{name}": (2, _two_level(*stages)) for name, stages in PARO.items()}

PRESETS = tuple(_SYSTEMS)


def preset_axes(name: str, axes: Sequence[str] | None) -> str:
    """The notation of preset `name` on the given axes.

    Args:
        name: a key of `PRESETS`, in any case.
        axes: axis names, innermost first. On more than two axes, "inside the node" is all but the outermost.

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
    levels, stages = _SYSTEMS[known[name.lower()]]
    if len(axes) < levels:
        raise NotationError(f"preset {name} has {levels} levels, the mesh has {len(axes)}: {', '.join(axes)}")
    return ",".join(f"{axis}={stage}" for axis, stage in zip(axes, stages(axes), strict=True))
