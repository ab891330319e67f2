"""Options and output that the measuring commands share, and signals that end a command as an error does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from zeromesh.errors import InputError

MOST_HERE = 8
"""Most processes that are started on this machine's cores, unless --ranks asks for more."""


@contextmanager
def starting_ranks() -> Iterator[None]:
    """While ranks are started or run inside, signals end them all, and wrong input is reported once."""
    from zeromesh.progress import progress

    try:
        with exiting_on_signals(), progress("measuring"):
            yield
    except InputError:
        from zeromesh.measure.launch import is_first

        if is_first():
            raise
        raise typer.Exit(2) from None  # all ranks of a torchrun have the same arguments; the first reports it


def mesh_of(text: str, ranks: int) -> dict[str, int]:
    """Returns the mesh of `--mesh`, of `--ranks`, or of the ranks that torchrun has started."""
    from zeromesh.measure.launch import default_mesh, parse_mesh, under_torchrun

    if text and ranks:
        raise InputError("give --mesh or --ranks, not both")
    if ranks and under_torchrun():
        raise InputError("--ranks starts processes on this machine; torchrun brings its own: leave it out")
    if ranks < 0:
        raise InputError(f"--ranks must be at least 1, got {ranks}")
    return parse_mesh(text) if text else default_mesh(ranks or _ranks_here())


def _ranks_here() -> int:
    """One rank per device; without devices one per processor core, up to `MOST_HERE`."""
    from zeromesh.files import usable_cores
    from zeromesh.launch.device import visible_devices

    return visible_devices() or min(MOST_HERE, max(2, usable_cores()))


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, so that files which a command has begun are removed. The signals'
    default action skips the ends of `with` blocks.

    A signal that is ignored, as SIGHUP under nohup, stays ignored.
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
