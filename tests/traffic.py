"""Collectives of a trace, to hold a measured step against a predicted one."""

from __future__ import annotations

from collections import Counter

from zeromesh.trace import Trace


def communication(trace: Trace) -> tuple[Counter[tuple[str, str | None]], Counter[tuple[str, str | None]]]:
    """How many there are, and the bytes that they send, by name and axis."""
    counts, sent = Counter[tuple[str, str | None]](), Counter[tuple[str, str | None]]()
    for event in trace.events:
        if event.kind == "communicate":
            counts[event.name, event.axis] += 1
            sent[event.name, event.axis] += round(event.sent_bytes)
    return counts, sent
