"""A run as one page without any network: its curves, and what its devices hold. Torch-free."""

from __future__ import annotations

import math
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self

from zeromesh.files import write_whole
from zeromesh.report.curves import Series, curve_chart
from zeromesh.report.page import Bar, CurveChart, Fact, MemoryChart, Page
from zeromesh.train.metrics import StepMetrics
from zeromesh.train.progress import clock

EVERY_S = 60.0
"""Between two writings while the run goes on: what ends without notice leaves a page that is this old at most."""

FIELDS = ("loss", "eval_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "skipped", "rollbacks")


class Measured(Protocol):
    """Of one kind of memory on one rank, as `zm.memory_report` says it."""

    @property
    def kind(self) -> str: ...

    @property
    def predicted_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What does not change while a run goes on.

    Args:
        name: of the run.
        steps: in all.
        lines: model, layout, data and batch, for people; the first is the page's subtitle.
        strategy: as the run has it.
    """

    name: str
    steps: int
    lines: Sequence[str]
    strategy: str


class RunPage:
    """Writes the page when a run ends, however it does, and every minute until then.

    Args:
        path: of the page.
        before: the steps of earlier starts, as `metrics.jsonl` has them.
        about: the run.
        memory: by kind and rank, as far as it is known by now.
    """

    def __init__(
        self,
        path: Path,
        before: Iterable[Mapping[str, Any]],
        about: About,
        memory: Callable[[], Sequence[Sequence[Measured]]],
    ) -> None:
        self._path = path
        self._about = about
        self._memory = memory
        self._steps = array("q")
        self._columns = {name: array("d") for name in FIELDS}
        self._written_s = perf_counter()
        self._changed = self._warned = False
        for step in before:
            self._add(step)

    def append(self, metrics: StepMetrics) -> None:
        self._add({"step": metrics.step, **{name: getattr(metrics, name) for name in FIELDS}})
        self._changed = True
        if perf_counter() - self._written_s > EVERY_S:
            self._write()

    def rewind(self, steps_done: int) -> None:
        kept = bisect_right(self._steps, steps_done)
        del self._steps[kept:]
        for column in self._columns.values():
            del column[kept:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()

    def to_html(self) -> str:
        """The page as it is now."""
        memory = self._memory()
        return Page(
            title=f"Run {self._about.name}",
            subtitle=self._about.lines[0],
            facts=self._facts(),
            charts=tuple(filter(None, self._charts())),
            memory=_chart(memory) if memory else None,
            sections=(),
            notes=(*self._about.lines[1:], *self._faults()),
        ).to_html()

    def _add(self, found: Mapping[str, Any]) -> None:
        self._steps.append(found["step"])
        for name, column in self._columns.items():
            value = found.get(name)
            column.append(math.nan if value is None else value)

    def _write(self) -> None:
        self._written_s = perf_counter()
        if not self._changed:
            return  # a start that had nothing left to do
        try:
            write_whole(self._path, self.to_html())
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"cannot write {self._path}: {error.strerror or error}; training goes on", stacklevel=3)

    def _facts(self) -> tuple[Fact, ...]:
        columns, steps = self._columns, self._steps
        best = min(
            ((loss, step) for loss, step in zip(columns["eval_loss"], steps, strict=True) if math.isfinite(loss)),
            default=None,
        )
        facts = [
            ("strategy", "strategy", self._about.strategy),
            ("steps", "steps", f"{steps[-1]:,} of {self._about.steps:,}"),
            ("loss", "loss of the last step", f"{columns['loss'][-1]:.4g}"),
            *([("eval_loss", f"best held-out loss, step {best[1]:,}", f"{best[0]:.4g}")] if best else []),
            ("tokens", "tokens learned", _count(sum(columns["tokens"]))),
            ("tokens_per_s", "tokens/s, median", f"{median(columns['tokens_per_s']):,.0f}"),
            ("trained", "in steps", clock(sum(columns["step_s"]))),
        ]
        return tuple(Fact(key=key, label=label, value=value) for key, label, value in facts)

    def _charts(self) -> list[CurveChart | None]:
        def chart(key: str, title: str, series: Sequence[Series], form: str, *, zero: bool = True) -> CurveChart | None:
            return curve_chart(
                key, title, self._steps, series, lambda value: format(value, form), x_name="step", from_zero=zero
            )

        columns = self._columns
        losses = [
            Series(name="training", colour="compute", values=columns["loss"]),
            Series(name="held out", colour="communicate", values=columns["eval_loss"]),
        ]
        others = [
            ("lr", "Learning rate", ".3g"),
            ("grad_norm", "Gradient norm", ".3g"),
            ("tokens_per_s", "Tokens/s", ",.0f"),
        ]
        return [
            chart("loss", "Loss", losses, ".4g", zero=False),
            *(
                chart(k, title, [Series(name=title.lower(), colour="compute", values=columns[k])], f)
                for k, title, f in others
            ),
        ]

    def _faults(self) -> list[str]:
        named = (("skipped", "Steps skipped, since loss or gradient was not finite"), ("rollbacks", "Rollbacks"))
        last = [(self._columns[name][-1], text) for name, text in named]
        return [f"{text}: {count:.0f}" for count, text in last if count > 0]


def _count(number: float) -> str:
    """Short enough for a box that is a sixth of the page."""
    return f"{number:,.0f}" if number < 1e9 else f"{number / 1e9:,.1f} billion"


def _chart(memory: Sequence[Sequence[Measured]]) -> MemoryChart:
    """Of the device that holds most, what was predicted above what is there."""
    ranks = list(zip(*memory, strict=True))
    rank = max(range(len(ranks)), key=lambda number: _total(ranks[number]).allocated_bytes)
    lines = [line for line in ranks[rank] if line.kind != "total"]
    most = max(_total(ranks[rank]).predicted_bytes, _total(ranks[rank]).allocated_bytes) or 1
    agree = all(line.predicted_bytes == line.allocated_bytes for lines in memory for line in lines)
    return MemoryChart(
        kinds=tuple(line.kind for line in lines),
        bars=(
            Bar.of("predicted", {line.kind: line.predicted_bytes for line in lines}, most),
            Bar.of("allocated", {line.kind: line.allocated_bytes for line in lines}, most),
        ),
        caption=(
            f"Rank {rank}, which holds most of {len(ranks)}, without activations. Predicted and allocated "
            f"{'agree' if agree else 'differ'}{' on all ranks' if agree else ''}."
        ),
    )


def _total(lines: Sequence[Measured]) -> Measured:
    return next(line for line in lines if line.kind == "total")
