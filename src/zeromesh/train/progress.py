"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Protocol

from zeromesh.train.metrics import StepMetrics

PLAIN_LINES = 20
"""About how many lines a run without a terminal prints."""


class Progress(Protocol):
    """Shows steps as they end, and what happens between them."""

    def show(self, metrics: StepMetrics) -> None: ...

    def note(self, text: str) -> None: ...


@contextmanager
def show_progress(steps: int, *, steps_done: int, quiet: bool) -> Iterator[Progress]:
    """A progress display: none where `quiet` (all ranks but 0), live on a terminal, plain lines otherwise."""
    if quiet:
        yield _Silent()
    elif sys.stdout.isatty():
        with _live(steps, steps_done) as live:
            yield live
    else:
        yield _Plain(steps)


class TimeLeft:
    """Seconds that the remaining steps will take at the median pace of the last ones: one slow step changes nothing."""

    WINDOW = 20

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: list[float] = []

    def after(self, metrics: StepMetrics) -> float:
        self._recent = [*self._recent, metrics.step_s][-self.WINDOW :]
        return median(self._recent) * (self._steps - metrics.step)


def describe(metrics: StepMetrics) -> str:
    """Loss, held-out loss where there is one, gradient norm, pace, and what went wrong so far.

    >>> step = {"step": 3, "lr": 3e-4, "tokens": 100, "tokens_per_s": 5120.4, "step_s": 0.1}
    >>> describe(StepMetrics(loss=2.5, grad_norm=1.25, **step))
    'loss 2.500  grad norm 1.25  5,120 tokens/s'
    >>> describe(StepMetrics(loss=2.5, grad_norm=1.25, skipped=2, **step))
    'loss 2.500  grad norm 1.25  5,120 tokens/s  skipped 2'
    """
    held_out = f"  held-out {metrics.eval_loss:.3f}" if metrics.eval_loss is not None else ""
    faults = f"  skipped {metrics.skipped}" if metrics.skipped else ""
    faults += f"  rolled back {metrics.rollbacks}" if metrics.rollbacks else ""
    return (
        f"loss {metrics.loss:.3f}{held_out}  grad norm {metrics.grad_norm:.3g}  {metrics.tokens_per_s:,.0f} tokens/s"
        f"{faults}"
    )


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.2), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Silent:
    def show(self, metrics: StepMetrics) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Plain:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // PLAIN_LINES)
        self._left = TimeLeft(steps)

    def show(self, metrics: StepMetrics) -> None:
        left = self._left.after(metrics)
        due = metrics.step == 1 or metrics.step % self._every == 0 or metrics.step == self._steps
        if due or metrics.eval_loss is not None:
            print(
                f"step {metrics.step:>{len(str(self._steps))}}/{self._steps}  {describe(metrics)}  {clock(left)} left",
                flush=True,
            )

    def note(self, text: str) -> None:
        print(text, flush=True)


@contextmanager
def _live(steps: int, steps_done: int) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.description}"))
    with RichProgress(*columns, expand=True) as bar:
        task = bar.add_task("first step ...", total=steps, completed=steps_done)
        left = TimeLeft(steps)

        class Live:
            def show(self, metrics: StepMetrics) -> None:
                text = f"{describe(metrics)}  {clock(left.after(metrics))} left"
                bar.update(task, completed=metrics.step, description=text)
                if metrics.eval_loss is not None:
                    bar.console.print(f"step {metrics.step}: held-out loss {metrics.eval_loss:.3f}", highlight=False)

            def note(self, text: str) -> None:
                bar.console.print(text, highlight=False, markup=False)

        yield Live()
