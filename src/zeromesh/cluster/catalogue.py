"""The catalogue of cluster presets: `presets.toml`, with a source for every constant."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zeromesh.cluster.chips import named_device
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.read import cluster_of, read_cluster
from zeromesh.errors import ClusterError, nearest


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads((files("zeromesh.cluster") / "presets.toml").read_text(encoding="utf-8"))


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(_catalogue()["clusters"]))


@cache
def preset(name: str) -> Cluster:
    """Returns the preset called `name`. Raises ClusterError, which lists the nearest names, if there is none."""
    known = _catalogue()
    clusters = known["clusters"]
    others = {made["also"]: name for name, made in clusters.items() if "also" in made}
    name = others.get(name, name)
    if name not in clusters:
        raise ClusterError(
            f"unknown cluster {name!r}, neither a preset nor the path of a TOML file; {nearest(name, preset_names())}"
        )
    made = clusters[name]
    device, source = named_device(made["device"])
    sources = {f"device.{key}": source for key in device if key != "name"}
    levels = []
    for own in [*known["nodes"][made["node"]], *([made["network"]] if "network" in made else [])]:
        level = known["links"][own["link"]] | own
        del level["link"]
        sources[f"level.{own['name']}.bandwidth"] = level.pop("source")
        sources[f"level.{own['name']}.latency"] = level.pop("latency_source")
        levels.append(level)
    table = {"name": name, "description": made["description"], "device": device, "level": levels, "sources": sources}
    if "host_memory" in made:
        table["host_memory"], sources["host_memory"] = made["host_memory"], made["host_memory_source"]
    return cluster_of(table, where=f"preset {name}")


def find_cluster(name_or_path: str | Path) -> Cluster:
    """Returns a preset by name, or reads the cluster file at a path (anything with a `/`, or that ends in `.toml`).
    Raises ClusterError if neither exists, or the file is invalid."""
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or isinstance(name_or_path, Path):
        return read_cluster(text)
    return preset(text)
