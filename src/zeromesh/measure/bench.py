"""Runs a matrix of training steps and lays what was predicted beside it.

For each topology the ranks are started once: to probe it, and then, setting by setting, for rounds, in each of which
they measure some steps of every cell in turn. A machine that is faster in one minute than in the next is so for all
cells. Those that are known not to be the fastest are left out of further rounds ([Note: Paired rounds]). What is
measured is written at once (`records`), so a bench that was ended goes on where it stopped. Predictions are made from
the probe and the units' seconds when the cells are read, and never from the cells.

A cell's `link_bytes` are the kernel's counts of what crossed each link of an emulated cluster, less headers of frames.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.errors import InputError, InternalError, MeasurementError
from zeromesh.lab import Lab, LinkBytes, by_level, difference
from zeromesh.measure.cells import MARK
from zeromesh.measure.launch import on_all_ranks
from zeromesh.measure.matrix import Cell, Topology, by_setting
from zeromesh.measure.probe import ROUNDS as PROBE_ROUNDS
from zeromesh.measure.probe import SECONDS_PER_LEVEL, Probe, from_raw, require_patience
from zeromesh.measure.race import CONFIDENCE, Ratio, Rounds, as_good, compare, fastest, in_question
from zeromesh.measure.records import Found, Records
from zeromesh.measure.steps import from_json, median_compute, median_step, planned_s, predict
from zeromesh.strategy import Layout
from zeromesh.trace import Trace

ROUNDS = 8
"""At the most, of layouts that cannot be told apart. On a quiet machine a ratio strays by 3 % from round to round, and
its mean of eight rounds by 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell, measured and predicted; seconds and bytes of one step, bytes of the average rank.

    Args:
        cell: which.
        rounds: how often it was measured.
        at, load_average: when it was measured last, and what the machine had to do then.
        step_s, exposed_s, sent_bytes: medians of the measured steps; bytes by axis.
        rounds_step_s, round_numbers: the median step of each round, and which that was of its setting's.
        predicted_s, predicted_exposed_s, predicted_bytes: the simulator's.
        planned_s: the simulator's too, fed by the probe alone: `steps.planned_s`.
        link_bytes: counted by the kernel out of the average link of each level of an emulated cluster, outermost
            first, less the frames' headers; empty on loopback.
        predicted_link_bytes: the same from the simulator's bytes.
    """

    cell: Cell
    rounds: int
    at: str
    load_average: Sequence[float]
    step_s: float
    rounds_step_s: tuple[float, ...]
    round_numbers: tuple[int, ...]
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
    def by_round(self) -> Rounds:
        """Its step in each round."""
        return dict(zip(self.round_numbers, self.rounds_step_s, strict=True))

    @property
    def spread(self) -> float:
        """Of the rounds: the longest over the shortest, less 1."""
        return max(self.rounds_step_s) / min(self.rounds_step_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting (topology and batch) that was run with several strategies, compared in the rounds that they share.

    Args:
        best: the fastest.
        ratios: of the others to it.
        chosen: the one that is predicted to be fastest.
        right: it is, or within `CLOSE` of it.
        told: the rounds suffice to say so, with `CONFIDENCE`.
    """

    best: Row
    ratios: Mapping[Cell, Ratio]
    chosen: Row
    right: bool
    told: bool

    @classmethod
    def of(cls, group: Sequence[Row], looks: int) -> Choice:
        rows, times = {row.cell: row for row in group}, {row.cell: row.by_round for row in group}
        best, chosen = fastest(times), min(group, key=lambda row: row.predicted_s)
        right, told = as_good(times, chosen.cell, looks=looks)
        ratios = compare(times, best, looks=looks)
        return cls(best=rows[best], ratios=ratios, chosen=chosen, right=right, told=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rows say of the predictions.

    Args:
        median_error: of the absolute relative errors of step times.
        planned_median_error: the same of `planned_s`.
        settings: that were run with several strategies.
    """

    median_error: float
    planned_median_error: float
    settings: tuple[Choice, ...]

    @property
    def choices(self) -> int:
        """How many there are."""
        return len(self.settings)

    @property
    def right(self) -> int:
        """Of these, where the best predicted strategy is the measured best, or close to it."""
        return sum(choice.right for choice in self.settings)

    @property
    def told(self) -> int:
        """And where the rounds suffice to say whether it is."""
        return sum(choice.told for choice in self.settings)


class Bench:
    """A directory with what has been measured.

    Args:
        directory: made if it is not there; holds what `records` says and, at the end, `result.json`.
        steps, warmup: of each cell in each round, timed and as many recorded, and taken before.
        rounds: of each cell, at the most; those that the directory has count.
        all_rounds: of every cell, also of those that are known not to be the fastest of their setting.
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
        all_rounds: bool = False,
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
        self.rounds, self.all_rounds = rounds, all_rounds
        self.accept_noise = accept_noise
        self.probe_s, self.probe_rounds = probe_s, probe_rounds

    def pending(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that have not been measured as often as they should be."""
        found = []
        for group in by_setting(cells):
            times = {cell: self.records.rounds(cell) for cell in group}
            left = set(group) if self.all_rounds else in_question(times, looks=self.rounds)
            found += [cell for cell in group if cell in left and len(times[cell]) < self.rounds]
        return found

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
            unsettled = {cell.of_compute for cell in self.pending(cells)}
            for cell in cells:
                if cell.of_compute in unsettled:  # also what is out already, which the others are compared with
                    by_topology[cell.topology].append(cell)
            for text, wanted in by_topology.items():
                self._run_on(Topology(text=text), wanted)

    def _run_on(self, topology: Topology, cells: Sequence[Cell]) -> None:
        with nullcontext() if topology.tree is None else Lab(topology.tree) as lab:
            on_all_ranks(
                "cells:run_cells",
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
            "all_rounds": self.all_rounds,
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
            rounds_step_s=tuple(self.records.rounds(cell).values()),
            round_numbers=tuple(self.records.rounds(cell)),
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
        summary = self.summarise(rows)
        setting = self.records.setting
        result = {
            "environment": dict(setting),
            "steps": setting.get("steps", self.steps),
            "summary": {
                "median_error": summary.median_error,
                "planned_median_error": summary.planned_median_error,
                "choices": summary.choices,
                "right": summary.right,
                "told": summary.told,
                "confidence": CONFIDENCE,
                "cells": len(rows),
            },
            "settings": [_choice_json(choice) for choice in summary.settings],
            "rows": [_row_json(row) for row in rows],
        }
        (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """`summarise`, of as many rounds as this bench takes."""
        return summarise(rows, self.rounds)

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


def summarise(rows: Sequence[Row], looks: int = ROUNDS) -> Summary:
    """The median error, and how often the best predicted strategy is as good as the best measured one.

    Args:
        rows: of all cells.
        looks: rounds of each, at the most.
    """
    by_cell = {row.cell: row for row in rows}
    groups = [[by_cell[cell] for cell in group] for group in by_setting(by_cell) if len(group) > 1]
    return Summary(
        median_error=statistics.median(abs(row.error) for row in rows) if rows else 0.0,
        planned_median_error=statistics.median(abs(row.planned_s / row.step_s - 1) for row in rows) if rows else 0.0,
        settings=tuple(Choice.of(group, looks) for group in groups),
    )


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


def _choice_json(choice: Choice) -> dict[str, Any]:
    cell = choice.best.cell
    return {
        **cell.of_compute.to_json(),
        "strategy": cell.strategy,
        "predicted": choice.chosen.cell.strategy,
        "right": choice.right,
        "told": choice.told,
        "ratios": {other.strategy: asdict(ratio) for other, ratio in choice.ratios.items()},
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        **row.cell.to_json(),
        "key": row.cell.key,
        "at": row.at,
        "load_average": list(row.load_average),
        "rounds": row.rounds,
        "step_s": row.step_s,
        "rounds_step_s": list(row.rounds_step_s),
        "round_numbers": list(row.round_numbers),
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
        if self._lab is None or not line.startswith(MARK):
            return
        _, key, what = line.split()
        counters = self._lab.counters()
        if what == "begin":
            self._begun = counters
        else:
            levels = by_level(self._lab.wiring, difference(counters, self._begun))
            links = [prod(self._lab.tree.sizes[: depth + 1]) for depth in range(len(levels))]
            sent = [level.sent_payload_bytes / count for level, count in zip(levels, links, strict=True)]
            (self._directory / f"{key}.links").write_text(json.dumps(sent))
        (self._directory / f"{key}.{what}").touch()


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


def verdicts(choices: Sequence[Choice]) -> Iterator[str]:
    """A line a setting: its fastest layout, those that cannot be told from it, and how the predicted one does."""
    for choice in choices:
        cell, near = choice.best.cell, [x for x in choice.ratios.items() if x[1].low <= 1]
        others = ", ".join(f"{other.strategy} {_shown(ratio)}" for other, ratio in near)
        line = f"{cell.topology} x{cell.batch.micro_batches} {cell.batch.dtype}: {cell.strategy} is fastest"
        line += f", or {others}" if others else ""
        if choice.chosen is not choice.best:
            chosen = choice.chosen.cell
            line += f"; predicted {chosen.strategy}, {_shown(choice.ratios[chosen])}"
        yield line + ("" if choice.told else "; more rounds are needed to tell")


def _shown(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.high < 100 else f"{ratio.value:.2f}"
