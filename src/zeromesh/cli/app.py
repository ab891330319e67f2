"""Assembles the commands, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import zeromesh
from zeromesh.cli import clusters, env, plan, probe, rehearse, selftest, simulate, train
from zeromesh.cli.train import EXIT_INPUT
from zeromesh.errors import InputError, InternalError, ZeromeshError

IN_A_CHECKOUT = ("bench", "lab", "validate")
"""Commands that a checkout has as `make NAME`; the wheel does not have their packages."""


def plain_app(name: str) -> typer.Typer:
    """A command line with plain help: rich panels would cost a third of the .3 s that help may take."""
    return typer.Typer(
        name=name,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = plain_app("zeromesh")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zeromesh {zeromesh.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A ZeRO stage for every level of the network: plan, simulate and train sharded PyTorch models."""


app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(train.train)
app.command()(rehearse.rehearse)
app.command()(probe.probe)
app.command()(selftest.selftest)
app.command()(clusters.clusters)
app.command()(env.env)


def _needs_checkout(context: typer.Context) -> None:
    name = context.info_name
    raise InputError(f"`zeromesh {name}` needs a checkout: `make {name}`")


for _name in IN_A_CHECKOUT:
    _anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(_name, hidden=True, context_settings=_anything)(_needs_checkout)


def main() -> None:
    """The entry point of `zeromesh`."""
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command line; exit with 0 done, 2 wrong input, 75 preempted and saved, 1 anything else.

    An error that zeromesh raises on purpose is one line.
    """
    try:
        command()
    except InputError as error:
        print(f"zeromesh: {error}", file=sys.stderr)
        sys.exit(EXIT_INPUT)
    except InternalError:
        raise
    except ZeromeshError as error:
        from zeromesh.launch.failure import end_process

        # Ranks that another launcher has started are told apart.
        who = f"rank {os.environ['RANK']} failed: " if "RANK" in os.environ else ""
        print(f"zeromesh: {who}{error}", file=sys.stderr)
        end_process(1)


if __name__ == "__main__":
    main()
