"""What each rank does in a bench: it measures the layouts of a setting in turn, until it is known which is fastest.

The models of a setting stay in memory from round to round, so that a round costs each layout little more than the steps
that are timed; a layout that is out ([Note: Paired rounds]) gives its memory back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import MeasurementError
from zeromesh.measure.matrix import Cell, Topology, by_setting, timed_steps
from zeromesh.measure.race import in_question
from zeromesh.measure.records import Records
from zeromesh.measure.setting import read_setting

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks
    from zeromesh.measure.steps import Measuring

MARK = "zeromesh-mark"
_MARK_TIMEOUT_S = 60.0

COMPUTE_ROUNDS = 3
"""In which units are timed, of which the median is taken: nothing is told apart by them."""


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
    all_rounds: bool = True,
) -> None:
    """A task of `launch`: probes the topology, and measures its cells and what their units compute, round by round.

    Args:
        ranks: all of them.
        directory, topology: whose records they are.
        probe: seconds and rounds; None: it has been probed.
        accept_noise: keep a probe that cannot be trusted.
        rounds: of each cell, at the most.
        cells: what to measure, and how many rounds of it there are.
        steps, warmup: of each round, and before the first.
        marks: read the lab's counters around the steps of a cell.
        all_rounds: of every cell, also of those that are known not to be the fastest of their setting.
    """
    from zeromesh.measure.probe import from_raw, measure

    records = Records(Path(directory))
    if probe is not None:
        found = measure(ranks, **probe)
        if ranks.rank == 0:
            if not accept_noise:
                from_raw(found, Topology(text=topology).mesh, topology).require_trust()
            records.keep_probe(topology, found)
    held = {Cell.from_json(each): having for each, having in cells}
    for group in by_setting(held):
        run = _Setting(
            ranks, records, group, rounds=rounds, steps=steps, warmup=warmup, marks=marks, race=not all_rounds
        )
        run.run({cell: held[cell] for cell in group})


class _Setting:
    """The cells of one topology and batch."""

    def __init__(
        self,
        ranks: Ranks,
        records: Records,
        cells: Sequence[Cell],
        *,
        rounds: int,
        steps: int,
        warmup: int,
        marks: bool,
        race: bool,
    ) -> None:
        self._ranks, self._records, self._cells = ranks, records, cells
        self._rounds, self._steps, self._warmup, self._marks, self._race = rounds, steps, warmup, marks, race
        self._models: dict[Cell, Measuring] = {}

    def run(self, held: Mapping[Cell, int]) -> None:
        """Measures the rounds that are missing; `held`: how many of each cell there are."""
        taken = dict(held)
        while True:
            number, left, compute = self._agreed()
            due = [cell for cell in left if taken[cell] < self._rounds]
            self._models = {cell: model for cell, model in self._models.items() if cell in due}
            if not due:
                break
            if compute:
                self._compute(due[0])
            for cell in due:
                self._visit(cell, number, first=not taken[cell])
                taken[cell] += 1

    def _agreed(self) -> tuple[int, list[Cell], bool]:
        """The next round's number, the cells in question, and whether to time units: the first rank reads what it has
        written, and tells the others."""
        import torch.distributed as dist

        found: list[Any] = [None]
        if self._ranks.rank == 0:
            times = {cell: self._records.rounds(cell) for cell in self._cells}
            number = 1 + max((each for rounds in times.values() for each in rounds), default=-1)
            left = in_question(times, looks=self._rounds) if self._race else set(self._cells)
            compute = len(self._records.compute(self._cells[0])) < COMPUTE_ROUNDS
            found = [(number, [index for index, cell in enumerate(self._cells) if cell in left], compute)]
        dist.broadcast_object_list(found, src=0)
        number, indices, compute = found[0]
        return number, [self._cells[index] for index in indices], compute

    def _compute(self, cell: Cell) -> None:
        from zeromesh.measure.steps import measure_compute

        found = measure_compute(self._ranks, cell.batch, steps=self._steps)
        if self._ranks.rank == 0:
            self._records.keep_compute(cell, found)

    def _visit(self, cell: Cell, number: int, *, first: bool) -> None:
        from zeromesh.measure.steps import Measuring, steps_between_marks

        if cell not in self._models:
            self._models[cell] = Measuring(self._ranks, cell.batch, cell.strategy, warmup=self._warmup)
        model = self._models[cell]
        steps = timed_steps(self._steps, model.step_s)
        recorded = 1 if first else 0
        marker = _Marker(self._ranks, cell.key, self._records.directory) if self._marks else None
        found = model.round(steps=steps, recorded=recorded, mark=marker.mark if marker else lambda what: None)
        if self._ranks.rank == 0:
            if marker is not None:
                taken = steps_between_marks(steps, recorded)
                found["link_bytes"] = [sent / taken for sent in marker.link_bytes()]
            here = read_setting()
            self._records.keep_cell(
                cell, found | {"round": number} | {name: here[name] for name in ("at", "load_average")}
            )


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
            print(MARK, self.key, what, flush=True)
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
