"""Reports on a training run: metrics.jsonl, a page of curves and memory, and lines on the terminal."""

from __future__ import annotations

import json
import math
import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TextIO

from zeromesh.files.users import write_whole
from zeromesh.report.curves import Series, curve_chart
from zeromesh.report.page import Bar, CurveChart, Fact, MemoryChart, Page
from zeromesh.trace import MemoryLine, TrafficLine

EVERY_S = 60.0
"""Seconds between two writes of the page: a killed run leaves a page that is at most this old."""

PLAIN_LINES = 20
"""Approximate number of a run's steps that are printed."""

KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer: master copy and moments",
    "buffers": "gather and reduce buffers",
}
"""Names of the kinds in `zm.memory_report`, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step: a line of metrics.jsonl."""

    step: int  # number of steps done, so 1 after the first
    loss: float  # mean over the tokens of the global batch, before the step
    grad_norm: float  # global norm before clipping
    lr: float
    tokens: int  # targets in the global batch
    positions: int  # tokens that the model computed on
    tokens_per_s: float  # of all devices together
    step_s: float  # from the start of the step to its end on rank 0
    eval_loss: float | None = None  # mean over the held-out sequences after the step, if it was evaluated
    skipped: int | None = None  # number of skipped steps so far
    rollbacks: int | None = None  # how often the run has gone back to a checkpoint


class RunReport:
    """Receives the steps of a run as they end. If a disk is full, training goes on, with one warning per file.

    Args:
        directory: receives metrics.jsonl, samples.jsonl and, with `page`, run.html.
        done: steps of earlier starts. Later steps in metrics.jsonl are dropped, since they come again.
        lines: model, layout, data and batch, for people. The first is the page's subtitle.
        memory: lines by kind and rank, as far as they are known.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        done: int,
        lines: Sequence[str],
        strategy: str,
        page: bool = True,
        memory: Callable[[], Sequence[Sequence[MemoryLine]]] = lambda: (),
    ) -> None:
        self._directory, self._metrics = directory, directory / "metrics.jsonl"
        self._samples = directory / "samples.jsonl"
        if not done:
            self._samples.unlink(missing_ok=True)  # those of another run
        self._all, self._lines, self._strategy, self._memory = steps, lines, strategy, memory
        self._page = page
        self._steps = array("q")
        self._columns = {name: array("d") for name in StepMetrics.__slots__ if name != "step"}
        self._paces: deque[float] = deque(maxlen=20)  # seconds of this start's last steps, for their median
        self._written_s = perf_counter()
        self._changed = False  # a start without steps leaves the page as it is
        self._warned: set[Path] = set()
        self._file: TextIO | None = None
        self.rewind(done)

    def append(self, metrics: StepMetrics) -> None:
        fields = {name: value for name, value in asdict(metrics).items() if value is not None}
        self._add(fields)
        self._paces.append(metrics.step_s)
        self._changed = True
        # JSON has neither NaN nor infinity.
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in fields.items()}
        with self._going_on(self._metrics):
            self._file = self._file or self._metrics.open("a", encoding="utf-8")
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        due = metrics.step == 1 or metrics.step % max(1, self._all // PLAIN_LINES) == 0 or metrics.step == self._all
        if due or metrics.eval_loss is not None:
            left_s = median(self._paces) * (self._all - metrics.step)
            number = f"{metrics.step:>{len(str(self._all))}}/{self._all}"
            print(f"step {number}  {describe(metrics)}  {clock(left_s)} left", flush=True)
        if perf_counter() - self._written_s > EVERY_S:
            self._write_page()

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Adds a text that the model has written to samples.jsonl."""
        print(f"step {step}: {prompt!r} {f'goes on {text!r}' if text else 'is followed by an end of text'}", flush=True)
        with self._going_on(self._samples), self._samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        with self._going_on(self._metrics):
            if self._file:
                self._file.close()
        self._write_page()

    def rewind(self, done: int) -> None:
        """Drops steps after `done`: the run has gone back, or begins there."""
        del self._steps[:]
        for column in self._columns.values():
            del column[:]
        with self._going_on(self._metrics):
            if self._file:
                self._file.close()
        self._file = None
        with self._going_on(self._metrics):
            before = steps_up_to(self._metrics, done)
            for step in before:
                self._add(step)
            write_whole(self._metrics, "".join(json.dumps(step) + "\n" for step in before))

    def _add(self, found: Mapping[str, Any]) -> None:
        self._steps.append(found["step"])
        for name, column in self._columns.items():
            value = found.get(name)
            column.append(math.nan if value is None else value)

    @contextmanager
    def _going_on(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if path not in self._warned:
                self._warned.add(path)
                warnings.warn(
                    f"cannot read or write {path}: {error.strerror or error}; training goes on, and steps are "
                    f"missing there until it can be written again",
                    stacklevel=5,
                )

    # ---- the page

    def _write_page(self) -> None:
        self._written_s = perf_counter()
        if self._page and self._changed and self._steps:
            path = self._directory / "run.html"
            with self._going_on(path):
                write_whole(path, self.to_html())

    def to_html(self) -> str:
        """Returns the page as it is now."""
        columns, memory = self._columns, self._memory()
        best = min(
            ((loss, step) for loss, step in zip(columns["eval_loss"], self._steps, strict=True) if math.isfinite(loss)),
            default=None,
        )
        tokens = sum(filter(math.isfinite, columns["tokens"]))
        facts = [
            ("strategy", "strategy", self._strategy),
            ("steps", "steps", f"{self._steps[-1]:,} of {self._all:,}"),
            ("loss", "loss of the last step", f"{columns['loss'][-1]:.4g}"),
            *([("eval_loss", f"best held-out loss, step {best[1]:,}", f"{best[0]:.4g}")] if best else []),
            ("tokens", "tokens learned", f"{tokens:,.0f}" if tokens < 1e9 else f"{tokens / 1e9:,.1f} billion"),
            ("tokens_per_s", "tokens/s, median", f"{median(columns['tokens_per_s']):,.0f}"),
            ("trained", "in steps", clock(sum(filter(math.isfinite, columns["step_s"])))),
        ]
        faults = (("skipped", "Steps skipped, since loss or gradient was not finite"), ("rollbacks", "Rollbacks"))
        counted = [f"{text}: {columns[name][-1]:.0f}" for name, text in faults if columns[name][-1] > 0]
        return Page(
            title=f"Run {self._directory.name}",
            subtitle=self._lines[0],
            facts=tuple(Fact(key=key, label=label, value=value) for key, label, value in facts),
            charts=tuple(filter(None, self._charts())),
            memory=_memory_chart(memory) if memory else None,
            sections=(),
            notes=(*self._lines[1:], *counted),
        ).to_html()

    def _charts(self) -> Iterable[CurveChart | None]:
        charts = [
            ("loss", "Loss", "{:.4g}".format, {"training": "loss", "held out": "eval_loss"}),
            ("lr", "Learning rate", "{:.3g}".format, {"learning rate": "lr"}),
            ("grad_norm", "Gradient norm", "{:.3g}".format, {"gradient norm": "grad_norm"}),
            ("tokens_per_s", "Tokens/s", "{:,.0f}".format, {"tokens/s": "tokens_per_s"}),
        ]
        for key, title, write, curves in charts:
            series = [
                Series(name=name, colour=colour, values=self._columns[column])
                for (name, column), colour in zip(curves.items(), ("compute", "communicate"), strict=False)
            ]
            yield curve_chart(key, title, self._steps, series, write, from_zero=key != "loss")


def steps_up_to(path: Path, done: int) -> list[dict[str, Any]]:
    """Returns the steps up to number `done` in a metrics file, without lines that a kill or a disk has damaged."""
    kept = []
    for line in path.read_bytes().split(b"\n")[:-1] if done and path.exists() else ():
        try:
            if (found := json.loads(line))["step"] <= done:
                kept.append(found)
        except (ValueError, KeyError, TypeError):
            continue
    return kept


def describe(metrics: StepMetrics) -> str:
    """Formats losses, gradient norm and pace of a step, and faults so far.

    >>> step = {"step": 3, "lr": 3e-4, "tokens": 100, "positions": 100, "tokens_per_s": 5120.4, "step_s": 0.1}
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
    """Formats hours, minutes and seconds.

    >>> clock(75.2), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def comparison(memory: Sequence[Sequence[MemoryLine]], traffic: Sequence[Sequence[TrafficLine]]) -> str:
    """Compares predicted with measured memory and traffic, in bytes; if devices differ, it shows the largest. Lines of
    `zm.memory_report` come by kind and rank, those of `zm.traffic_report` by axis and rank."""
    held = {
        place: {
            KINDS.get(ranks[0].kind, ranks[0].kind): [(line.predicted_bytes, line.allocated_bytes) for line in ranks]
            for ranks in memory
            if ranks[0].place == place
        }
        for place in ("device", "host")
    }
    sent = {_sender(ranks[0]): [(line.predicted_bytes, line.sent_bytes) for line in ranks] for ranks in traffic}
    devices = len(memory[0])
    every = (pairs for rows in (*held.values(), sent) for pairs in rows.values())
    agree = all(predicted == measured for pairs in every for predicted, measured in pairs)
    verdict = f"agree on all {devices} devices" if agree else f"differ; the largest of {devices} devices is shown"
    return "\n".join(
        [
            *_table("bytes of one device", "allocated", held["device"]),
            "",
            *([*_table("bytes of its host", "allocated", held["host"]), ""] if held["host"] else []),
            *_table("bytes one device sends a step, by axis", "counted", sent),
            "",
            f"predicted and measured {verdict}",
        ]
    )


def places(directory: Path) -> str:
    """Returns a line that names the files in a run's directory, by relative paths if these are shorter."""
    files = {"page": "run.html", "metrics": "metrics.jsonl", "checkpoints": "checkpoints"}
    found = {name: directory / file for name, file in files.items() if (directory / file).exists()}
    return ", ".join(f"{name} {min(str(path), os.path.relpath(path), key=len)}" for name, path in found.items())


def _sender(line: TrafficLine) -> str:
    if line.direction:
        return f"{line.axis}: copied {line.direction}"
    return f"{line.axis}: {line.size} ranks, stage {line.stage}"


def _table(title: str, measured: str, rows: Mapping[str, Sequence[tuple[int, int]]]) -> list[str]:
    lines = [f"{title:<40} {'predicted':>14} {measured:>14}", f"{'-' * 40} {'-' * 14} {'-' * 14}"]
    for name, pairs in rows.items():
        left, right = (max(column) for column in zip(*pairs, strict=True))
        lines.append(f"{name:<40} {left:>14,} {right:>14,}")
    return lines


def _memory_chart(memory: Sequence[Sequence[MemoryLine]]) -> MemoryChart:
    """Shows the device that holds most: predicted above allocated."""
    memory = [ranks for ranks in memory if ranks[0].place == "device"]
    ranks = list(zip(*memory, strict=True))
    totals = [max(line.allocated_bytes for line in lines if line.kind == "total") for lines in ranks]
    rank = totals.index(max(totals))
    lines = [line for line in ranks[rank] if line.kind != "total"]
    most = max(1, *(max(line.predicted_bytes, line.allocated_bytes) for line in ranks[rank] if line.kind == "total"))
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
