"""What rank 0 writes: one JSON object a step."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from zeromesh.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Args:
        step: steps done, 1 after the first.
        loss: mean over the tokens of the global batch, before the step.
        grad_norm: global norm before clipping.
        lr: the learning rate of the step.
        tokens: targets in the global batch.
        positions: tokens in it, learned or not, and what fills rows up.
        tokens_per_s: of all devices together.
        step_s: seconds from the start of the step to its end on rank 0.
        eval_loss: mean over the held-out sequences after the step, where it was evaluated.
        skipped: steps so far whose loss or gradient was not finite and that were skipped; None for none.
        rollbacks: times that the run has gone back to a checkpoint; None for none.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_s: float
    positions: int | None = None
    eval_loss: float | None = None
    skipped: int | None = None
    rollbacks: int | None = None


class MetricsFile:
    """Appends steps to `metrics.jsonl`, each line flushed, so that a killed run keeps what it did.

    Training is worth more than its metrics: where the disk is full, there is one warning, and the run goes on.

    Args:
        path: the file; its directory exists.
        steps_done: lines of later steps are dropped: a resumed run repeats them, a new one starts with none.
    """

    def __init__(self, path: Path, *, steps_done: int) -> None:
        self._path = path
        self._warned = False
        try:
            self._file: TextIO = _open(path, steps_done)
        except OSError as error:
            self._warn(error)
            self._file = path.open("a", encoding="utf-8")

    def append(self, metrics: StepMetrics) -> None:
        fields = {name: value for name, value in asdict(metrics).items() if value is not None}
        # JSON has no NaN and no infinity.
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in fields.items()}
        with self._going_on():
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def rewind(self, steps_done: int) -> None:
        """Drops the lines of later steps: the run has gone back."""
        with self._going_on():
            before, self._file = self._file, _open(self._path, steps_done)
            before.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._going_on():
            self._file.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot write {self._path}: {error.strerror or error}; training goes on, and steps are missing or "
                f"repeated there until it can be written again",
                stacklevel=5,
            )


def steps_up_to(path: Path, steps_done: int) -> list[dict[str, Any]]:
    """The steps in a metrics file of at most that number; a line that a kill cut short, or that a disk has spoilt, is
    left out."""
    if steps_done == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and (found := json.loads(line))["step"] <= steps_done:
                kept.append(found)
        except (ValueError, KeyError, TypeError):
            continue
    return kept


def _open(path: Path, steps_done: int) -> TextIO:
    write_whole(path, "".join(json.dumps(step) + "\n" for step in steps_up_to(path, steps_done)))
    return path.open("a", encoding="utf-8")
