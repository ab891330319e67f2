"""Hardware as data: a device, the levels that join many of it, files to describe them and a catalogue."""

from zeromesh.cluster.catalogue import find_cluster, preset, preset_names
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.curve import Curve
from zeromesh.cluster.device import MATRIX_DTYPES, Device
from zeromesh.cluster.kernel import Kernel
from zeromesh.cluster.level import LINK_KINDS, Level
from zeromesh.cluster.read import cluster_toml, parse_cluster, read_cluster

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
