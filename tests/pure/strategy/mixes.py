"""Every combination of stages, and the rules that say which are legal, written anew."""

from __future__ import annotations

import itertools

STAGES = ("0", "1", "2", "3", "3d")
KEPT = ("3k", "3dk")


def may_stand_together(stages: tuple[str, ...]) -> bool:
    """`2` with `3d` may not; a kept axis must be less significant than every parameter axis that is not kept."""
    if "2" in stages and any(stage.startswith("3d") for stage in stages):
        return False
    params = [s for s in stages if s in ("3", "3k")] + [s for s in stages if s in ("3d", "3dk")]
    kept = [stage.endswith("k") for stage in params]
    return kept == sorted(kept)


def mixes(axes: int, *, kept: bool = False) -> list[tuple[str, ...]]:
    """All legal stages of so many axes, innermost first."""
    stages = STAGES + KEPT if kept else STAGES
    return [mix for mix in itertools.product(stages, repeat=axes) if may_stand_together(mix)]


def illegal(axes: int) -> list[tuple[str, ...]]:
    return [mix for mix in itertools.product(STAGES + KEPT, repeat=axes) if not may_stand_together(mix)]


NAMES = ("node", "cluster", "region")


def notation(mix: tuple[str, ...]) -> str:
    """
    >>> notation(("3", "1"))
    'node=3,cluster=1'
    """
    return ",".join(f"{name}={stage}" for name, stage in zip(NAMES, mix, strict=False))
