"""Findings that a checker must have, and must not have, in every training."""

from __future__ import annotations

from pathlib import Path

import zeromesh as zm
from zeromesh import simdev

SOURCES = str(Path(zm.__file__).parent)


def require_clean(checker: simdev.Checker, what: str) -> None:
    """Nothing raced, nothing was freed early."""
    found = [*map(str, checker.races), *map(str, checker.early_frees)]
    assert not found, f"{what}: {len(found)} found, such as {found[:4]}"


def own_reads(checker: simdev.Checker) -> list[str]:
    """Where zeromesh's own code has read from the device: "file:line" from its package on."""
    return [read.where.removeprefix(f"{SOURCES}/") for read in checker.host_reads if read.where.startswith(SOURCES)]


def require_documented(checker: simdev.Checker, what: str, *, reads: int, besides: tuple[str, ...] = ()) -> None:
    """Clean, and so many reads, all of words that ranks exchange: docs/simdev.md lists two at `zm.shard`, one a step,
    and one for each number that is summed over ranks. `besides`: files that bring saved tensors to the host."""
    require_clean(checker, what)
    found = [read for read in own_reads(checker) if not read.startswith(besides)]
    ours = ("engine/control.py:", "engine/lifecycle.py:")  # the second, of a step whose words were not waited for
    assert len(found) == reads and all(read.startswith(ours) for read in found), (what, found)
