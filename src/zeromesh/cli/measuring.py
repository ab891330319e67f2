"""Options and output shared by the measuring commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from zeromesh.errors import InputError

MOST_HERE = 8
"""Processes that are started on this machine's cores unless --ranks asks for more."""


@contextmanager
def starting_ranks() -> Iterator[None]:
    """Inside, ranks are started, or are there: signals end them all, and wrong input is said once."""
    from zeromesh.cli.signals import exiting_on_signals
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
