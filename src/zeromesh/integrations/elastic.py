"""Runs that continue after a signal, after a loss that is not finite, and on another number of ranks. Torch-free.

`zeromesh train` and the Trainer's callback (`zeromesh.integrations.callback`) share this module.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from zeromesh.errors import InputError, MeshError, NonFiniteError
from zeromesh.strategy import Strategy
from zeromesh.strategy.parts import layouts_of

EXIT_PREEMPTED = 75
"""Exit code of a process that has saved because a signal asked for it: run the same command again."""

Remedy = Literal["stop", "skip", "rollback"]


# ---- another number of ranks


def resize_mesh(mesh: Mapping[str, int], world: int, strategy: str | None) -> dict[str, int]:
    """Returns the mesh with the same axes for `world` ranks.

    Inner axes have the fast links, so they keep as much of their size as possible. From the innermost on, each axis
    takes the largest divisor of the remaining ranks that is not above its size; the outermost takes the rest. If the
    strategy does not fit (`node[4]=3,node[*]=1`), the next largest divisor is tried.

    >>> resize_mesh({"cluster": 4, "node": 8}, 24, "node=3,cluster=1")
    {'cluster': 3, 'node': 8}

    `strategy` is in the notation, or a preset's name; None if it is chosen after the mesh.

    Raises:
        MeshError: the strategy fits no mesh of `world` ranks. The message says why the first mesh does not fit.
    """
    names, sizes = list(mesh)[::-1], list(mesh.values())[::-1]
    reason: InputError | None = None
    for candidate in _candidates(sizes, world):
        resized = tuple(zip(names, candidate, strict=True))
        try:
            if strategy is not None:
                layouts_of(Strategy.parse(strategy, names), resized, {})
        except InputError as error:
            reason = reason or error
        else:
            return dict(resized[::-1])
    raise MeshError(f"the mesh {mesh_text(mesh)} cannot be re-sized to {world} ranks for {strategy}: {reason}")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The sizes by axis, outermost first, as text.

    >>> mesh_text({"cluster": 2, "node": 8})
    'cluster=2 x node=8'
    """
    return " x ".join(f"{name}={size}" for name, size in mesh.items())


def _candidates(sizes: Sequence[int], world: int) -> Iterator[tuple[int, ...]]:
    """Yields sizes, innermost first, whose product is `world`; preferred ones first."""
    if len(sizes) == 1:
        yield (world,)
        return
    for size in range(min(sizes[0], world), 0, -1):
        if world % size == 0:
            for rest in _candidates(sizes[1:], world // size):
                yield (size, *rest)


# ---- signals

# The handler appends here and the loop looks between steps: a signal comes while collectives run, and all ranks must
# end after the same step.
_came: list[int] = []
_acts: list[Callable[[], None]] = []  # called by the handler


@contextmanager
def noticing(*numbers: int, twice: bool = False) -> Iterator[None]:
    """Notes signals instead of ending the process. Does nothing outside the main thread: only that thread gets signals.

    A second signal raises SystemExit if `twice`. A rank that a launcher started must not: several senders may each send
    it one signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def notice(number: int, _frame: FrameType | None) -> None:
        if twice and _came:
            sys.exit(128 + number)
        if twice:
            start = "\n" * (number == signal.SIGINT)  # on a new line after the terminal's ^C
            os.write(2, f"{start}zeromesh: ending after this step, and saving; a second signal ends at once\n".encode())
        _came.append(number)
        for act in _acts:
            act()

    _came.clear()
    before: Any = {number: signal.signal(number, notice) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def when_asked(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` when a signal comes inside, or immediately if one has come since `noticing` began."""
    _acts.append(act)
    try:
        if asked_by():
            act()
        yield
    finally:
        _acts.remove(act)


def asked_by() -> int:
    """The first signal that has come since `noticing` began; 0 for none."""
    return _came[0] if _came else 0


# ---- losses and gradients that are not finite


@dataclass(slots=True, kw_only=True)
class NonFinite:
    """Counts the steps of a run whose loss or gradient norm is not finite, and treats each as `remedy` says.

    [Note: Batches] A step's number and `left_out` determine its batch. A roll back leaves out the batches since the
    checkpoint: the step after the checkpoint takes the batch behind the one that failed.

    "stop" raises, "skip" leaves the optimizer step out, "rollback" loads the newest checkpoint.
    """

    remedy: Remedy = "stop"
    most_in_a_row: int = 3  # such steps without a good one between them
    most_in_all: int = 20  # such steps in the run
    skipped: int = 0  # steps without an optimizer step so far
    rollbacks: int = 0  # checkpoints loaded again so far
    in_a_row: int = 0  # steps since the last good one
    left_out: int = 0  # batches that no step uses

    def batch(self, step: int) -> int:
        """The batch of step 0, 1, ...: [Note: Batches]."""
        return step + self.left_out

    def finite(self) -> None:
        """Notes a good step."""
        self.in_a_row = 0

    def judge(self, fault: str) -> Remedy:
        """Counts a bad step. `fault` describes it for the message. Raises NonFiniteError if the remedy is to stop, or a
        bound is exceeded."""
        self.in_a_row += 1
        if self.remedy == "stop":
            raise NonFiniteError(
                f"{fault}. The optimizer has not stepped, and nothing was saved since. Look at the learning rate, the "
                f'warm-up and the data; nonfinite = "skip" or "rollback" goes on without the batch'
            )
        total = self.skipped + self.rollbacks + 1
        for name, how, count, bound in (
            ("nonfinite_in_a_row", "in a row", self.in_a_row, self.most_in_a_row),
            ("nonfinite_in_all", "of this run", total, self.most_in_all),
        ):
            if count > bound:
                raise NonFiniteError(
                    f"{fault}: number {count} {how}, and {name} = {bound}. The parameters or the learning rate, not "
                    f"one batch, are the likely cause: go on from an older checkpoint with other settings"
                )
        self.skipped += self.remedy == "skip"
        return self.remedy

    def rolled_back(self, step: int, to: int) -> str:
        """Notes that `step` failed and the run goes on from step `to`, both counted from 0, and returns a message."""
        self.rollbacks += 1
        self.left_out += step + 1 - to
        return (
            f"rolled back to step {to}; the {step + 1 - to} batches since then are left out, and the run goes on with "
            f"those that follow"
        )

    def summary(self) -> str:
        """Returns lines on skipped steps; empty if there were none."""
        text = f"\n{self.skipped} steps were skipped: their loss or gradient was not finite" if self.skipped else ""
        if self.rollbacks:
            text += f"\nrolled back {self.rollbacks} times; {self.left_out} batches were left out"
        return text

    def state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the counts of a checkpoint; a count that it lacks becomes 0."""
        for name in _COUNTS:
            setattr(self, name, int(state.get(name, 0)))


_COUNTS = ("skipped", "rollbacks", "in_a_row", "left_out")


def describe(step: int, loss: float | None, norm: float, ranks: Sequence[int] = ()) -> str:
    """Says which number was not finite in a step.

    >>> describe(12, float("nan"), float("nan"), [1, 3])
    'step 12: the loss is nan on ranks 1, 3'
    >>> describe(12, 2.5, float("inf"))
    'step 12: the norm of the gradient is inf (the loss is 2.5)'
    """
    if ranks and loss is not None:
        return f"step {step}: the loss is {loss:g} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"step {step}: the norm of the gradient is {norm:g}" + ("" if loss is None else f" (the loss is {loss:g})")
