"""`zeromesh probe`: measures the links and devices of one or several machines."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.measure.probe import Probe
    from zeromesh.measure.work import Work

Ranks = Annotated[int, typer.Option(help="Number of processes to start; not under torchrun.")]
MeshText = Annotated[
    str, typer.Option("--mesh", metavar="AXIS=SIZE,...", help="Levels, outermost first, such as cluster=2,node=4.")
]


def probe(
    ranks: Ranks = 0,
    mesh: MeshText = "",
    model: Annotated[
        str, typer.Option(help="Also measure kernels at the shapes of this model: a preset or a config.json.")
    ] = "",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype of the model's computation; default: fp32 and bf16.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence of the model.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Sequences per micro-batch of the model.")] = 1,
    kernels: Annotated[
        str, typer.Option(help="Kernels of the model's blocks: eager, or compiled by torch.compile.")
    ] = "eager",
    rounds: Annotated[int, typer.Option(help="Number of timings per size.")] = 16,
    seconds: Annotated[float, typer.Option(help="Approximate seconds per level.")] = 12.0,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Write the file even if timings are noisy.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "measured",
    as_json: Annotated[bool, typer.Option("--json", help="Print the timings as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The cluster file to write; default: print it.")
    ] = None,
) -> None:
    """Measure links and devices, and write a cluster file.

    `zeromesh plan` and `simulate` read the file. Under torchrun the probe measures all ranks, otherwise it starts
    processes on this machine, one per device. Without --mesh it finds the levels, and prints the source of each and
    those it could not find. A single rank has no links: its device is measured, and copies to and steps on the host.
    """
    from zeromesh.cli.measuring import mesh_of, starting_ranks
    from zeromesh.cli.workload import write
    from zeromesh.cluster.read import cluster_toml
    from zeromesh.measure.probe import probe as measure

    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"the cluster file cannot be written: {output.absolute().parent} is no folder")
    work = _work(model, dtype, seq_len, micro_batch, kernels)
    with starting_ranks():
        started = mesh_of(mesh, ranks)
        found = measure(
            started if mesh else None,
            ranks=prod(started.values()),
            name=name,
            rounds=rounds,
            seconds=seconds,
            work=work,
        )
    if found is None:
        return
    if as_json:
        print(json.dumps(found.raw))
    else:
        _print(found)
    if not accept_noise:
        found.require_trust()
    text = cluster_toml(found.cluster, remarks=tuple(f"not found: {each}" for each in found.missing))
    if output is not None:
        write(output, text)
    elif not as_json:
        print(f"\n{text}", end="")


def _work(model: str, dtypes: list[str] | None, seq_len: int, micro_batch: int, kernels: str) -> Work | None:
    if not model:
        if kernels != "eager":
            raise InputError(f"--kernels {kernels} is measured at the shapes of a model: give --model")
        return None
    from zeromesh.measure.work import DTYPES, Work
    from zeromesh.model.load import load_model

    spec = load_model(model, seq_len=seq_len, trainable="all", dtype="fp32")
    return Work.of(spec, dtypes=dtypes or DTYPES, sequences=micro_batch, tokens=seq_len, kernels=kernels)


def _print(found: Probe) -> None:
    from rich.console import Console
    from rich.table import Table

    from zeromesh.cli.workload import tell
    from zeromesh.units import format_bytes_per_s, format_seconds

    table = Table("level", "ranks", "operation", "one rank sends", "latency", "spread", "halves differ", box=None)
    for level in found.levels:
        for operation, one in level.fits.items():
            rate, latency = format_bytes_per_s(one.line.bytes_per_s), format_seconds(one.line.latency_s)
            table.add_row(
                level.name, str(level.size), operation, rate, latency, f"{one.spread:.0%}", f"{one.disagreement:.0%}"
            )
    if found.levels:
        Console().print(table)
    else:
        tell("no links: a single rank was measured, its device and its host", sys.stdout)
    for key, source in found.cluster.sources:
        if key.endswith(".size") or key == "device.kernel":
            tell(f"{key.removeprefix('level.').removesuffix('.size')}: {source}", sys.stdout)
    for each in found.missing:
        tell(f"not found: {each}", sys.stdout)
