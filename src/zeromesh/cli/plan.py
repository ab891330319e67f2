"""`zeromesh plan`: the layout to recommend, and why the others lose."""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.cluster import Cluster
    from zeromesh.planner import Planned


_search = functools.partial(typer.Option, rich_help_panel="Search")


@shared.described
def plan(
    context: typer.Context,
    given: shared.Described,
    wire: Annotated[str, _search(help="Wires to try: lossless, or any (quantised ones as well).")] = "lossless",
    collective: Annotated[
        str,
        _search(help="Collectives over several levels: hierarchical, ho_ring as well, or auto (those measured there)."),
    ] = "auto",
    space: Annotated[
        str, _search(help="What to search: zeromesh (the layout), or full (also tp, cp, pp and ep that are not given).")
    ] = "zeromesh",
    splits: Annotated[str, _search(help="How many levels may be split: none, once or all.")] = "once",
    within: Annotated[
        float,
        _search(
            min=0,
            max=1,
            help="Recommend a simpler layout that is slower by at most this share; 0 recommends the fastest.",
        ),
    ] = 0.02,
    exact: Annotated[bool, _search(help="Simulate until the optimum is proven.")] = False,
    top: Annotated[int, _search(help="How many candidates to list.")] = 5,
) -> None:
    """Recommend a layout of a model on a cluster: the simplest that is nearly as fast as the fastest, and why."""
    from zeromesh import planner
    from zeromesh.planner.emit import EMITTERS, ENGINES, can_express

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

    other = given.emit or ENGINES.get(given.engine, "")

    def search(hardware: Cluster, engine: str = given.engine) -> Planned:
        return planner.plan(
            spec,
            hardware,
            work,
            options=options,
            engine=engine,
            top=top,
            trace=given.report is not None,
            within=within,
            accepts=(lambda plan: can_express(other, plan, spec)) if other and engine == given.engine else None,
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
    ours = search(hardware, "zeromesh").fastest if given.engine in ENGINES else None
    if given.emit:
        from zeromesh.report import choice_lines

        print(EMITTERS[given.emit](planned.plan, spec))
        for line in (f"recommended for {given.emit}: {planned.best.simulation.named}", *choice_lines(planned)):
            print(line, file=sys.stderr)
    elif given.as_json:
        beside = {"like": calibration, "zeromesh": ours}
        found = planned.to_json() | {key: value.to_json() for key, value in beside.items() if value is not None}
        print(json.dumps(found, indent=2))
    else:
        from zeromesh.report import print_plan

        if calibration:
            print(calibration.describe())
        print_plan(planned)
        if sentence := given.compiled(spec, hardware, work, planned.best):
            print(sentence)
        if ours:
            step_s, own_s = planned.best.simulation.step_s, ours.simulation.step_s
            compared = f"{abs(step_s / own_s - 1):.1%} {'longer' if step_s > own_s else 'less'}"
            print(f"{given.engine} takes {compared} than zeromesh with its fastest layout, {ours.simulation.named}")


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
