"""Failures on any of the rehearsed ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.rehearsal.result import Call, Rehearsal
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
        place = differing(first.calls, other.calls)
        if place is not None:
            every = (first.calls, other.calls)
            here, there = (str(calls[place]) if place < len(calls) else "none" for calls in every)
            found.append(
                f"ranks {first.rank} and {other.rank} issue different collectives, of which each would wait for the "
                f"other: as number {place + 1} of a step {here} on rank {first.rank}, {there} on rank {other.rank}"
            )
    return found


def differing(first: Sequence[Call], other: Sequence[Call]) -> int | None:
    """Where two ranks' collectives part; None where they are the same."""
    for index, (one, two) in enumerate(zip(first, other, strict=False)):
        if one != two:
            return index
    return None if len(first) == len(other) else min(len(first), len(other))
