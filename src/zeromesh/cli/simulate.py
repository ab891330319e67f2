"""`zeromesh simulate`: what one step of a given strategy takes, holds and sends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.errors import InputError


def simulate(
    model: shared.Model,
    cluster: shared.ClusterName,
    seq_len: shared.SeqLen,
    global_batch_tokens: shared.GlobalBatchTokens,
    strategy: Annotated[str, typer.Option(help="axis=stage terms, innermost first, or a preset such as zero3.")],
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
    wire: Annotated[str, typer.Option(help="any, or lossless: refuse a strategy with quantised wires.")] = "any",
    memory_margin: shared.Margin = 0.08,
    engine: shared.Engine = "zeromesh",
    overlap: Annotated[str, typer.Option(help="Replaces the strategy's: none, gather or all.")] = "",
    like: shared.Like = "",
    like_strategy: shared.LikeStrategy = "",
    top: Annotated[int, typer.Option(help="Micro-batches and recomputations to list, of those left open.")] = 1,
    as_json: shared.Json = False,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    output: shared.Output = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline, for Perfetto.")] = None,
    emit: Annotated[
        str, typer.Option(help="Print a configuration: fsdp2, deepspeed, megatron-fsdp or torchtitan.")
    ] = "",
) -> None:
    """Simulate one training step; micro-batch and recomputation left open are chosen for it."""
    from zeromesh import planner
    from zeromesh.planner.emit import EMITTERS
    from zeromesh.simulator import find_engine
    from zeromesh.simulator.division import Division
    from zeromesh.strategy import Strategy, layouts_of
    from zeromesh.strategy.strategy import OVERLAPS

    shared.check_choice("--wire", wire, ("lossless", "any"))
    shared.check_margin(memory_margin)
    shared.check_top(top)
    if emit:
        shared.check_choice("--emit", emit, tuple(EMITTERS))
    find_engine(engine)
    spec, hardware = shared.load(model, cluster, world, seq_len, trainable)
    work = shared.workload(
        hardware,
        seq_len,
        global_batch_tokens,
        micro_batch,
        grad_dtype,
        activation_checkpointing,
        optimizer,
        ownership,
        degrees={"tp": tp, "cp": cp, "pp": pp, "ep": ep},
        pp_schedule=pp_schedule,
        pp_chunks=pp_chunks,
        sequence_parallel=sequence_parallel,
    )
    rest = Division.of(spec, hardware, work.parallel, seq_len=seq_len).cluster
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
    if like:
        calibration = shared.calibrated(
            like, spec, hardware, work, like_strategy or strategy, engine=engine, memory_margin=memory_margin
        )
        hardware = calibration.cluster
    choices = planner.simulate_choices(
        spec, hardware, work, parsed, engine=engine, memory_margin=memory_margin, top=top, trace=bool(report or trace)
    )
    chosen = choices[0]
    plan = planner.as_plan(chosen, hardware, work)
    if output is not None:
        shared.write(output, plan.to_json())
    if trace is not None and chosen.simulation.trace is not None:
        shared.write(trace, chosen.simulation.trace.to_json())
    if report is not None:
        from zeromesh.report import simulation_page

        shared.write(report, simulation_page(choices, hardware))
    if emit:
        print(EMITTERS[emit](plan, spec))
    elif as_json:
        found = chosen.to_json() | {"candidates": [choice.to_json() for choice in choices]}
        print(json.dumps(found | ({"like": calibration.to_json()} if calibration else {}), indent=2))
    else:
        from zeromesh.report import print_simulation

        if calibration:
            print(calibration.describe())
        print_simulation(choices, hardware)
