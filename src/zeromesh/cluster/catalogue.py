"""The catalogue of cluster presets: one TOML file each in `presets/`, with a source for every constant."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.read import parse_cluster, read_cluster
from zeromesh.errors import ClusterError, nearest


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    folder = files("zeromesh.cluster") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


@cache
def preset(name: str) -> Cluster:
    """The preset called `name`.

    Raises:
        ClusterError: there is none; the message lists the nearest names.
    """
    if name not in preset_names():
        raise ClusterError(
            f"unknown cluster {name!r}, neither a preset nor the path of a TOML file; {nearest(name, preset_names())}"
        )
    text = (files("zeromesh.cluster") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_cluster(text, where=f"preset {name}")


def find_cluster(name_or_path: str | Path) -> Cluster:
    """A preset by name, or the cluster file at a path (anything with a `/` or that ends in `.toml`).

    Raises:
        ClusterError: neither is there, or the file is invalid.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or isinstance(name_or_path, Path):
        return read_cluster(text)
    return preset(text)
