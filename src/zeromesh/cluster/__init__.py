"""Hardware as data: a device, the levels that join many of it, files to describe them and a catalogue.

Files are read by pydantic, which a bare GPU machine may lack (docs/first-day.md): functions that read or write them are
loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.curve import Curve
from zeromesh.cluster.device import MATRIX_DTYPES, Device
from zeromesh.cluster.kernel import Kernel
from zeromesh.cluster.level import LINK_KINDS, Level

if TYPE_CHECKING:
    from zeromesh.cluster.catalogue import find_cluster, preset, preset_names
    from zeromesh.cluster.read import cluster_toml, parse_cluster, read_cluster

_HOMES = dict.fromkeys(("find_cluster", "preset", "preset_names"), "zeromesh.cluster.catalogue") | dict.fromkeys(
    ("cluster_toml", "parse_cluster", "read_cluster"), "zeromesh.cluster.read"
)

__all__ = [
    "LINK_KINDS",
    "MATRIX_DTYPES",
    "Cluster",
    "Curve",
    "Device",
    "Kernel",
    "Level",
    "cluster_toml",
    "find_cluster",
    "parse_cluster",
    "preset",
    "preset_names",
    "read_cluster",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
