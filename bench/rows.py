"""Compares measured with predicted steps, and finds each setting's fastest layout. Torch-free.

Predictions are made from the probe, never from the cells. A cell's `link_bytes` are the kernel's counts of bytes that
crossed each link of an emulated cluster, less the frames' headers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from operator import attrgetter
from typing import Any

from bench.cells import Found, by_round
from bench.matrix import Cell, Topology, by_setting
from zeromesh.cluster.cluster import Cluster
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import planned
from zeromesh.strategy import Layout
from zeromesh.units import format_bytes, format_seconds

CLOSE = 0.03
"""Layouts within 3 % of the fastest count as equally good."""

Rounds = Mapping[int, float]
"""Seconds of a step by the round's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell, measured and predicted. Seconds and bytes are those of one step; bytes by axis are the average rank's.

    `link_bytes` are the kernel's counts of bytes out of the average link of each level of an emulated cluster,
    outermost first, less the frames' headers; empty on loopback.
    """

    cell: Cell
    rounds: Rounds  # median step of each round; all cells of a setting share the numbers
    step_s: float  # this and the next two: medians of the measured steps
    exposed_s: float
    sent_bytes: Mapping[str, float]
    predicted_s: float
    predicted_exposed_s: float
    predicted_bytes: Mapping[str, float]
    link_bytes: tuple[float, ...]
    predicted_link_bytes: tuple[float, ...]

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.predicted_s / self.step_s - 1

    @property
    def spread(self) -> float:
        """The longest round divided by the shortest, less 1."""
        return max(self.rounds.values()) / min(self.rounds.values()) - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "spread": self.spread}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting (topology and batch) that was run with several strategies."""

    best: Row  # the fastest
    ratios: Mapping[Cell, tuple[float, float, float]]  # quartiles, over rounds, of others' times over the best's
    chosen: Row  # the layout that is predicted to be fastest

    @classmethod
    def of(cls, group: Sequence[Row]) -> Choice:
        best, chosen = (min(group, key=attrgetter(key)) for key in ("step_s", "predicted_s"))
        ratios = {row.cell: _quartiles(row.rounds, best.rounds) for row in group if row is not best}
        return cls(best=best, ratios=ratios, chosen=chosen)

    @property
    def right(self) -> bool:
        """Whether the chosen layout is the fastest, or within `CLOSE` of it."""
        return self.chosen is self.best or self.ratios[self.chosen.cell][1] <= 1 + CLOSE

    def to_json(self) -> dict[str, Any]:
        ratios = {other.strategy: ratio for other, ratio in self.ratios.items()}
        return self.best.cell.to_json() | {
            "predicted": self.chosen.cell.strategy,
            "right": self.right,
            "ratios": ratios,
        }

    def __str__(self) -> str:
        """Names the fastest layout, those that were as fast in a quarter of the rounds, and the result of the predicted
        one."""
        cell = self.best.cell
        near = [f"{other.strategy} {_shown(ratio)}" for other, ratio in self.ratios.items() if ratio[0] <= 1]
        line = f"{cell.topology} x{cell.batch.micro_batches} {cell.batch.dtype}: {cell.strategy} is fastest"
        line += f", or {', '.join(near)}" if near else ""
        if self.chosen is not self.best:
            chosen = self.chosen.cell
            line += f"; predicted {chosen.strategy}, {_shown(self.ratios[chosen])}"
        return line


def _quartiles(own: Rounds, best: Rounds) -> tuple[float, float, float]:
    ratios = [own[at] / best[at] for at in own]
    low, middle, high = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
    return low, middle, high


def make_rows(topology: str, found: Found) -> list[Row]:
    """Makes the rows of a topology from the findings of `cells.run_cells`, with predictions."""
    cluster = from_raw(found["probe"], Topology(text=topology).mesh, topology).cluster
    return [
        _row(Cell.from_json(one["cell"]), one["rounds"], cluster)
        for setting in found["settings"]
        for one in setting["cells"]
    ]


def _row(cell: Cell, rounds: Sequence[Found], cluster: Cluster) -> Row:
    topology, last = Topology(text=cell.topology), rounds[-1]
    layout = Layout.of(cell.strategy, topology.axes)
    simulated = planned(cell.strategy, cluster, cell.batch)
    sent = {axis.axis: axis.bytes_sent_per_device for axis in simulated.axes}
    counted = zip(*(one.get("link_bytes", ()) for one in rounds), strict=True)
    return Row(
        cell=cell,
        rounds=by_round(rounds),
        step_s=statistics.median(seconds for one in rounds for seconds in one["step_s"]),
        exposed_s=statistics.median(seconds for one in rounds for seconds in one["exposed_s"]),
        sent_bytes=last["sent_bytes"],
        predicted_s=simulated.step_s,
        predicted_exposed_s=simulated.exposed_comm_s,
        predicted_bytes=sent,
        link_bytes=tuple(map(statistics.median, counted)),
        predicted_link_bytes=_over_links(topology, layout, sent) if topology.tree else (),
    )


def noise_of(topology: str, found: Found) -> list[str]:
    """Returns the reasons for not trusting a topology's probe; none if it can be trusted."""
    probe = from_raw(found["probe"], Topology(text=topology).mesh, topology)
    return [
        f"probe of {topology}: {operation} over {level.name}: {one.noise}"
        for level in probe.levels
        for operation, one in level.fits.items()
        if not one.trusted
    ]


def choices_of(rows: Sequence[Row]) -> list[Choice]:
    """Returns the choice in each setting with several layouts."""
    by_cell = {row.cell: row for row in rows}
    groups = [[by_cell[cell] for cell in group] for group in by_setting(by_cell) if len(group) > 1]
    return [Choice.of(group) for group in groups]


def summarise(rows: Sequence[Row], choices: Sequence[Choice]) -> dict[str, float]:
    """Returns the median error, and how often the best predicted strategy is as good as the best measured one."""
    return {
        "cells": len(rows),
        "median_error": statistics.median(abs(row.error) for row in rows),
        "choices": len(choices),
        "right": sum(choice.right for choice in choices),
    }


def _over_links(topology: Topology, layout: Layout, sent: Mapping[str, float]) -> tuple[float, ...]:
    """Returns the bytes out of one link of each level of the tree, outermost first. A link carries the bytes that its
    ranks send over its own level, and over those outside."""
    assert topology.tree is not None
    tree, axes = topology.tree, list(topology.mesh)
    found, crossing = [], 0.0
    several = iter(axes)
    for depth, size in enumerate(tree.sizes, start=1):
        if size > 1:
            level = next(several)
            crossing += sum(sent[axis.name] for axis in layout.axes if axis.mesh_axis == level)
        ranks = tree.world_size // prod(tree.sizes[:depth])
        found.append(ranks * crossing)
    return tuple(found)


HEADS = (
    *("topology", "strategy", "micro", "dtype", "step", "spread", "predicted", "error", "waits", "predicted"),
    *("one rank sends", "out of a link (kernel)"),
)


def shown(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of the table under `HEADS`, row by row."""
    for row in rows:
        cell = row.cell
        axes = [f"{axis} {format_bytes(sent)}" for axis, sent in row.sent_bytes.items()]
        links = [
            f"{format_bytes(counted)} ({counted / predicted - 1:+.1%})" if predicted else format_bytes(counted)
            for counted, predicted in zip(row.link_bytes, row.predicted_link_bytes, strict=True)
        ]
        yield (
            cell.topology,
            cell.strategy,
            str(cell.batch.micro_batches),
            cell.batch.dtype,
            format_seconds(row.step_s),
            f"{row.spread:.0%}",
            format_seconds(row.predicted_s),
            f"{row.error:+.0%}",
            format_seconds(row.exposed_s),
            format_seconds(row.predicted_exposed_s),
            ", ".join(axes),
            ", ".join(links),
        )


def _shown(ratio: tuple[float, float, float]) -> str:
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
