"""Writes a cluster as the TOML file that `read_cluster` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator

from zeromesh.cluster import Cluster, Curve, Kernel, Level
from zeromesh.units import format_bytes, format_bytes_per_s, format_flop_per_s, format_seconds

_DIGITS = 5


def cluster_toml(cluster: Cluster, *, remarks: tuple[str, ...] = ()) -> str:
    """The file's text; `remarks` stand above it as comments. Figures keep five digits."""
    lines = [*(f"# {remark}" for remark in remarks), f"name = {_text(cluster.name)}"]
    if cluster.description:
        lines.append(f"description = {_text(cluster.description)}")
    lines += ["", *_device(cluster)]
    for level in cluster.levels:
        lines += ["", *_level(level)]
    if cluster.sources:
        lines += ["", "[sources]", *(f"{_text(key)} = {_text(value)}" for key, value in cluster.sources)]
    return "\n".join(lines) + "\n"


def _device(cluster: Cluster) -> Iterator[str]:
    device = cluster.device
    yield "[device]"
    yield f"name = {_text(device.name)}"
    yield f"memory = {_text(format_bytes(device.memory_bytes, _DIGITS))}"
    if device.memory_bytes_per_s is not None:
        yield f"memory_bandwidth = {_text(format_bytes_per_s(device.memory_bytes_per_s, _DIGITS))}"
    if device.multiprocessors is not None:
        yield f"multiprocessors = {device.multiprocessors}"
    if device.cores is not None:
        yield f"cores = {device.cores:g}"
    for title, rates in (("peak", device.peak_flops), ("achievable", device.achievable_flops)):
        if rates:
            yield from ("", f"[device.{title}]")
        for dtype, rate in dict(rates).items():
            yield f"{dtype} = {_text(format_flop_per_s(rate, _DIGITS))}"
    for kernel in device.kernels:
        yield from ("", *_kernel(kernel))


def _kernel(kernel: Kernel) -> Iterator[str]:
    rate = format_flop_per_s if kernel.kind in ("product", "attention") else format_bytes_per_s
    yield "[[device.kernel]]"
    yield f"kind = {_text(kernel.kind)}"
    yield f"dtype = {_text(kernel.dtype)}"
    if kernel.shape:
        yield f"shape = {list(kernel.shape)}"
    yield f"forward = {_text(rate(kernel.forward, _DIGITS))}"
    if kernel.kind != "optimizer":
        yield f"backward = {_text(rate(kernel.backward, _DIGITS))}"


def _level(level: Level) -> Iterator[str]:
    yield "[[level]]"
    yield f"name = {_text(level.name)}"
    yield f"size = {level.size}"
    yield f"bandwidth = {_text(format_bytes_per_s(level.bandwidth_bytes_per_s, _DIGITS))}"
    yield f"latency = {_text(format_seconds(level.latency_s, _DIGITS))}"
    if level.kind != "auto":
        yield f"kind = {_text(level.kind)}"
    if level.ports is not None:
        yield f"ports = {level.ports}"
    if level.busy_latency_s is not None:
        yield f"busy_latency = {_text(format_seconds(level.busy_latency_s, _DIGITS))}"
    if level.host_bytes_per_s is not None:
        yield f"host_rate = {_text(format_bytes_per_s(level.host_bytes_per_s, _DIGITS))}"
    if level.host_call_s:
        yield f"host_call = {_text(format_seconds(level.host_call_s, _DIGITS))}"
    if level.shares:
        shares = ", ".join(f"{operation} = {share:.4g}" for operation, share in dict(level.shares).items())
        yield f"shares = {{ {shares} }}"
    for curve in level.curves:
        yield from ("", *_curve(curve))


def _curve(curve: Curve) -> Iterator[str]:
    yield "[[level.curve]]"
    yield f"operation = {_text(curve.operation)}"
    yield f"ranks = {curve.ranks}"
    if curve.beside_computation:
        yield 'beside = "computation"'
    points = (
        f"{_text(format_bytes(sent, _DIGITS))} = {_text(format_seconds(seconds, _DIGITS))}"
        for sent, seconds in curve.pairs
    )
    yield f"seconds = {{ {', '.join(points)} }}"


def _text(value: str) -> str:
    # A JSON string is a TOML basic string but for DEL, which no name here has.
    return json.dumps(value, ensure_ascii=False)
