"""`zeromesh clusters`: list the catalogue, or print one cluster as a file with the source of every constant."""

from __future__ import annotations

from typing import Annotated

import typer


def clusters(
    name: Annotated[str, typer.Argument(help="A preset or a TOML file to print as one; none: list all presets.")] = "",
) -> None:
    """List the known clusters, or print one as the file that describes it."""
    from rich.console import Console
    from rich.table import Table

    from zeromesh.cluster import cluster_toml, find_cluster, preset, preset_names

    if name:
        print(cluster_toml(find_cluster(name)), end="")
        return
    table = Table("name", "device", "levels, innermost first", "description", box=None)
    for cluster in map(preset, preset_names()):
        levels = " x ".join(f"{size} {axis}" for axis, size in cluster.axes)
        table.add_row(cluster.name, cluster.device.name, levels, cluster.description)
    Console().print(table)
