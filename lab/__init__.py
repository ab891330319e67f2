"""Emulated clusters: network namespaces, veth pairs and token buckets on one Linux machine. Needs root."""

from lab.counters import LinkBytes, by_level, difference
from lab.lab import Lab, unavailable_reason
from lab.plan import Wiring
from lab.registry import Registry
from lab.tree import LabError, Link, LinkLevel, Place, Tree, format_rate, parse_rate, path_name

__all__ = [
    "Lab",
    "LabError",
    "Link",
    "LinkBytes",
    "LinkLevel",
    "Place",
    "Registry",
    "Tree",
    "Wiring",
    "by_level",
    "difference",
    "format_rate",
    "parse_rate",
    "path_name",
    "unavailable_reason",
]
