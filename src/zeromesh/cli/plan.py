"""`zeromesh plan`: the fastest layout that fits, and why the others lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.cluster import Cluster
    from zeromesh.planner import Planned

_OF_OUR_SPACE = (
    "grad_dtype",
    "optimizer",
    "ownership",
    "tp",
    "cp",
    "pp",
    "ep",
    "pp_schedule",
    "pp_chunks",
    "sequence_parallel",
    "wire",
    "collective",
    "memory_margin",
    "engine",
    "like",
    "like_strategy",
    "splits",
    "robust",
    "exact",
    "report",
    "output",
    "emit",
)
"""Options that a paper's own space does not take."""


def plan(
    context: typer.Context,
    model: shared.Model,
    cluster: shared.ClusterName,
    seq_len: shared.SeqLen,
    global_batch_tokens: shared.GlobalBatchTokens,
    world: shared.World = 0,
    micro_batch: shared.MicroBatch = 0,
    trainable: shared.Trainable = "all",
    grad_dtype: shared.GradDtype = "fp32",
    optimizer: shared.Optimizer = "adamw",
    ownership: shared.Ownership = "slices",
    activation_checkpointing: shared.Checkpointing = "auto",
    tp: shared.Tp = 1,
    cp: shared.Cp = 1,
    pp: shared.Pp = 1,
    ep: shared.Ep = 1,
    pp_schedule: shared.PpSchedule = "1f1b",
    pp_chunks: shared.PpChunks = 0,
    sequence_parallel: shared.SequenceParallel = True,
    wire: Annotated[str, typer.Option(help="lossless, or any: quantised wires too.")] = "lossless",
    collective: Annotated[
        str, typer.Option(help="Over several levels: hierarchical, ho_ring too, or auto: what was measured there.")
    ] = "auto",
    memory_margin: shared.Margin = 0.08,
    engine: shared.Engine = "zeromesh",
    space: Annotated[
        str,
        typer.Option(
            help="zeromesh; full: tp, cp, pp and ep too, where they are not given; or a paper's own: amsp, paro, mics."
        ),
    ] = "zeromesh",
    splits: Annotated[str, typer.Option(help="How often a level may be split: none, once or all.")] = "once",
    robust: Annotated[
        bool,
        typer.Option(help="Where constants that measurements leave open decide, choose the layout of least regret."),
    ] = True,
    exact: Annotated[bool, typer.Option(help="Simulate until the optimum is proven.")] = False,
    like: shared.Like = "",
    like_strategy: Annotated[
        str, typer.Option(help="The layout that --like's run had; the plan's own where not given.")
    ] = "",
    top: Annotated[int, typer.Option(help="Candidates to list.")] = 5,
    as_json: shared.Json = False,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    output: shared.Output = None,
    emit: Annotated[
        str, typer.Option(help="Print a configuration: fsdp2, deepspeed, megatron-fsdp or torchtitan.")
    ] = "",
) -> None:
    """Find the fastest layout of a model on a cluster that fits in memory, and explain it."""
    from zeromesh import planner
    from zeromesh.planner.emit import EMITTERS
    from zeromesh.planner.published import SPACES, search_published
    from zeromesh.simulator import find_engine

    shared.check_choice("--wire", wire, ("lossless", "any"))
    shared.check_choice("--collective", collective, planner.collective_choices())
    shared.check_choice("--splits", splits, ("none", "once", "all"))
    shared.check_choice("--space", space, ("zeromesh", "full", *SPACES))
    shared.check_margin(memory_margin)
    if emit:
        shared.check_choice("--emit", emit, tuple(EMITTERS))
    shared.check_top(top)
    find_engine(engine)
    spec, hardware = shared.load(model, cluster, world, seq_len, trainable)
    given = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    work = shared.workload(
        hardware,
        seq_len,
        global_batch_tokens,
        micro_batch,
        grad_dtype,
        activation_checkpointing,
        optimizer,
        ownership,
        degrees={name: degree if space != "full" or _given(context, name) else None for name, degree in given.items()},
        pp_schedule=pp_schedule,
        pp_chunks=pp_chunks,
        sequence_parallel=sequence_parallel,
    )
    if space in SPACES:
        _refuse_given(context, space)
        ranking = search_published(space, spec, hardware, work)
        if as_json:
            print(json.dumps(ranking.to_json(), indent=2))
        else:
            from zeromesh.report import print_published

            print_published(ranking, top)
        return
    options = planner.Options(
        splits=splits,  # type: ignore[arg-type]  # checked above
        wires=wire,  # type: ignore[arg-type]  # checked above
        collective=collective,
        max_simulations=None if exact else planner.Options().max_simulations,
        memory_margin=memory_margin,
    )

    def search(hardware: Cluster) -> Planned:
        return planner.plan(
            spec,
            hardware,
            work,
            options=options,
            engine=engine,
            top=top,
            trace=report is not None,
            choice="robust" if robust else "fastest",
        )

    calibration = None
    if like:
        if space == "full":
            raise InputError(
                "--like knows of a run's strategy alone: give its --tp, --cp, --pp and --ep, without --space full"
            )
        had = like_strategy or str(search(hardware).best.candidate.strategy)
        calibration = shared.calibrated(like, spec, hardware, work, had, engine=engine, memory_margin=memory_margin)
        hardware = calibration.cluster
    planned = search(hardware)
    if output is not None:
        shared.write(output, planned.plan.to_json())
    if report is not None:
        from zeromesh.report import plan_page

        shared.write(report, plan_page(planned))
    if emit:
        print(EMITTERS[emit](planned.plan, spec))
    elif as_json:
        print(json.dumps(planned.to_json() | ({"like": calibration.to_json()} if calibration else {}), indent=2))
    else:
        from zeromesh.report import print_plan

        if calibration:
            print(calibration.describe())
        print_plan(planned)


def _refuse_given(context: typer.Context, space: str) -> None:
    """Raises InputError for options on the command line that the space does not take."""
    flags = {parameter.name: parameter.opts[-1] for parameter in context.command.params}
    given = [flags[name] for name in _OF_OUR_SPACE if _given(context, name)]
    if given:
        raise InputError(
            f"--space {space} answers by its paper's own memory formula and objective, which know nothing of "
            f"{', '.join(given)}: leave that out, or give the strategy that it prints to `zeromesh simulate`"
        )


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
