"""`zeromesh plan`: the fastest layout that fits, and why the others lose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.cluster import Cluster
    from zeromesh.planner import Planned


@shared.described
def plan(
    context: typer.Context,
    given: shared.Described,
    wire: Annotated[str, typer.Option(help="lossless, or any: quantised wires too.")] = "lossless",
    collective: Annotated[
        str, typer.Option(help="Over several levels: hierarchical, ho_ring too, or auto: what was measured there.")
    ] = "auto",
    space: Annotated[
        str,
        typer.Option(help="zeromesh; full: tp, cp, pp and ep too, where they are not given."),
    ] = "zeromesh",
    splits: Annotated[str, typer.Option(help="How often a level may be split: none, once or all.")] = "once",
    robust: Annotated[
        bool,
        typer.Option(help="Where constants that measurements leave open decide, choose the layout of least regret."),
    ] = True,
    exact: Annotated[bool, typer.Option(help="Simulate until the optimum is proven.")] = False,
    top: Annotated[int, typer.Option(help="Candidates to list.")] = 5,
) -> None:
    """Find the fastest layout of a model on a cluster that fits in memory, and explain it."""
    from zeromesh import planner
    from zeromesh.planner.emit import EMITTERS

    shared.check_choice("--wire", wire, ("lossless", "any"))
    shared.check_choice("--collective", collective, planner.collective_choices())
    shared.check_choice("--splits", splits, ("none", "once", "all"))
    shared.check_choice("--space", space, ("zeromesh", "full"))
    shared.check_top(top)
    spec, hardware = given.load()
    degrees = {
        name: degree if space != "full" or _given(context, name) else None for name, degree in given.degrees.items()
    }
    work = given.workload(hardware, degrees)
    options = planner.Options(
        splits=splits,  # type: ignore[arg-type]  # checked above
        wires=wire,  # type: ignore[arg-type]  # checked above
        collective=collective,
        max_simulations=None if exact else planner.Options().max_simulations,
        memory_margin=given.memory_margin,
    )

    def search(hardware: Cluster) -> Planned:
        return planner.plan(
            spec,
            hardware,
            work,
            options=options,
            engine=given.engine,
            top=top,
            trace=given.report is not None,
            choice="robust" if robust else "fastest",
        )

    calibration = None
    if given.like:
        if space == "full":
            raise InputError(
                "--like knows of a run's strategy alone: give its --tp, --cp, --pp and --ep, without --space full"
            )
        had = given.like_strategy or str(search(hardware).best.candidate.strategy)
        calibration = given.calibrated(spec, hardware, work, had)
        hardware = calibration.cluster
    planned = search(hardware)
    if given.output is not None:
        shared.write(given.output, planned.plan.to_json())
    if given.report is not None:
        from zeromesh.report import plan_page

        shared.write(given.report, plan_page(planned))
    if given.emit:
        print(EMITTERS[given.emit](planned.plan, spec))
    elif given.as_json:
        print(json.dumps(planned.to_json() | ({"like": calibration.to_json()} if calibration else {}), indent=2))
    else:
        from zeromesh.report import print_plan

        if calibration:
            print(calibration.describe())
        print_plan(planned)


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
