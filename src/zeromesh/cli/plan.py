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
    from zeromesh.cluster.cluster import Cluster
    from zeromesh.planner.evaluate import Choice
    from zeromesh.planner.plan import Planned


_search = functools.partial(typer.Option, rich_help_panel="Search")


@shared.described
def plan(
    context: typer.Context,
    given: shared.Described,
    wire: Annotated[str, _search(help="Wires to try: lossless, or any (also quantised ones).")] = "lossless",
    collective: Annotated[
        str,
        _search(help="Collectives over several levels: hierarchical, ho_ring (both), or auto (those measured there)."),
    ] = "auto",
    space: Annotated[
        str, _search(help="Search zeromesh (the layout), or full (also the tp, cp, pp and ep that are not given).")
    ] = "zeromesh",
    host: Annotated[
        str, _search(help="Shards in host memory: any stage, none, or auto (only if nothing fits without).")
    ] = "auto",
    splits: Annotated[str, _search(help="Number of levels that may be split: none, once or all.")] = "once",
    within: Annotated[
        float,
        _search(
            min=0,
            max=1,
            help="Accept a simpler layout that is slower by at most this fraction; 0 recommends the fastest.",
        ),
    ] = 0.02,
    robust: Annotated[
        bool, _search(help="Where constants that measurements leave open decide, recommend the layout of least regret.")
    ] = True,
    exact: Annotated[bool, _search(help="Simulate until the fastest layout is proven.")] = False,
    what_if: Annotated[
        list[str] | None,
        _search(help="Also plan for a changed cluster, as in cluster.bandwidth=2x,memory=141GB; may be repeated."),
    ] = None,
    strategy: Annotated[str, _search(help=f"Your layout, compared with the recommended one: {shared.STRATEGY}")] = "",
    top: Annotated[int, _search(help="Number of candidates to list.")] = 5,
) -> None:
    """Recommend a layout for a model on a cluster, with the reasons.

    The recommended layout is the simplest that is predicted nearly as fast as the fastest.
    """
    from zeromesh.planner.emit import EMITTERS, ENGINES
    from zeromesh.planner.plan import plan as search_plan
    from zeromesh.planner.search import Options, collective_choices
    from zeromesh.planner.search import search as search_fastest
    from zeromesh.planner.what_if import what_if as changed_cluster

    shared.check_choice("--wire", wire, ("lossless", "any"))
    shared.check_choice("--collective", collective, collective_choices())
    shared.check_choice("--host", host, ("auto", "any", "none"))
    shared.check_choice("--splits", splits, ("none", "once", "all"))
    shared.check_choice("--space", space, ("zeromesh", "full"))
    shared.check_top(top)
    spec, hardware = given.load()
    degrees = {name: size if space != "full" or _given(context, name) else None for name, size in given.degrees.items()}
    work = given.workload(hardware, degrees)
    options = Options(
        splits=splits,  # type: ignore[arg-type]  # checked above
        wires=wire,  # type: ignore[arg-type]  # checked above
        collective=collective,
        host=host,  # type: ignore[arg-type]  # checked above
        max_simulations=None if exact else Options().max_simulations,
        memory_margin=given.memory_margin,
    )

    other = given.emit or ENGINES.get(given.engine, "")

    def search(hardware: Cluster) -> Planned:
        return search_plan(
            spec,
            hardware,
            work,
            options=options,
            engine=given.engine,
            top=top,
            trace=given.report is not None,
            within=within,
            robust=robust,
            emit=(lambda plan: EMITTERS[other](plan, spec)) if other else None,
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
    changed = [(change, changed_cluster(hardware, change)) for change in what_if or ()]
    planned = search(hardware)
    then = [(change, search(cluster)) for change, cluster in changed]
    ours = None
    if other and not given.products:  # zeromesh has no fp8 products to compare with
        searched, evaluator = search_fastest(spec, hardware, work, options=options)
        ours = evaluator.choice(searched.best.candidate)
    if given.output is not None:
        shared.write(given.output, planned.plan.to_json())
    if given.report is not None:
        from zeromesh.report.build import plan_page

        shared.write(given.report, plan_page(planned))
    compared = _compared(given.emit or given.engine, planned, ours) if ours else ""
    yours = given.simulated(spec, hardware, work, strategy) if strategy else None
    if yours:
        compared += f"{compared and chr(10)}{_beside(planned, yours)}"
    if given.emit:
        from zeromesh.report.build import choice_lines, what_if_lines

        print(EMITTERS[given.emit](planned.plan, spec))
        named = f"recommended for {given.emit}: {planned.best.simulation.named}"
        for line in filter(None, (named, *choice_lines(planned), *what_if_lines(planned, then), compared)):
            shared.tell(line, sys.stderr)
    elif given.as_json:
        beside = {"like": calibration, "zeromesh": ours, "yours": yours}
        found = planned.to_json() | {key: value.to_json() for key, value in beside.items() if value is not None}
        if then:
            keys = ("best", "fastest")
            answers = [(change, other.to_json()) for change, other in then]
            found["what_if"] = [{"change": change} | {key: answer[key] for key in keys} for change, answer in answers]
        print(json.dumps(found, indent=2))
    else:
        from zeromesh.report.text import print_plan

        if calibration:
            shared.tell(calibration.describe(), sys.stdout)
        further = [*given.otherwise(spec, hardware, work, planned.best), *compared.splitlines()]
        print_plan(planned, then, further)


def _compared(engine: str, planned: Planned, ours: Choice) -> str:
    """Compares another engine's step with zeromesh's."""
    ratio = planned.best.simulation.step_s / ours.simulation.step_s - 1
    return (
        f"{engine} takes {abs(ratio):.1%} {'longer' if ratio > 0 else 'less'} than zeromesh with its fastest layout, "
        f"{ours.simulation.named}"
    )


def _beside(planned: Planned, yours: Choice) -> str:
    """Compares the user's own layout with the recommended one."""
    simulation = yours.simulation
    ratio = simulation.step_s / planned.best.simulation.step_s - 1
    return (
        f"yours: {simulation.named} takes {abs(ratio):.1%} {'longer' if ratio > 0 else 'less'} than the recommended "
        f"layout, and {simulation.memory_text}{'' if simulation.fits else ', which does not fit'}"
    )


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
