"""Where else a run's metrics go: TensorBoard's event files, and Weights & Biases' offline directories."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from zeromesh.errors import ConfigError
from zeromesh.train.metrics import StepMetrics


class Tracker(AbstractContextManager["Tracker"], Protocol):
    """Takes the metrics of steps as they end."""

    def append(self, metrics: StepMetrics) -> None: ...

    def rewind(self, steps_done: int) -> None:
        """The run has gone back: later steps come again."""


def require_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for one whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.trackers: {name} is not installed: pip install 'zeromesh[{name}]'")


def make_tracker(name: str, directory: Path, config: Mapping[str, Any], *, steps_done: int) -> Tracker:
    """The tracker of that name, under the run's directory; what it shows of later steps is dropped where it can."""
    if name == "tensorboard":
        return TensorBoard(directory / "tensorboard", steps_done=steps_done)
    return WandB(directory, config)


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """The metrics by name, without those that a step has not."""
    return {name: float(value) for name, value in asdict(metrics).items() if value is not None and name != "step"}


class TensorBoard:
    """Event files in `directory`; a step that comes again takes the place of the one before."""

    def __init__(self, directory: Path, *, steps_done: int) -> None:
        self._directory = directory
        self._open(steps_done)

    def append(self, metrics: StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()

    def rewind(self, steps_done: int) -> None:
        self._writer.close()
        self._open(steps_done)

    def _open(self, steps_done: int) -> None:
        kind = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = kind(str(self._directory), purge_step=steps_done + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


class WandB:
    """An offline run in `directory`/wandb, for `wandb sync`; each start of ours is one. Steps are an axis of their own,
    since W&B's only goes up."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project="zeromesh", mode="offline", dir=str(directory), config=dict(config), settings=settings
        )
        self._run.define_metric("*", step_metric="step")

    def append(self, metrics: StepMetrics) -> None:
        found = {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}
        self._run.log({"step": metrics.step, **found})

    def rewind(self, steps_done: int) -> None:
        self._run.log({"rolled_back_to": steps_done})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if error is None else 1)
