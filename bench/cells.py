"""Each rank's part of a bench: measures the layouts of a setting in turn, round by round.

A setting's models stay in memory from round to round, so that a round costs each layout little more than its timed
steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.matrix import Cell, by_setting
from lab import Lab, by_level
from zeromesh.errors import MeasurementError
from zeromesh.files.users import write_whole

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks
    from zeromesh.measure.steps import Training

MARK = "bench-mark"
_MARK_TIMEOUT_S = 60.0

VISIT_S = 5.0
"""Seconds for the timed steps of a layout in a round. Slow layouts get fewer steps, but at least one."""

FAR = 2.0
"""Cells that take this many times as long as the fastest in the first round are left out of other rounds, which would
take hours."""

Found = dict[str, Any]


def run_cells(
    ranks: Ranks,
    *,
    cells: Sequence[Mapping[str, Any]],
    probe: Mapping[str, Any] | None,
    rounds: int,
    steps: int,
    marks: str,
) -> Found:
    """A task of `zeromesh.measure.launch`: probes one topology, and measures its cells round by round.

    Args:
        cells: the topology's cells, as JSON.
        probe: options of `zeromesh.measure.probe.measure`; None: no probe.
        rounds: rounds of each cell.
        steps: most timed steps in each round.
        marks: the folder for readings of the lab's counters; empty if there are none.
    """
    from zeromesh.measure.probe import measure

    counts = (lambda: _read_counters(ranks, Path(marks))) if marks else None
    probed = measure(ranks, **probe) if probe is not None else None
    groups = by_setting(Cell.from_json(cell) for cell in cells)
    return {"probe": probed, "settings": [_Setting(ranks, group, rounds, steps, counts).run() for group in groups]}


class _Setting:
    """The cells of one topology and batch."""

    def __init__(
        self,
        ranks: Ranks,
        cells: Sequence[Cell],
        rounds: int,
        steps: int,
        counts: Callable[[], list[float]] | None,
    ) -> None:
        self._ranks, self._cells, self._rounds, self._steps, self._counts = ranks, cells, rounds, steps, counts
        # Each with its number of timed steps.
        self._models: dict[Cell, tuple[Training, int]] = {}
        self._found: dict[Cell, list[Found]] = {cell: [] for cell in cells}

    def run(self) -> Found:
        """Runs all cells round by round, so that a slow minute of the machine is a slow round of all cells."""
        cells = self._cells
        for number in range(self._rounds):
            for cell in cells:
                self._found[cell].append(self._visit(cell) | {"round": number})
            if number == 0:  # means over all ranks, so all ranks choose alike
                first = {cell: median(found[0]["step_s"]) for cell, found in self._found.items()}
                cells = [cell for cell in cells if first[cell] <= FAR * min(first.values())]
                self._models = {cell: self._models[cell] for cell in cells}
        self._models = {}
        return {"cells": [{"cell": cell.to_json(), "rounds": rounds} for cell, rounds in self._found.items()]}

    def _visit(self, cell: Cell) -> Found:
        from zeromesh.measure.steps import Training, measure_round

        if cell not in self._models:
            made = Training(self._ranks, cell.batch, cell.strategy)
            self._models[cell] = made, max(1, min(self._steps, int(VISIT_S / _slowest_s(made))))
        model, steps = self._models[cell]
        counted: list[list[float]] = []
        counts = self._counts
        mark = (lambda: counted.append(counts())) if counts else (lambda: None)
        found = measure_round(model, steps=steps, recorded=0 if self._found[cell] else 1, mark=mark)
        if counted:
            begun, ended = counted
            found["link_bytes"] = [(e - b) / found["steps"] for b, e in zip(begun, ended, strict=True)]
        return found


def _slowest_s(model: Training) -> float:
    """Seconds of a first step on the slowest rank. The engine learns the order of units in it."""
    import torch
    import torch.distributed as dist

    seconds = torch.tensor(model.timed(1), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def by_round(found: Sequence[Found]) -> dict[int, float]:
    """The median step of each round, by the round's number."""
    return {one["round"]: median(one["step_s"]) for one in found}


def _read_counters(ranks: Ranks, folder: Path) -> list[float]:
    """Returns the bytes out of the average link of each level so far, while all ranks stand still. The first rank reads
    them."""
    import torch.distributed as dist

    read: list[float] = []
    dist.barrier()
    if ranks.rank == 0:
        path = folder / "counters.json"
        print(MARK, flush=True)
        deadline = time.monotonic() + _MARK_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise MeasurementError(f"the lab's counters were not read within {_MARK_TIMEOUT_S:g} s")
            time.sleep(5e-3)
        read = json.loads(path.read_text())
        path.unlink()
    dist.barrier()
    return read


def answer_marks(lab: Lab, folder: Path) -> Callable[[int, str, str], None]:
    """Returns a function for `lab.run(on_line=...)` that reads the counters when a rank asks for them."""

    def on_line(rank: int, stream: str, line: str) -> None:
        if line == MARK:
            levels = by_level(lab.wiring, lab.counters())
            links = [sum(link.level == depth for link in lab.tree.links) for depth in range(len(levels))]
            sent = [level.sent_payload_bytes / count for level, count in zip(levels, links, strict=True)]
            write_whole(folder / "counters.json", json.dumps(sent))

    return on_line
