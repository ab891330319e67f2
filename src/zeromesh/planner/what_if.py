"""Changed clusters, for `--what-if "cluster.bandwidth=2x"`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Curve, Level
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.units import parse_bytes, parse_bytes_per_s, parse_flop_per_s, parse_seconds

_TIMES = re.compile(r"\s*(\d+\.?\d*|\.\d+)x\s*")

_MATRIX = ("product", "attention")
"""Kinds of kernels whose rate is that of matrix products."""


def what_if(cluster: Cluster, change: str) -> Cluster:
    """The cluster with a change: one or several of `LEVEL.bandwidth`, `LEVEL.latency`, `memory` and `flops` (of the
    device), separated by commas, each `=` a factor (`2x`) or a value with its unit (`400 Gbit/s`).

    Raises:
        InputError: the change names something else, or its value cannot be read.

    >>> from zeromesh.cluster.catalogue import find_cluster
    >>> what_if(find_cluster("h100-8x-ndr"), "cluster.latency=0.5x,memory=2x").device.memory_bytes
    160000000000.0
    """
    for term in change.split(","):
        key, _, value = (part.strip() for part in term.partition("="))
        level, _, quantity = key.rpartition(".")
        if key in _DEVICE:
            cluster = replace(cluster, device=_DEVICE[key](cluster.device, value))
        elif quantity in _LEVEL and level in dict(cluster.axes):
            faster = [_LEVEL[quantity](each, value) if each.name == level else each for each in cluster.levels]
            cluster = replace(cluster, levels=tuple(faster))
        else:
            known = [f"{name}.{one}" for name, _ in cluster.axes for one in _LEVEL]
            raise InputError(
                f"--what-if changes {', '.join(known)}, memory or flops, as in {known[0]}=2x; got {term.strip()!r}"
            )
    return cluster


def _factor(value: str, now: float, parse: Callable[[object], float]) -> float:
    """The factor by which a quantity changes from `now`."""
    if match := _TIMES.fullmatch(value):
        factor = float(match[1])
    else:
        try:
            factor = parse(value) / (now or 1.0)
        except InputError as error:
            raise InputError(f"--what-if: {error}; or a factor, such as 2x") from error
    if factor <= 0:
        raise InputError(f"--what-if takes factors and values above 0, got {value}")
    return factor


def _memory(device: Device, value: str) -> Device:
    return replace(device, memory_bytes=device.memory_bytes * _factor(value, device.memory_bytes, parse_bytes))


def _flops(device: Device, value: str) -> Device:
    factor = _factor(value, device.peak(), parse_flop_per_s)
    return replace(
        device,
        peak_flops={dtype: rate * factor for dtype, rate in dict(device.peak_flops).items()},
        achievable_flops={dtype: rate * factor for dtype, rate in dict(device.achievable_flops).items()},
        kernels=tuple(kernel.times(factor) if kernel.kind in _MATRIX else kernel for kernel in device.kernels),
    )


def _bandwidth(level: Level, value: str) -> Level:
    factor = _factor(value, level.bandwidth_bytes_per_s, parse_bytes_per_s)
    curves = tuple(_with_curve(level, curve, rate=factor) for curve in level.curves)
    return replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor, curves=curves)


def _latency(level: Level, value: str) -> Level:
    factor = _factor(value, level.latency_s, parse_seconds)
    busy = None if level.busy_latency_s is None else level.busy_latency_s * factor
    curves = tuple(_with_curve(level, curve, latency=factor) for curve in level.curves)
    return replace(level, latency_s=level.latency_s * factor, busy_latency_s=busy, curves=curves)


def _with_curve(level: Level, curve: Curve, *, rate: float = 1.0, latency: float = 1.0) -> Curve:
    """The curve with its latency, and the rest of its seconds, changed by factors ([Note: Curve])."""
    step_s = level.busy_latency_s if curve.beside_computation and level.busy_latency_s else level.latency_s
    steps_s, launch_s = curve.passes * (curve.ranks - 1) * step_s, default_constants().launch_s
    points = {
        sent: launch_s + steps_s * latency + max(seconds - launch_s - steps_s, 1e-9) / rate
        for sent, seconds in curve.pairs
    }
    return replace(curve, points=points)


_DEVICE: dict[str, Callable[[Device, str], Device]] = {"memory": _memory, "flops": _flops}
_LEVEL: dict[str, Callable[[Level, str], Level]] = {"bandwidth": _bandwidth, "latency": _latency}
