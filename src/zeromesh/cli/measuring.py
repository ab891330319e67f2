"""Options and output shared by the measuring commands, and signals that end one as an error does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from zeromesh.errors import InputError

MOST_HERE = 8
"""Processes that are started on this machine's cores unless --ranks asks for more."""


@contextmanager
def starting_ranks() -> Iterator[None]:
    """Inside, ranks are started, or are there: signals end them all, and wrong input is said once."""
    from zeromesh.progress import progress

    try:
        with exiting_on_signals(), progress("measuring"):
            yield
    except InputError:
        from zeromesh.measure.launch import is_first

        if is_first():
            raise
        raise typer.Exit(2) from None  # all ranks of a torchrun have the same arguments: the first says it once


def mesh_of(text: str, ranks: int) -> dict[str, int]:
    """The mesh of `--mesh`, of `--ranks`, or of the ranks that torchrun has started."""
    from zeromesh.measure.launch import default_mesh, parse_mesh, under_torchrun

    if text and ranks:
        raise InputError("give --mesh or --ranks, not both")
    if ranks and under_torchrun():
        raise InputError("--ranks starts processes on this machine; torchrun brings its own: leave it out")
    if ranks < 0:
        raise InputError(f"--ranks must be at least 1, got {ranks}")
    return parse_mesh(text) if text else default_mesh(ranks or _ranks_here())


def _ranks_here() -> int:
    """One for each device, or for each processor core, up to `MOST_HERE`, where there are no devices."""
    from zeromesh.files import usable_cores
    from zeromesh.launch.device import visible_devices

    return visible_devices() or min(MOST_HERE, max(2, usable_cores()))


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, which removes files that a command has begun: their default action
    skips the end of every `with` block.

    A signal that is ignored, as SIGHUP is under nohup, stays so.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
