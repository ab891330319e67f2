"""Failures on any of the rehearsed ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from zeromesh.rehearsal.result import Rehearsal
from zeromesh.units import format_bytes


def failures_of(rehearsals: Sequence[Rehearsal]) -> tuple[str, ...]:
    """One line each, that of the first rank first."""
    several = len(rehearsals) > 1
    found = []
    for rehearsal in rehearsals:
        on = f"rank {rehearsal.rank}: " if several else ""
        found += [f"{on}{failure}" for failure in (*rehearsal.failures, *_memory(rehearsal))]
        found += [f"{on}race: {race}" for race in rehearsal.races]
        found += [f"{on}memory freed too early: {free}" for free in rehearsal.early_frees]
    return (*found, *_order(rehearsals))


def _memory(rehearsal: Rehearsal) -> list[str]:
    memory, fails = rehearsal.memory, rehearsal.memory.fails_at
    if fails is None or memory.limit_bytes is None:
        return []
    return [
        f"{rehearsal.strategy} does not fit: it needs {format_bytes(memory.needed_bytes)} of a device of "
        f"{rehearsal.cluster}, and {format_bytes(memory.limit_bytes)} are usable; it runs out in {fails.place}. "
        f"Recompute activations, take smaller micro-batches, or shard over more ranks (`zeromesh plan` finds what fits)"
    ]


def _order(rehearsals: Sequence[Rehearsal]) -> list[str]:
    first, found = rehearsals[0], []
    for other in rehearsals[1:]:
        pairs = enumerate(zip_longest(first.calls, other.calls), 1)
        apart = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
        if apart is not None:
            number, here, there = apart
            found.append(
                f"ranks {first.rank} and {other.rank} issue different collectives, of which each would wait for the "
                f"other: as number {number} of a step {here or 'none'} on rank {first.rank}, {there or 'none'} on rank "
                f"{other.rank}"
            )
    return found
