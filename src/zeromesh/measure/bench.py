"""Runs a matrix of training steps and lays what was predicted beside it.

For each topology the ranks are started once: to probe it, and then for rounds, in each of which they measure what units
compute and some steps of every cell in turn. A machine that is faster in one minute than in the next is so for all
cells. What is measured is written at once (`records`), so a bench that was ended goes on where it stopped. Predictions
are made from the probe and the units' seconds when the cells are read, and never from the cells.

A cell's `link_bytes` are the kernel's counts of what crossed each link of an emulated cluster, headers and all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import InputError, InternalError, MeasurementError
from zeromesh.lab import Lab, LinkBytes, by_level, difference
from zeromesh.measure.launch import on_all_ranks
from zeromesh.measure.matrix import Cell, Topology
from zeromesh.measure.probe import ROUNDS as PROBE_ROUNDS
from zeromesh.measure.probe import SECONDS_PER_LEVEL, Probe, from_raw, require_patience
from zeromesh.measure.records import Found, Records
from zeromesh.measure.setting import read_setting
from zeromesh.measure.steps import Batch, from_json, median_compute, median_step, planned_s, predict
from zeromesh.strategy import Layout
from zeromesh.trace import Trace

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks

CLOSE = 0.03
"""A predicted best counts as right if what it takes is within 3 % of the measured best."""

ROUNDS = 3
"""Often enough to see that a machine was not as fast all the time."""

_MARK = "zeromesh-mark"
_MARK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell, measured and predicted; seconds and bytes of one step, bytes of the average rank.

    Args:
        cell: which.
        rounds: how often it was measured.
        at, load_average: when it was measured last, and what the machine had to do then.
        step_s, exposed_s, sent_bytes: medians of the measured steps; bytes by axis.
        rounds_step_s: the median step of each round.
        predicted_s, predicted_exposed_s, predicted_bytes: the simulator's.
        planned_s: the simulator's too, fed by the probe alone: `steps.planned_s`.
        link_bytes: counted by the kernel out of the average link of each level of an emulated cluster, outermost
            first; empty on loopback.
        predicted_link_bytes: the same from the simulator's bytes.
    """

    cell: Cell
    rounds: int
    at: str
    load_average: Sequence[float]
    step_s: float
    rounds_step_s: tuple[float, ...]
    exposed_s: float
    sent_bytes: Mapping[str, float]
    predicted_s: float
    predicted_exposed_s: float
    predicted_bytes: Mapping[str, float]
    planned_s: float
    link_bytes: tuple[float, ...]
    predicted_link_bytes: tuple[float, ...]

    @property
    def error(self) -> float:
        """Of the predicted step time, relative."""
        return self.predicted_s / self.step_s - 1

    @property
    def spread(self) -> float:
        """Of the rounds: the longest over the shortest, less 1."""
        return max(self.rounds_step_s) / min(self.rounds_step_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rows say of the predictions.

    Args:
        median_error: of the absolute relative errors of step times.
        planned_median_error: the same of `planned_s`.
        choices: topologies and batches that were run with several strategies.
        right: of these, where the best predicted strategy is the measured best, or close to it.
    """

    median_error: float
    planned_median_error: float
    choices: int
    right: int


class Bench:
    """A directory with what has been measured.

    Args:
        directory: made if it is not there; holds what `records` says and, at the end, `result.json`.
        steps, warmup: of each cell in each round, timed and as many recorded, and taken before.
        rounds: of each cell; those that the directory has count.
        accept_noise: use probes that cannot be trusted.
        probe_s, probe_rounds: for each level of a topology, about, and timings of each size.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        warmup: int,
        rounds: int = ROUNDS,
        accept_noise: bool = False,
        probe_s: float = SECONDS_PER_LEVEL,
        probe_rounds: int = PROBE_ROUNDS,
    ) -> None:
        if steps < 1 or warmup < 0 or rounds < 1:
            raise InputError(
                f"at least 1 step in at least 1 round, and no negative warm-up; got {steps}, {rounds} and {warmup}"
            )
        require_patience(probe_rounds, probe_s)
        self.directory = directory
        self.records = Records(directory)
        self.steps = steps
        self.warmup = warmup
        self.rounds = rounds
        self.accept_noise = accept_noise
        self.probe_s, self.probe_rounds = probe_s, probe_rounds

    def pending(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that have not been measured as often as they should be."""
        return [cell for cell in cells if len(self.records.cell(cell)) < self.rounds]

    def claim(self) -> None:
        """Makes the directory this bench's.

        Raises:
            InputError: it holds what another machine, version or number of steps has measured.
        """
        self.records.claim(steps=self.steps, warmup=self.warmup)

    def run(self, cells: Sequence[Cell]) -> None:
        """Measures those of `cells` that are not done.

        Raises:
            InputError: the directory holds what another machine, version or number of steps has measured, another bench
                works in it, or a probe cannot be trusted.
        """
        with self.records.alone():
            self.claim()
            by_topology: dict[str, list[Cell]] = defaultdict(list)
            for cell in self.pending(cells):
                by_topology[cell.topology].append(cell)
            for text, wanted in by_topology.items():
                self._run_on(Topology(text=text), wanted)

    def _run_on(self, topology: Topology, cells: Sequence[Cell]) -> None:
        with nullcontext() if topology.tree is None else Lab(topology.tree) as lab:
            on_all_ranks(
                "bench:run_cells",
                self._task(topology, cells, lab),
                topology.mesh,
                lab=lab,
                on_line=_Counted(lab, self.directory).line,
            )

    def _task(self, topology: Topology, cells: Sequence[Cell], lab: Lab | None) -> dict[str, Any]:
        """What the ranks are told; counted here, since there one of them writes while others might still read."""
        held = self.records.probe(topology.text)
        works = [batch.work.to_json() for batch in dict.fromkeys(replace(c.batch, micro_batches=1) for c in cells)]
        probed = held is not None and (self.accept_noise or trusted(held, topology))
        known = held.get("works", ()) if held is not None else ()
        if probed and all(work in known for work in works):
            probe = None
        else:  # at once, so that one probe knows all of them
            works = [*known, *(work for work in works if work not in known)]
            probe = {"seconds": self.probe_s, "rounds": self.probe_rounds, "works": works}
        return {
            "directory": str(self.directory.resolve()),
            "topology": topology.text,
            "probe": probe,
            "accept_noise": self.accept_noise,
            "rounds": self.rounds,
            "cells": [(cell.to_json(), len(self.records.cell(cell))) for cell in cells],
            "steps": self.steps,
            "warmup": self.warmup,
            "marks": lab is not None,
        }

    # ---- what was found

    def rows(self, cells: Sequence[Cell]) -> list[Row]:
        """Those that have been measured, with predictions."""
        return [self._row(cell, rounds) for cell in cells if (rounds := self.records.cell(cell))]

    def _row(self, cell: Cell, rounds: Sequence[Found]) -> Row:
        topology, last = Topology(text=cell.topology), rounds[-1]
        layout = Layout.of(cell.strategy, topology.axes)
        cluster = self.probe_of(cell.topology).cluster
        simulated = predict(last["schedule"], cluster, cell.batch, median_compute(self.records.compute(cell)))
        traces = [from_json(trace) for measured in rounds for trace in measured["traces"]]
        self._write_traces(cell, traces, simulated.trace)
        counted = zip(*(measured.get("link_bytes", ()) for measured in rounds), strict=True)
        return Row(
            cell=cell,
            rounds=len(rounds),
            at=last.get("at", ""),
            load_average=last.get("load_average", ()),
            step_s=statistics.median(seconds for measured in rounds for seconds in measured["step_s"]),
            rounds_step_s=tuple(statistics.median(measured["step_s"]) for measured in rounds),
            exposed_s=statistics.median(seconds for measured in rounds for seconds in measured["exposed_s"]),
            sent_bytes=last["sent_bytes"],
            predicted_s=simulated.step_s,
            predicted_exposed_s=simulated.exposed_s,
            predicted_bytes=simulated.sent_bytes,
            planned_s=planned_s(cell.strategy, cluster, cell.batch),
            link_bytes=tuple(map(statistics.median, counted)),
            predicted_link_bytes=_over_links(topology, layout, simulated.sent_bytes) if topology.tree else (),
        )

    def probe_of(self, topology: str) -> Probe:
        """What the topology's probe has found."""
        held = self.records.probe(topology)
        if held is None:
            raise InternalError(f"{self.directory} has no probe of {topology}")
        return from_raw(held, Topology(text=topology).mesh, topology)

    def write_result(self, rows: Sequence[Row]) -> dict[str, Any]:
        """`result.json`: what measured it, rows, summary."""
        summary = summarise(rows)
        setting = self.records.setting
        result = {
            "environment": dict(setting),
            "steps": setting.get("steps", self.steps),
            "summary": {
                "median_error": summary.median_error,
                "planned_median_error": summary.planned_median_error,
                "choices": summary.choices,
                "right": summary.right,
                "cells": len(rows),
            },
            "rows": [_row_json(row) for row in rows],
        }
        (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _write_traces(self, cell: Cell, measured: Sequence[Trace], predicted: Trace) -> None:
        folder = self.records.traces(cell)
        for index, trace in enumerate(measured):
            (folder / f"step-{index}.json").write_text(trace.to_json())
        (folder / "median.json").write_text(median_step(measured).to_json())
        (folder / "predicted.json").write_text(predicted.to_json())


def trusted(probe: Found, topology: Topology) -> bool:
    """Whether a probe's timings are steady enough to predict from."""
    try:
        from_raw(probe, topology.mesh, topology.text).require_trust()
    except MeasurementError:
        return False
    return True


def summarise(rows: Sequence[Row]) -> Summary:
    """The median error, and how often the best predicted strategy is as good as the best measured one."""
    groups: dict[tuple[str, Batch], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.cell.topology, row.cell.batch].append(row)
    choices = [group for group in groups.values() if len(group) > 1]
    right = [_is_right(group) for group in choices]
    return Summary(
        median_error=statistics.median(abs(row.error) for row in rows) if rows else 0.0,
        planned_median_error=statistics.median(abs(row.planned_s / row.step_s - 1) for row in rows) if rows else 0.0,
        choices=len(choices),
        right=sum(right),
    )


def _is_right(group: Sequence[Row]) -> bool:
    chosen = min(group, key=lambda row: row.predicted_s)
    return chosen.step_s <= (1 + CLOSE) * min(row.step_s for row in group)


def _over_links(topology: Topology, layout: Layout, sent: Mapping[str, float]) -> tuple[float, ...]:
    """Bytes out of one link of each level of the tree, outermost first: a link carries what its ranks send over its own
    level and over those outside it."""
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


def _row_json(row: Row) -> dict[str, Any]:
    return {
        **row.cell.to_json(),
        "key": row.cell.key,
        "at": row.at,
        "load_average": list(row.load_average),
        "rounds": row.rounds,
        "step_s": row.step_s,
        "rounds_step_s": list(row.rounds_step_s),
        "spread": row.spread,
        "predicted_s": row.predicted_s,
        "error": row.error,
        "planned_s": row.planned_s,
        "exposed_s": row.exposed_s,
        "predicted_exposed_s": row.predicted_exposed_s,
        "sent_bytes": dict(row.sent_bytes),
        "predicted_bytes": dict(row.predicted_bytes),
        "link_bytes": list(row.link_bytes),
        "predicted_link_bytes": list(row.predicted_link_bytes),
    }


class _Counted:
    """Reads a lab's counters where a rank asks for it, and lets it go on."""

    def __init__(self, lab: Lab | None, directory: Path) -> None:
        self._lab = lab
        self._directory = directory
        self._begun: Mapping[str, LinkBytes] = {}

    def line(self, rank: int, stream: str, line: str) -> None:
        """Called with each line that the ranks print."""
        if self._lab is None or not line.startswith(_MARK):
            return
        _, key, what = line.split()
        counters = self._lab.counters()
        if what == "begin":
            self._begun = counters
        else:
            levels = by_level(self._lab.wiring, difference(counters, self._begun))
            links = [prod(self._lab.tree.sizes[: depth + 1]) for depth in range(len(levels))]
            sent = [level.sent_bytes / count for level, count in zip(levels, links, strict=True)]
            (self._directory / f"{key}.links").write_text(json.dumps(sent))
        (self._directory / f"{key}.{what}").touch()


# On every rank --------------------------------------------------------------------------------------------------------


def run_cells(
    ranks: Ranks,
    *,
    directory: str,
    topology: str,
    probe: Mapping[str, Any] | None,
    accept_noise: bool,
    rounds: int,
    cells: Sequence[tuple[Mapping[str, Any], int]],
    steps: int,
    warmup: int,
    marks: bool,
) -> None:
    """A task of `launch`: probes the topology, and measures its cells and what their units compute, round by round.

    Args:
        ranks: all of them.
        directory, topology: whose records they are.
        probe: seconds and rounds; None: it has been probed.
        accept_noise: keep a probe that cannot be trusted.
        rounds: of each cell.
        cells: what to measure, and how many rounds of it there are.
        steps, warmup: of each round.
        marks: read the lab's counters around the steps of a cell.
    """
    from zeromesh.measure.probe import measure
    from zeromesh.measure.steps import measure_compute, measure_steps, steps_between_marks

    records, first = Records(Path(directory)), ranks.rank == 0
    if probe is not None:
        found = measure(ranks, **probe)
        if first:
            if not accept_noise:
                from_raw(found, Topology(text=topology).mesh, topology).require_trust()
            records.keep_probe(topology, found)
    for number in range(rounds):
        due = [Cell.from_json(each) for each, held in cells if held <= number]
        for cell in dict.fromkeys(cell.of_compute for cell in due):
            found = measure_compute(ranks, cell.batch, steps=steps)
            if first:
                records.keep_compute(cell, found)
        for cell in due:
            marker = _Marker(ranks, cell.key, records.directory) if marks else None
            mark = marker.mark if marker else lambda what: None
            found = measure_steps(ranks, cell.batch, cell.strategy, steps=steps, warmup=warmup, mark=mark)
            if first:
                if marker is not None:
                    found["link_bytes"] = [sent / steps_between_marks(steps) for sent in marker.link_bytes()]
                here = read_setting()
                records.keep_cell(cell, found | {name: here[name] for name in ("at", "load_average")})


@dataclass(frozen=True, slots=True)
class _Marker:
    """Asks the lab's owner to read its counters, and waits until it has."""

    ranks: Ranks
    key: str
    directory: Path

    def mark(self, what: str) -> None:
        import torch.distributed as dist

        dist.barrier()
        if self.ranks.rank == 0:
            done = self.directory / f"{self.key}.{what}"
            done.unlink(missing_ok=True)
            print(_MARK, self.key, what, flush=True)
            deadline = time.monotonic() + _MARK_TIMEOUT_S
            while not done.exists():
                if time.monotonic() > deadline:
                    raise MeasurementError(f"the lab's counters were not read within {_MARK_TIMEOUT_S:g} s")
                time.sleep(5e-3)
            done.unlink()
        dist.barrier()

    def link_bytes(self) -> list[float]:
        path = self.directory / f"{self.key}.links"
        sent: list[float] = json.loads(path.read_text())
        path.unlink()
        return sent


def shown(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Cells of the table, row by row."""
    from zeromesh.units import format_bytes, format_seconds

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
