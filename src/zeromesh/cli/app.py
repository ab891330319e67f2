"""Assembles the commands, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import zeromesh
from zeromesh.cli import clusters, env, imports, plan, probe, rehearse, selftest, simulate, train
from zeromesh.cli.train import EXIT_INPUT
from zeromesh.cli.workload import tell
from zeromesh.errors import InputError, InternalError, ZeromeshError

IN_A_CHECKOUT = ("bench", "lab", "validate")
"""Commands that a checkout has as `make NAME`; the wheel does not have their packages."""


class Grouped(TyperCommand):
    """A command whose help groups options under their headings (`rich_help_panel`), as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # typer has click, or a copy of it
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if row := param.get_help_record(ctx):
                panel = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None)
                rows.setdefault(panel or "Options", []).append(row)
        for heading, found in rows.items():
            with formatter.section(heading):
                formatter.write_dl(found)


def plain_app(name: str, *, add_completion: bool = False) -> typer.Typer:
    """Makes a command line with plain help. Rich panels would take a third of the .3 s that help may take."""
    return typer.Typer(
        name=name,
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = plain_app("zeromesh", add_completion=True)


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


_WORK = "--model llama-7b --cluster a800-8x-hdr --world 64 --seq-len 4096 --global-batch-tokens 4194304"
for _command, _example in (
    (plan.plan, f"zeromesh plan {_WORK}"),
    (simulate.simulate, f"zeromesh simulate {_WORK} --strategy node=3,cluster=1"),
    (train.train, "zeromesh train examples/demo.toml --set run.steps=20"),
    (rehearse.rehearse, "zeromesh rehearse examples/rehearse-llama-70b.toml --world 1024"),
    (probe.probe, "torchrun --nproc-per-node 8 $(which zeromesh) probe -o here.toml"),
    (selftest.selftest, "torchrun --nproc-per-node 8 $(which zeromesh) selftest"),
    (clusters.clusters, "zeromesh clusters frontier-mi250x"),
    (env.env, "zeromesh env"),
):
    app.command(cls=Grouped, epilog=f"Example: {_example}")(_command)
app.command("import", cls=Grouped, epilog="Example: zeromesh import ds_config.json")(imports.imports)


def _needs_checkout(context: typer.Context) -> None:
    name = context.info_name
    raise InputError(f"`zeromesh {name}` needs a checkout: `make {name}`")


for _name in IN_A_CHECKOUT:
    _anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(_name, hidden=True, context_settings=_anything)(_needs_checkout)


def main() -> None:
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command line; exit with 0 done, 2 wrong input, 75 or 130 ended by a signal and saved, 1 anything else.

    An error that zeromesh raises on purpose is one line.
    """
    try:
        command()
    except InputError as error:
        tell(f"zeromesh: {error}", sys.stderr)
        sys.exit(EXIT_INPUT)
    except InternalError:
        raise
    except ZeromeshError as error:
        from zeromesh.launch.failure import end_process

        # Tells apart ranks that another launcher has started.
        who = f"rank {os.environ['RANK']} failed: " if "RANK" in os.environ else ""
        tell(f"zeromesh: {who}{error}", sys.stderr)
        end_process(1)
