"""Emulated clusters: network namespaces, veth pairs and token buckets on one Linux machine. Needs root."""

from zeromesh.lab.counters import LinkBytes, by_level, difference
from zeromesh.lab.lab import Lab, unavailable_reason
from zeromesh.lab.plan import Wiring
from zeromesh.lab.registry import LabRecord, Registry
from zeromesh.lab.tree import Link, LinkLevel, Place, Tree, format_rate, parse_rate, path_name
from zeromesh.launch.processes import RankResult, describe_failure, raise_failed

__all__ = [
    "Lab",
    "LabRecord",
    "Link",
    "LinkBytes",
    "LinkLevel",
    "Place",
    "RankResult",
    "Registry",
    "Tree",
    "Wiring",
    "by_level",
    "describe_failure",
    "difference",
    "format_rate",
    "parse_rate",
    "path_name",
    "raise_failed",
    "unavailable_reason",
]
