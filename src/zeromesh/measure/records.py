"""The directory of a bench: its setting, probes, what units compute, and cells, each written as soon as it is measured.

::

    setting.json            of all that follows
    probes/TOPOLOGY.json    what `probe.measure` has found
    compute/KEY.json        rounds of `steps.measure_compute` with one batch on one topology
    cells/KEY.json          rounds of `steps.Measuring` of one cell

The ranks write and the process that started them reads. A file that is there is whole. Torch-free.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from zeromesh.errors import InputError
from zeromesh.files import parse_json, read_text, write_whole
from zeromesh.measure.matrix import Cell
from zeromesh.measure.setting import read_setting

SHARED = (
    "layout", "zeromesh", "python", "torch", "platform", "machine", "cores", "threads", "devices", "steps", "warmup"
)  # fmt: skip
"""What all measurements of a directory have in common."""

LAYOUT = 4
"""Of the directory's files, and of what strategies mean; another one cannot be read."""

Found = Mapping[str, Any]


class Records:
    """The files of one bench.

    Args:
        directory: made if it is not there.

    Raises:
        InputError: it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("cells", "compute", "probes", "traces"):
            try:
                (directory / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"results need a directory that can be written to; got {directory}: {error.strerror}"
                ) from None

    def claim(self, *, steps: int, warmup: int) -> None:
        """Writes what the directory is of, or holds it against that.

        Raises:
            InputError: it holds what another machine, version or number of steps has measured.
        """
        here = {
            **read_setting(),
            "layout": LAYOUT,
            "threads": os.environ.get("OMP_NUM_THREADS", "1"),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all that are there"),
            "steps": steps,
            "warmup": warmup,
        }
        path = self.directory / "setting.json"
        if not path.exists() and not any(self.directory.glob("*/*.json")):
            path.write_text(json.dumps({name: here.get(name) for name in SHARED}, indent=1) + "\n")
        held = self.setting
        differing = [
            f"{name} {held.get(name)}, now {here.get(name)}" for name in SHARED if held.get(name) != here.get(name)
        ]
        if differing:
            raise InputError(
                f"all cells of a directory must be measured alike; {self.directory} was with {'; '.join(differing)}: "
                f"name another directory, or delete that one"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other benches out of the directory.

        Raises:
            InputError: one works there now.
        """
        with (self.directory / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another bench works in {self.directory}: wait for it or end it, since each would time the other"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield

    @property
    def setting(self) -> Found:
        """What the directory is of; nothing before `claim`."""
        held: Found = _read(self.directory / "setting.json") or {}
        return held

    def probe(self, topology: str) -> Found | None:
        held: Found | None = _read(self._probe(topology))
        return held

    def keep_probe(self, topology: str, found: Found) -> None:
        _write(self._probe(topology), found)

    def cell(self, cell: Cell) -> list[Found]:
        """Its rounds."""
        found: list[Found] = _read(self._file("cells", cell)) or []
        return found

    def rounds(self, cell: Cell) -> dict[int, float]:
        """The median step of each of its rounds, by the number that all cells have in common."""
        return {found.get("round", i): median(found["step_s"]) for i, found in enumerate(self.cell(cell))}

    def keep_cell(self, cell: Cell, found: Found) -> None:
        """Adds a round."""
        _write(self._file("cells", cell), [*self.cell(cell), found])

    def compute(self, cell: Cell) -> list[Found]:
        """Rounds of the units of the cell's topology and batch."""
        found: list[Found] = _read(self._file("compute", cell.of_compute)) or []
        return found

    def keep_compute(self, cell: Cell, found: Found) -> None:
        """Adds a round."""
        _write(self._file("compute", cell.of_compute), [*self.compute(cell), found])

    def traces(self, cell: Cell) -> Path:
        """The folder for its timelines."""
        folder = self.directory / "traces" / cell.key
        folder.mkdir(exist_ok=True)
        return folder

    def _file(self, kind: str, cell: Cell) -> Path:
        return self.directory / kind / f"{cell.key}.json"

    def _probe(self, topology: str) -> Path:
        return self.directory / "probes" / f"{topology.replace('/', '_')}.json"


def _read(path: Path) -> Any:
    return parse_json(read_text(path, kind="a bench's record"), where=str(path)) if path.exists() else None


def _write(path: Path, content: object) -> None:
    write_whole(path, json.dumps(content))
