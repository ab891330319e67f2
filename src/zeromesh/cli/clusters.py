"""`zeromesh clusters`: list the catalogue, or show one cluster with the source of every constant."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeromesh.cli import workload as shared

if TYPE_CHECKING:
    from zeromesh.cluster import Cluster


def clusters(
    name: Annotated[str, typer.Argument(help="A preset or a TOML file to show; none: list all presets.")] = "",
    as_json: shared.Json = False,
) -> None:
    """List the known clusters, or show one."""
    from zeromesh.cluster import find_cluster, preset, preset_names

    if name:
        cluster = find_cluster(name)
        print(json.dumps(_as_dict(cluster), indent=2)) if as_json else _show(cluster)
        return
    known = [preset(each) for each in preset_names()]
    print(json.dumps([_as_dict(each) for each in known], indent=2)) if as_json else _list(known)


def _as_dict(cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {
        "name": cluster.name,
        "description": cluster.description,
        "world": cluster.world,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "peak_flops": dict(device.peak_flops),
            "achievable_flops": dict(device.achievable_flops),
            "cores": device.cores,
        },
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s,
                "latency_s": level.latency_s,
                "kind": level.kind,
                "ports": level.ports,
                "busy_latency_s": level.busy_latency_s,
                "host_bytes_per_s": level.host_bytes_per_s,
                "host_call_s": level.host_call_s,
                "shares": dict(level.shares),
                "curves": [asdict(curve) for curve in level.curves],
            }
            for level in cluster.levels
        ],
        "sources": dict(cluster.sources),
    }


def _list(known: list[Cluster]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "device", "levels, innermost first", "description", box=None)
    for cluster in known:
        levels = " x ".join(f"{size} {axis}" for axis, size in cluster.axes)
        table.add_row(cluster.name, cluster.device.name, levels, cluster.description)
    Console().print(table)


def _show(cluster: Cluster) -> None:
    from rich.console import Console
    from rich.table import Table

    from zeromesh.units import format_bytes, format_bytes_per_s, format_flop_per_s, format_seconds

    sources, device = dict(cluster.sources), cluster.device
    table = Table(
        "what", "value", "source", box=None, title=f"{cluster.name}: {cluster.description}", title_justify="left"
    )
    table.add_row("device", device.name, "")
    table.add_row("memory", format_bytes(device.memory_bytes), sources.get("device.memory", ""))
    if device.memory_bytes_per_s is not None:
        rate = format_bytes_per_s(device.memory_bytes_per_s)
        table.add_row("memory bandwidth", rate, sources.get("device.memory_bandwidth", ""))
    if device.multiprocessors is not None:
        table.add_row("multiprocessors", f"{device.multiprocessors}", sources.get("device.multiprocessors", ""))
    for label, key, rates in (
        ("peak", "device.peak", device.peak_flops),
        ("achievable", "device.achievable", device.achievable_flops),
    ):
        for dtype, flops in dict(rates).items():
            table.add_row(f"{label} {dtype}", format_flop_per_s(flops, digits=4), sources.get(key, ""))
    if device.cores is not None:
        table.add_row("cores for each device", f"{device.cores:g}", sources.get("device.cores", ""))
    for level in cluster.levels:
        key = f"level.{level.name}"
        ports = f" over {level.ports} ports" if level.ports else ""
        table.add_row(f"{level.name}: size", f"{level.size}", "")
        table.add_row(
            f"{level.name}: bandwidth",
            f"{format_bytes_per_s(level.bandwidth_bytes_per_s)} {level.kind}{ports}",
            sources.get(f"{key}.bandwidth", ""),
        )
        table.add_row(f"{level.name}: latency", format_seconds(level.latency_s), sources.get(f"{key}.latency", ""))
        if level.busy_latency_s is not None:
            busy = format_seconds(level.busy_latency_s)
            table.add_row(f"{level.name}: latency beside computation", busy, sources.get(f"{key}.busy_latency", ""))
        if level.host_bytes_per_s is not None:
            rate = format_bytes_per_s(level.host_bytes_per_s)
            table.add_row(f"{level.name}: bytes through one core", rate, sources.get(f"{key}.host_rate", ""))
            call = format_seconds(level.host_call_s)
            table.add_row(f"{level.name}: core time of a call", call, sources.get(f"{key}.host_call", ""))
        for operation, share in dict(level.shares).items():
            label = f"{level.name}: share of the rates, {operation}"
            table.add_row(label, f"{share:.2f}", sources.get(f"{key}.shares", ""))
    Console().print(table)
