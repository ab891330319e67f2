"""The contents of a page as data; only `templates/page.html.j2` turns it into HTML.

Positions are percentages of the chart that they belong to, so the template only has to place them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

from jinja2 import Environment, PackageLoader, StrictUndefined

from zeromesh.units import format_bytes

_BATCHES = "sequences of one forward and backward on a device, x how often a step does both"
_RECOMPUTED = "activations that the backward computes again instead of keeping: none, selective (cheap ones) or full"
TERMS = {
    "strategy": "the stage of each level, the innermost first: 0 shards nothing, 1 optimizer states, 2 also gradients, "
    "3 also parameters; d reduces once a step, k keeps gathered parameters for the backward",
    "MFU": "model FLOPs utilisation: the model's operations a second over the device's peak",
    "micro-batch": _BATCHES,
    "sequences x micro-batches": _BATCHES,
    "recompute": _RECOMPUTED,
    "recomputation": _RECOMPUTED,
    "exposed": "time in which the device stands still for it",
    "params": "parameters, or the shard of them that a device holds",
    "grads": "the shard of gradients that are accumulated",
    "optimizer": "states and fp32 masters of the optimizer's shard",
    "buffers": "room for gathered parameters and for gradients that wait to be reduced",
    "activations": "outputs that the forward keeps for the backward",
    "overhead": "the device's context and communicators",
    "stage": "0 shards nothing over this axis, 1 optimizer states, 2 also gradients, 3 also parameters",
    "axis": "a level of the machine, or a part of one: node[2] is 2 of a node",
    "reserved": "memory that torch's allocator has taken from the device",
}
"""Terms on the pages, with their explanations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A headline figure."""

    label: str
    value: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One part of a stacked bar, or an interval in a row of the timeline."""

    kind: str
    left: float
    width: float
    label: str
    value_bytes: float = 0.0  # for a bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The memory of one candidate."""

    label: str
    total_bytes: float
    total: str
    segments: tuple[Span, ...]

    @classmethod
    def of(cls, label: str, held: Mapping[str, float], most: float) -> Self:
        """Makes a bar of memory by kind, in a chart whose width is `most` bytes."""
        left, segments = 0.0, []
        for kind, size in held.items():
            width = 100 * size / most
            text = f"{kind}: {format_bytes(size)}"
            segments.append(Span(kind=kind, left=left, width=width, label=text, value_bytes=size))
            left += width
        total = sum(held.values())
        return cls(label=label, total_bytes=total, total=format_bytes(total), segments=tuple(segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChart:
    """Stacked bars with the device's limit, if known."""

    kinds: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit: float | None = None
    limit_label: str = ""
    limit_bytes: float = 0.0
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate in a plot of time over memory."""

    x: float
    y: float
    label: str
    step_s: float
    memory_bytes: float
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontChart:
    """The memory-time front as a step function: less memory costs time."""

    points: tuple[Point, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over the course of a run."""

    name: str  # in the legend
    colour: str  # a class of the page's style
    line: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()  # outline of smallest and largest values, if a point stands for several


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveChart:
    """Curves over one axis, and spans across them with labels that tell the values."""

    key: str
    title: str
    curves: tuple[Curve, ...]
    spans: tuple[Span, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One resource of the timeline: compute, or a lane on an axis."""

    name: str
    busy: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step, resource by resource."""

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text. A row's key is its `data-key`."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with a title; `key` is its id."""

    key: str
    title: str
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One line on why a candidate lost."""

    name: str
    strategy: str
    outcome: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything on the page, from top to bottom."""

    title: str
    subtitle: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    memory: MemoryChart | None = None
    charts: tuple[CurveChart, ...] = ()
    front: FrontChart | None = None
    timeline: Timeline | None = None
    why: tuple[Remark, ...] = ()
    why_title: str = "Why the others lose"
    notes: tuple[str, ...] = ()

    def to_html(self) -> str:
        """Returns the self-contained page: no script, font, image or style from elsewhere."""
        return _environment().get_template("page.html.j2").render(page=self, terms=TERMS)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("zeromesh.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
