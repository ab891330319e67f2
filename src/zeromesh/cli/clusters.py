"""`zeromesh clusters`: list the catalogue, or print one cluster as a file with the source of every constant."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer


def clusters(
    name: Annotated[str, typer.Argument(help="A preset or a TOML file to print; default: list all presets.")] = "",
) -> None:
    """List the cluster presets, or print one as a cluster file."""
    from rich.console import Console

    from zeromesh import units
    from zeromesh.cluster.catalogue import find_cluster, preset, preset_names
    from zeromesh.cluster.read import cluster_toml

    if name:
        print(cluster_toml(find_cluster(name)), end="")
        return
    width = Console().width
    for cluster in map(preset, preset_names()):
        device = cluster.device
        dtypes = [dtype for dtype in dict(device.peak_flops) if dtype in (device.matrix_dtype, "fp8")]
        rates = [f"{dtype} {units.format_flop_per_s(device.peak(dtype), 4)}" for dtype in dtypes]
        levels = [
            f"{lv.name} {lv.size} x {units.format_bytes_per_s(lv.bandwidth_bytes_per_s)}" for lv in cluster.levels
        ]
        machine = cluster.host_memory_bytes
        host = [] if machine is None else [f"{units.format_bytes(machine)} a machine"]
        facts = [f"{device.name}: {units.format_bytes(device.memory_bytes)}", *host, *rates, *levels]
        # Lines break between facts, not inside a fact.
        text = ", ".join(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts)
        print(textwrap.fill(f"{cluster.name}  {cluster.description}", width, subsequent_indent="    "))
        filled = textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        print(filled.replace("\N{NO-BREAK SPACE}", " "))
