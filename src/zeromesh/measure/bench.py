"""Runs a matrix of training steps and lays what was predicted beside it.

For each topology the ranks are started twice: to probe it and to measure what units compute, then for the cells that
are not done yet. Every cell is written as soon as it is measured, so a bench that was ended goes on where it stopped.
Predictions are made from the probe when the cells are read, and never from the cells.

A directory is of one machine, one set of versions and one number of steps, which are written beside the first cell:
cells of others would stand beside predictions that are not theirs.

A cell's `link_bytes` are the kernel's counts of what crossed each link of an emulated cluster, headers and all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import InputError, MeasurementError
from zeromesh.lab import Lab, LinkBytes, by_level, difference
from zeromesh.measure.launch import on_all_ranks
from zeromesh.measure.matrix import Cell, Topology
from zeromesh.measure.probe import ROUNDS, SECONDS_PER_LEVEL, Probe, from_raw
from zeromesh.measure.setting import read_setting
from zeromesh.measure.steps import Batch, from_json, median_step, predict
from zeromesh.strategy import Layout
from zeromesh.trace import Trace

if TYPE_CHECKING:
    from zeromesh.measure.ranks import Ranks

CLOSE = 0.03
"""A predicted best counts as right if what it takes is within 3 % of the measured best."""

_SAME = ("zeromesh", "python", "torch", "platform", "machine", "cores", "steps", "warmup")
"""What all cells of a directory share."""

_MARK = "zeromesh-mark"
_MARK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell, measured and predicted; seconds and bytes of one step, bytes of the average rank.

    Args:
        cell: which.
        at, load_average: when it was measured, and what the machine had to do then.
        step_s, exposed_s, sent_bytes: medians of the measured steps; bytes by axis.
        predicted_s, predicted_exposed_s, predicted_bytes: the simulator's.
        link_bytes: counted by the kernel out of the average link of each level of an emulated cluster, outermost
            first; empty on loopback.
        predicted_link_bytes: the same from the simulator's bytes.
    """

    cell: Cell
    at: str
    load_average: Sequence[float]
    step_s: float
    exposed_s: float
    sent_bytes: Mapping[str, float]
    predicted_s: float
    predicted_exposed_s: float
    predicted_bytes: Mapping[str, float]
    link_bytes: tuple[float, ...]
    predicted_link_bytes: tuple[float, ...]

    @property
    def error(self) -> float:
        """Of the predicted step time, relative."""
        return self.predicted_s / self.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rows say of the predictions.

    Args:
        median_error: of the absolute relative errors of step times.
        choices: topologies and batches that were run with several strategies.
        right: of these, where the best predicted strategy is the measured best, or close to it.
    """

    median_error: float
    choices: int
    right: int


class Bench:
    """A directory with what has been measured.

    Args:
        directory: made if it is not there; holds probes, cells, traces and, at the end, `result.json`.
        steps, warmup: of each cell, recorded and taken before.
        accept_noise: use probes that cannot be trusted.
        probe_s, probe_rounds: for each level of a topology, about, and timings of each size.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        warmup: int,
        accept_noise: bool = False,
        probe_s: float = SECONDS_PER_LEVEL,
        probe_rounds: int = ROUNDS,
    ) -> None:
        if steps < 1 or warmup < 0:
            raise InputError(f"at least 1 step and no negative warm-up; got {steps} and {warmup}")
        self.directory = directory
        self.steps = steps
        self.warmup = warmup
        self.accept_noise = accept_noise
        self.probe_s, self.probe_rounds = probe_s, probe_rounds
        for name in ("cells", "probes", "traces"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def pending(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that have not been measured."""
        return [cell for cell in cells if not self._cell_file(cell).exists()]

    def run(self, cells: Sequence[Cell]) -> None:
        """Measures those of `cells` that are not done.

        Raises:
            InputError: the directory holds what another machine, version or number of steps has measured.
            MeasurementError: a probe cannot be trusted.
        """
        self._claim()
        by_topology: dict[str, list[Cell]] = defaultdict(list)
        for cell in self.pending(cells):
            by_topology[cell.topology].append(cell)
        for text, wanted in by_topology.items():
            topology = Topology(text=text)
            with nullcontext() if topology.tree is None else Lab(topology.tree) as lab:
                self._probe(topology, wanted, lab)
                self._measure(topology, wanted, lab)

    def _claim(self) -> None:
        """Writes what the directory is of, or holds it against that."""
        here = {**read_setting(), "steps": self.steps, "warmup": self.warmup}
        kept = [path for name in ("cells", "probes") for path in (self.directory / name).glob("*.json")]
        if not self._setting_file.exists() and not kept:
            self._setting_file.write_text(json.dumps({name: here.get(name) for name in _SAME}, indent=1) + "\n")
        held = self._setting()
        differing = [
            f"{name} {held.get(name)}, now {here.get(name)}" for name in _SAME if held.get(name) != here.get(name)
        ]
        if differing:
            raise InputError(
                f"all cells of a directory must be measured alike; {self.directory} was with {'; '.join(differing)}: "
                f"name another directory, or delete that one"
            )

    def _setting(self) -> dict[str, Any]:
        held: dict[str, Any] = json.loads(self._setting_file.read_text()) if self._setting_file.exists() else {}
        return held

    # ---- one topology

    def _probe(self, topology: Topology, cells: Sequence[Cell], lab: Lab | None) -> None:
        path = self._probe_file(topology.text)
        held = json.loads(path.read_text()) if path.exists() else {"probe": None, "compute": {}}
        if held["probe"] is not None and not self._trusts(topology, held["probe"]):
            held["probe"] = None  # --accept-noise took it
        batches = {compute_key(cell.batch): cell.batch for cell in cells}
        missing = {key: batch for key, batch in batches.items() if key not in held["compute"]}
        if held["probe"] is not None and not missing:
            return
        options = {
            "batches": {key: _batch_json(batch) for key, batch in missing.items()},
            "steps": max(4, self.steps // 2),
            "probe_s": self.probe_s if held["probe"] is None else 0.0,
            "rounds": self.probe_rounds,
        }
        found = on_all_ranks("bench:probe_topology", options, topology.mesh, lab=lab)
        probe = found["probe"] or held["probe"]
        if not self.accept_noise:
            from_raw(probe, topology.mesh, topology.text).require_trust()
        path.write_text(json.dumps({"probe": probe, "compute": held["compute"] | found["compute"]}))

    def _trusts(self, topology: Topology, probe: Mapping[str, Any]) -> bool:
        try:
            from_raw(probe, topology.mesh, topology.text).require_trust()
        except MeasurementError:
            return self.accept_noise
        return True

    def _measure(self, topology: Topology, cells: Sequence[Cell], lab: Lab | None) -> None:
        counted = _Counted(lab, self.directory / "cells")
        options = {
            "cells": [cell.to_json() for cell in cells],
            "steps": self.steps,
            "warmup": self.warmup,
            "directory": str((self.directory / "cells").resolve()),
            "marks": lab is not None,
        }
        on_all_ranks("bench:run_cells", options, topology.mesh, lab=lab, on_line=counted.line)

    # ---- what was found

    def rows(self, cells: Sequence[Cell]) -> list[Row]:
        """Those that are done, with predictions."""
        return [self._row(cell) for cell in cells if self._cell_file(cell).exists()]

    def _row(self, cell: Cell) -> Row:
        measured = json.loads(self._cell_file(cell).read_text())
        probed = json.loads(self._probe_file(cell.topology).read_text())
        topology, batch = Topology(text=cell.topology), cell.batch
        layout = Layout.of(cell.strategy, topology.axes)
        cluster = self.probe_of(cell.topology).cluster
        simulated = predict(measured["schedule"], cluster, batch, probed["compute"][compute_key(batch)])
        traces = [from_json(trace) for trace in measured["traces"]]
        self._write_traces(cell, traces, simulated.trace)
        return Row(
            cell=cell,
            at=measured.get("at", ""),
            load_average=measured.get("load_average", ()),
            step_s=statistics.median(measured["step_s"]),
            exposed_s=statistics.median(measured["exposed_s"]),
            sent_bytes=measured["sent_bytes"],
            predicted_s=simulated.step_s,
            predicted_exposed_s=simulated.exposed_s,
            predicted_bytes=simulated.sent_bytes,
            link_bytes=tuple(measured.get("link_bytes", ())),
            predicted_link_bytes=_over_links(topology, layout, simulated.sent_bytes) if topology.tree else (),
        )

    def probe_of(self, topology: str) -> Probe:
        """What the topology's probe has found."""
        raw = json.loads(self._probe_file(topology).read_text())["probe"]
        return from_raw(raw, Topology(text=topology).mesh, topology)

    def write_result(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """`result.json`: what measured it, rows, summary."""
        rows = self.rows(cells)
        summary = summarise(rows)
        setting = self._setting()
        result = {
            "environment": setting,
            "steps": setting.get("steps", self.steps),
            "summary": {
                "median_error": summary.median_error,
                "choices": summary.choices,
                "right": summary.right,
                "cells": len(rows),
            },
            "rows": [_row_json(row) for row in rows],
        }
        (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _write_traces(self, cell: Cell, measured: Sequence[Trace], predicted: Trace) -> None:
        folder = self.directory / "traces" / cell.key
        folder.mkdir(exist_ok=True)
        for index, trace in enumerate(measured):
            (folder / f"step-{index}.json").write_text(trace.to_json())
        (folder / "median.json").write_text(median_step(measured).to_json())
        (folder / "predicted.json").write_text(predicted.to_json())

    def _cell_file(self, cell: Cell) -> Path:
        return self.directory / "cells" / f"{cell.key}.json"

    @property
    def _setting_file(self) -> Path:
        return self.directory / "setting.json"

    def _probe_file(self, topology: str) -> Path:
        return self.directory / "probes" / f"{topology.replace('/', '_')}.json"


def compute_key(batch: Batch) -> str:
    """Batches that share what units compute: all but the accumulation."""
    return f"{batch.model} {batch.dtype} {batch.sequences}x{batch.tokens}"


def summarise(rows: Sequence[Row]) -> Summary:
    """The median error, and how often the best predicted strategy is as good as the best measured one."""
    groups: dict[tuple[str, Batch], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.cell.topology, row.cell.batch].append(row)
    choices = [group for group in groups.values() if len(group) > 1]
    right = [_is_right(group) for group in choices]
    return Summary(
        median_error=statistics.median(abs(row.error) for row in rows) if rows else 0.0,
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
        "step_s": row.step_s,
        "predicted_s": row.predicted_s,
        "error": row.error,
        "exposed_s": row.exposed_s,
        "predicted_exposed_s": row.predicted_exposed_s,
        "sent_bytes": dict(row.sent_bytes),
        "predicted_bytes": dict(row.predicted_bytes),
        "link_bytes": list(row.link_bytes),
        "predicted_link_bytes": list(row.predicted_link_bytes),
    }


def _batch_json(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("model", "dtype", "sequences", "tokens", "micro_batches")}


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


def probe_topology(
    ranks: Ranks, *, batches: Mapping[str, Any], steps: int, probe_s: float, rounds: int
) -> dict[str, Any]:
    """A task of `launch`: the links, unless they get no time, and what each batch's units compute."""
    from zeromesh.measure.probe import measure
    from zeromesh.measure.steps import measure_compute

    return {
        "probe": measure(ranks, rounds=rounds, seconds=probe_s) if probe_s else None,
        "compute": {key: measure_compute(ranks, Batch(**batch), steps=steps) for key, batch in batches.items()},
    }


def run_cells(
    ranks: Ranks, *, cells: Sequence[Mapping[str, Any]], steps: int, warmup: int, directory: str, marks: bool
) -> None:
    """A task of `launch`: measures cells and writes each one's file when it is done."""
    from zeromesh.measure.steps import measure_steps, steps_between_marks

    for cell in map(Cell.from_json, cells):
        marker = _Marker(ranks, cell.key, Path(directory)) if marks else None
        found = measure_steps(
            ranks,
            cell.batch,
            cell.strategy,
            steps=steps,
            warmup=warmup,
            mark=marker.mark if marker else lambda what: None,
        )
        if ranks.rank == 0:
            if marker is not None:
                found["link_bytes"] = [sent / steps_between_marks(steps) for sent in marker.link_bytes()]
            here = read_setting()
            found |= {name: here[name] for name in ("at", "load_average")}
            path = Path(directory) / f"{cell.key}.json"
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(found))
            unfinished.rename(path)


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
            format_seconds(row.predicted_s),
            f"{row.error:+.0%}",
            format_seconds(row.exposed_s),
            format_seconds(row.predicted_exposed_s),
            ", ".join(axes),
            ", ".join(links),
        )
