"""What the measuring commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from zeromesh.errors import InputError, RanksFailedError

if TYPE_CHECKING:
    from zeromesh.lab import Lab


MOST_HERE = 8
"""Processes that are started on this machine's cores unless --ranks asks for more."""


@contextmanager
def emulated(tree: str) -> Iterator[Lab | None]:
    """The emulated cluster that `--lab` names, None without. Ranks that fail end the command with 1."""
    from zeromesh.cli.signals import exiting_on_signals

    try:
        with exiting_on_signals():
            if not tree:
                yield None
                return
            from zeromesh.lab import Lab
            from zeromesh.measure.launch import under_torchrun

            if under_torchrun():
                raise InputError("--lab starts ranks of its own: leave torchrun out")
            with Lab(tree) as lab:
                yield lab
    except InputError:
        from zeromesh.measure.launch import is_first

        if is_first():
            raise
        raise typer.Exit(2) from None  # all ranks of a torchrun have the same arguments: the first says it once
    except RanksFailedError as error:
        print(f"zeromesh: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def mesh_of(text: str, ranks: int, lab: Lab | None) -> dict[str, int]:
    """The mesh of `--mesh`, of `--ranks`, of the lab, or of what has been started."""
    from zeromesh.measure.launch import default_mesh, mesh_of_tree, parse_mesh, under_torchrun

    if text and ranks:
        raise InputError("give --mesh or --ranks, not both")
    if ranks and (under_torchrun() or lab is not None):
        raise InputError("--ranks starts processes on this machine; torchrun and --lab bring their own: leave it out")
    if ranks < 0:
        raise InputError(f"--ranks must be at least 1, got {ranks}")
    if text:
        return parse_mesh(text)
    return mesh_of_tree(lab.tree) if lab is not None else default_mesh(ranks or _ranks_here())


def _ranks_here() -> int:
    """One for each device, or for each processor core, up to `MOST_HERE`, where there are no devices."""
    from zeromesh.launch.device import visible_devices
    from zeromesh.measure.setting import usable_cores

    return visible_devices() or min(MOST_HERE, max(2, usable_cores()))
