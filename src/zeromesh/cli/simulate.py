"""`zeromesh simulate`: time, memory and traffic of one step of a given strategy."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.errors import InputError


@shared.described
def simulate(
    given: shared.Described,
    strategy: Annotated[str, typer.Option(help=f"The layout: {shared.STRATEGY}")],
    wire: Annotated[str, typer.Option(help="any, or lossless, which refuses quantised wires.")] = "any",
    overlap: Annotated[str, typer.Option(help="Overrides the strategy's overlap: none, gather or all.")] = "",
    top: Annotated[int, typer.Option(help="Number of micro-batches and recomputations to list, if not given.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline to a file for Perfetto.")] = None,
) -> None:
    """Predict time, memory and traffic of one training step.

    Unless given, the fastest micro-batch and recomputation that fit are chosen. The exit code is 1 if none fits.
    """
    from zeromesh.planner.emit import EMITTERS
    from zeromesh.planner.fixed import simulate_choices
    from zeromesh.planner.foreign import read_strategy
    from zeromesh.planner.plan import as_plan
    from zeromesh.simulator.division import Division
    from zeromesh.strategy import Strategy
    from zeromesh.strategy.parts import layouts_of
    from zeromesh.strategy.strategy import OVERLAPS

    shared.check_choice("--wire", wire, ("lossless", "any"))
    shared.check_top(top)
    spec, hardware = given.load()
    work = given.workload(hardware, given.degrees)
    rest = Division.of(spec, hardware, work.parallel, seq_len=given.seq_len).cluster
    strategy = read_strategy(strategy, rest.axes)
    parsed = Strategy.parse(strategy, [name for name, _ in hardware.axes])
    if overlap:
        shared.check_choice("--overlap", overlap, OVERLAPS)
        parsed = replace(parsed, overlap=overlap)  # type: ignore[arg-type]  # checked
    if wire == "lossless" and parsed.quantised:
        raise InputError(
            f"--wire lossless takes no strategy with quantised wires, got {parsed}: leave int8 and int4 out of it, or "
            "give --wire any"
        )
    layouts_of(parsed, rest.axes, {})
    calibration = None
    if given.like:
        calibration = given.calibrated(spec, hardware, work, given.like_strategy or strategy)
        hardware = calibration.cluster
    choices = simulate_choices(
        spec,
        hardware,
        work,
        parsed,
        engine=given.engine,
        memory_margin=given.memory_margin,
        top=top,
        trace=bool(given.report or trace),
    )
    chosen = choices[0]
    plan = as_plan(chosen, hardware, work)
    if given.output is not None:
        shared.write(given.output, plan.to_json())
    if trace is not None and chosen.simulation.trace is not None:
        shared.write(trace, chosen.simulation.trace.to_json())
    if given.report is not None:
        from zeromesh.report.build import simulation_page

        shared.write(given.report, simulation_page(choices, hardware))
    if given.emit:
        print(EMITTERS[given.emit](plan, spec))
    elif given.as_json:
        found = chosen.to_json() | {"candidates": [choice.to_json() for choice in choices]}
        print(json.dumps(found | ({"like": calibration.to_json()} if calibration else {}), indent=2))
    else:
        from zeromesh.report.text import print_simulation

        if calibration:
            shared.tell(calibration.describe(), sys.stdout)
        print_simulation(choices, hardware, [*given.otherwise(spec, hardware, work, chosen)])
    if not chosen.simulation.fits:
        raise typer.Exit(1)
