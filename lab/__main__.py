"""`make lab`: runs a command on the ranks of an emulated cluster."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli.app import plain_app, run
from zeromesh.errors import InputError

if TYPE_CHECKING:
    from lab import Lab

app = plain_app("lab")


@app.command()
def lab(
    tree: Annotated[
        str, typer.Argument(metavar="TREE", help='Links, outermost first, then ranks per leaf: "2@200mbit,2@1gbit,2".')
    ],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What every rank runs.")],
    timeout: Annotated[str, typer.Option(help="End all ranks after this time.")] = "1 h",
) -> None:
    """Run a command on every rank of an emulated cluster, as torchrun would; then print the bytes on each link.

    Shaped links, real processes, on this machine. Needs root.
    """
    from lab import Lab, Tree
    from zeromesh import units
    from zeromesh.cli.measuring import exiting_on_signals
    from zeromesh.launch.processes import describe_failure

    timeout_s = units.parse_seconds(timeout)
    if shutil.which(command[0]) is None:
        raise InputError(f"command {command[0]!r} not found: name a program in PATH or a path to one")
    with exiting_on_signals(), Lab(Tree.parse(tree)) as emulated:
        results = emulated.run(command, timeout_s=timeout_s, on_line=_print_line)
        _print_links(emulated)
    if (failure := describe_failure(results)) is not None:
        print(f"zeromesh: {failure.splitlines()[0]}", file=sys.stderr)
        codes = {result.returncode for result in results if result.failed and result.ended_because is None}
        # If the failed ranks agree on a code, pass it on: a restarter must see 75 (preempted).
        raise typer.Exit(codes.pop() if len(codes) == 1 and min(codes) > 0 else 1)


def _print_line(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def _print_links(lab: Lab) -> None:
    from lab import format_rate

    counters = lab.counters()
    print(f"{'link':<8}{'rate':<12}{'bytes up':<16}bytes down", file=sys.stderr)
    for link in lab.tree.links:
        counted, rate = counters[link.name], format_rate(link.rate_bytes_per_s)
        print(f"{link.name:<8}{rate:<12}{counted.sent_bytes:<16}{counted.received_bytes}", file=sys.stderr)


if __name__ == "__main__":
    run(app)
