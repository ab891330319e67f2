"""Traces of a step's events, written by the simulator on its virtual clock and by the engine on real devices.

Both write the same events, so "predicted against measured" is a comparison of two traces. Perfetto and chrome://tracing
open the result of `Trace.to_chrome`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any, Literal, TypeVar

from zeromesh.errors import short_repr

Kind = Literal["compute", "communicate", "wait"]


LineT = TypeVar("LineT", "MemoryLine", "TrafficLine")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One kind of model state on one rank, in bytes; `place` is "device" or "host"."""

    kind: str
    predicted_bytes: int
    allocated_bytes: int
    place: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLine:
    """One axis of a layout: bytes that one rank sends on it in a step, and in how many collectives. An axis that
    tensors are divided over before they are sharded has a line if owners need them whole; its stage is `divided`. The
    axis `host` is the link to the host's memory, with a line for each `direction`, "up" and "down"."""

    axis: str
    size: int
    stage: str
    predicted_bytes: int
    sent_bytes: int
    collectives: int
    direction: str = ""

    @property
    def label(self) -> str:
        """The axis, and the direction where there are two."""
        return f"{self.axis} {self.direction}".rstrip()


class Lines(list[LineT]):
    """Lines of a report, shown as a table."""

    def _rows(self) -> list[list[str]]:
        """Heads, then a row for each line; columns that are empty in all lines are left out."""
        names = [each.name for each in fields(self[0])] if self else []
        shown = [name for name in names if any(getattr(line, name) != "" for line in self)]
        rows: list[list[Any]] = [[getattr(line, name) for name in shown] for line in self]
        heads = [name.replace("_", " ") for name in shown]
        return [heads, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def _repr_html_(self) -> str:
        heads, *rows = (map(escape, row) for row in self._rows())
        body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
        return f"<table><tr><th>{'</th><th>'.join(heads)}</th></tr>{body}</table>"


GATHER_BACK = "reduce all_gather"
"""Name of the transfers that gather a sum which was scattered."""


def row_of(kind: str, name: str, axis: str) -> str:
    """The row of the timeline for a transfer of a kind; those that gather sums run beside the reductions."""
    return f"{'gather' if name == GATHER_BACK else kind}/{axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One interval on one resource; times are since the step began."""

    name: str  # "forward", "backward", "recompute", "optimizer", or the collective's name
    kind: Kind  # "wait": the device stands still for a communication
    resource: str  # row of the timeline: "compute", or "<kind of transfer>/<axis>" for communication
    start_s: float
    end_s: float
    unit: str | None = None  # its name, "" for the root; None where an event belongs to no unit
    micro_batch: int = -1  # index in the step, -1 outside micro-batches
    axis: str | None = None  # over which the communication ran
    sent_bytes: float = 0.0  # by one rank

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one step of one rank."""

    label: str  # whose step: strategy, engine, machine
    events: tuple[Event, ...]  # in the order in which they were recorded
    memory: tuple[tuple[float, float], ...] = field(default=())  # (seconds, bytes in use), at every change, in order

    __repr__ = short_repr

    @property
    def step_s(self) -> float:
        """End of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    def seconds(self, **fields: Any) -> float:
        """Summed seconds of the events whose fields have the given values.

        >>> Trace(label="", events=()).seconds(kind="wait", axis="node")
        0.0
        """
        return sum((event.seconds for event in self._where(fields)), 0.0)

    def sent_bytes(self, **fields: Any) -> float:
        """Summed bytes of the communications whose fields have the given values."""
        return sum(event.sent_bytes for event in self._where(fields | {"kind": "communicate"}))

    def _where(self, fields: dict[str, Any]) -> Iterable[Event]:
        return (event for event in self.events if all(getattr(event, k) == v for k, v in fields.items()))

    def to_chrome(self) -> dict[str, Any]:
        """The trace in the Trace Event Format: one process, one thread per resource, a counter for memory."""
        rows = {name: i for i, name in enumerate(dict.fromkeys(e.resource for e in self.events))}
        names = [_metadata("process_name", 0, self.label)] + [_metadata("thread_name", i, n) for n, i in rows.items()]
        counters = [
            {"name": "memory", "ph": "C", "pid": 0, "ts": at * 1e6, "args": {"bytes": size}} for at, size in self.memory
        ]
        slices = [_slice(event, rows[event.resource]) for event in self.events]
        return {"traceEvents": [*names, *slices, *counters], "displayTimeUnit": "ms"}

    def to_json(self) -> str:
        return json.dumps(self.to_chrome())


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": {"name": value}}


def _slice(event: Event, thread: int) -> dict[str, Any]:
    details = {"unit": event.unit, "micro_batch": event.micro_batch, "axis": event.axis, "bytes": event.sent_bytes}
    return {
        "name": event.name if event.unit is None else f"{event.name} {event.unit or 'root'}",
        "cat": event.kind,
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "ts": event.start_s * 1e6,
        "dur": event.seconds * 1e6,
        "args": {key: value for key, value in details.items() if value is not None},
    }
