"""Known devices: those of presets, and the values that a cluster file may leave out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from zeromesh import units
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device


def complete(cluster: Cluster) -> Cluster:
    """Fills in the memory bandwidth, achievable rate and multiprocessors of a cluster's device, if its file does not
    state them.

    Stated values are never changed, and an unknown device stays as it is. If a stated peak is not above the chip's
    achievable rate, the device is a slower version, whose achievable rate is unknown.
    """
    device = cluster.device
    chip = _chip(device)
    if chip is None:
        return cluster
    filled = device
    sources = dict(cluster.sources)
    if device.memory_bytes_per_s is None:
        filled = replace(filled, memory_bytes_per_s=units.parse_bytes_per_s(chip["memory_bandwidth"]))
        sources.setdefault("device.memory_bandwidth", chip["source"])
    if not device.achievable_flops and device.matrix_dtype == "bf16":
        known = {dtype: units.parse_flop_per_s(rate) for dtype, rate in chip.get("achievable", {}).items()}
        peaks = dict(device.peak_flops)
        achievable = {dtype: rate for dtype, rate in known.items() if rate < peaks.get(dtype, 0.0)}
        if achievable:
            filled = replace(filled, achievable_flops=achievable)
            sources.setdefault("device.achievable", chip["source"])
    if device.multiprocessors is None and "multiprocessors" in chip:
        filled = replace(filled, multiprocessors=chip["multiprocessors"])
        sources.setdefault("device.multiprocessors", chip["source"])
    return replace(cluster, device=filled, sources=tuple(sorted(sources.items())))


def named_device(name: str) -> tuple[dict[str, Any], str]:
    """Returns the device of a preset, as a table of a cluster file, and its source."""
    chip = next(chip for chip in _chips() if chip.get("name") == name)
    return {key: value for key, value in chip.items() if key not in ("match", "source")}, chip["source"]


def _chip(device: Device) -> Mapping[str, Any] | None:
    """Returns the version, of the chip in the device's name, whose memory is nearest; None if the chip is unknown."""
    tokens = set(re.findall(r"[a-z]*\d+[a-z]?", device.name.lower()))
    fitting = [chip for chip in _chips() if tokens & set(chip["match"])]
    return min(fitting, key=lambda c: abs(units.parse_bytes(c["memory"]) - device.memory_bytes), default=None)


@cache
def _chips() -> tuple[Mapping[str, Any], ...]:
    text = (files("zeromesh.cluster") / "chips.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["chip"])
