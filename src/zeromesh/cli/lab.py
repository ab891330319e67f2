"""``zeromesh lab``: emulated clusters on this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.errors import InputError, LabError

if TYPE_CHECKING:
    from zeromesh.lab import Lab, LabRecord, RankResult, Registry

app = typer.Typer(
    no_args_is_help=True, help="Emulated clusters on this machine: shaped links, real processes. Needs root."
)

_TREE_HELP = 'Levels of links, outermost first, then ranks per leaf: "2@200mbit,2@1gbit,2".'


@app.command()
def run(
    tree: Annotated[str, typer.Argument(metavar="TREE", help=_TREE_HELP)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What every rank runs.")],
    timeout: Annotated[str, typer.Option(help="End all ranks after this time.")] = "1 h",
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the other ranks run on when one fails.")
    ] = False,
    congestion_control: Annotated[str, typer.Option(help="TCP's, between ranks.")] = "cubic",
) -> None:
    """Run a command on every rank of an emulated cluster, as torchrun would; then print the bytes on each link."""
    from zeromesh import units
    from zeromesh.cli.signals import exiting_on_signals
    from zeromesh.lab import Lab, Tree

    timeout_s = units.parse_seconds(timeout)
    if shutil.which(command[0]) is None:
        raise InputError(f"command {command[0]!r} not found: name a program in PATH or a path to one")
    with exiting_on_signals(), Lab(Tree.parse(tree), congestion_control=congestion_control) as lab:
        on_line = _print_line if lab.tree.world_size > 1 else _print_plain_line
        results = lab.run(command, timeout_s=timeout_s, stop_on_failure=not keep_going, on_line=on_line)
        _print_links(lab)
    _exit_with(results)


@app.command(name="list")
def list_labs() -> None:
    """List the labs of this machine: live ones, and those that killed runs left behind."""
    from zeromesh.lab import Registry

    registry = Registry()
    rows = [(record.name, *_described(registry, record)) for record in registry.labs()]
    _print_table(("lab", "state", "owner", "namespaces", "tree"), rows)


@app.command()
def down(
    names: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", help="Default: all of killed runs.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove labs whose owner still runs, too.")] = False,
) -> None:
    """Remove labs that killed runs left behind, and end what still runs in them."""
    from zeromesh.lab import Registry
    from zeromesh.lab.shell import check_host

    check_host()
    registry = Registry()
    for record in _chosen(registry.labs(), names):
        if registry.is_live(record) and not force:
            if names:
                raise LabError(f"{record} is in use, its owner still runs: end that, or add --force")
            print(f"kept {record}: its owner still runs")
        else:
            registry.remove(record.name)
            print(f"removed {record}")


def _chosen(labs: Sequence[LabRecord], names: list[str] | None) -> list[LabRecord]:
    from zeromesh.errors import nearest

    known = {record.name: record for record in labs}
    if unknown := [name for name in names or () if name not in known]:
        hint = nearest(unknown[0], known) if known else "there is no lab on this machine"
        raise LabError(f"no lab {unknown[0]!r}; {hint}")
    return [known[name] for name in names or known]


def _described(registry: Registry, record: LabRecord) -> tuple[str, str, str, str]:
    state = "live" if registry.is_live(record) else "leftover"
    return state, str(record.owner_pid), str(len(registry.namespaces(record.name))), record.tree or "not known"


def _print_line(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def _print_plain_line(rank: int, stream: str, line: str) -> None:
    del rank
    print(line, file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def _print_links(lab: Lab) -> None:
    from zeromesh.lab import format_rate

    counters = lab.counters()
    rows = [
        (link.name, format_rate(link.rate_bytes_per_s), str(counted.sent_bytes), str(counted.received_bytes))
        for link in lab.tree.links
        for counted in (counters[link.name],)
    ]
    _print_table(("link", "rate", "bytes up", "bytes down"), rows, to_stderr=True)


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, to_stderr: bool = False) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=sys.stderr if to_stderr else sys.stdout)


def _exit_with(results: Sequence[RankResult]) -> None:
    """Exit with the code that the failed ranks agree on, else with 1: 75 (preempted) must reach whoever restarts."""
    from zeromesh.lab import describe_failure

    if (failure := describe_failure(results)) is not None:
        print(f"zeromesh: {failure.splitlines()[0]}", file=sys.stderr)
        codes = {result.returncode for result in results if result.failed and result.ended_because is None}
        raise typer.Exit(codes.pop() if len(codes) == 1 and min(codes) > 0 else 1)
