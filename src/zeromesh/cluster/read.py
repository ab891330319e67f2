"""Cluster files: TOML with units in the values. Every complaint names the file, the key and what was expected.

::

    name = "a800-8x-hdr"
    [device]
    name = "A800-SXM4-80GB"
    memory = "80 GB"
    memory_bandwidth = "2039 GB/s"      # optional
    multiprocessors = 108               # optional: what kernels of collectives take some of
    cores = 0.5                         # optional: on CPU, cores for each device, which compute and move bytes
    [device.peak]                       # dense matrix rate
    bf16 = "312 TFLOP/s"
    [device.achievable]                 # optional: best measured matrix rate
    bf16 = "271.2 TFLOP/s"
    [[device.kernel]]                   # optional: what was measured, as many as there are; see `kernel`
    kind = "product"                    # product, attention, elementwise or optimizer
    dtype = "bf16"
    shape = [4096, 4096, 11008]         # rows, inner, outer; attention: context, head_dim; others: none
    forward = "250 TFLOP/s"             # elementwise, optimizer: a rate of bytes
    backward = "240 TFLOP/s"            # an optimizer has none
    [[level]]                           # innermost first
    name = "node"
    size = 8
    bandwidth = "200 GB/s"              # one direction, out of ONE member
    latency = "6 us"
    kind = "nvlink"                     # optional, `LINK_KINDS`; else by place: the outermost level is a network
    ports = 4                           # optional, links that the bandwidth is made of
    busy_latency = "2 ms"               # optional: on CPU, the latency while devices compute
    host_rate = "1.2 GB/s"              # optional: on CPU, bytes that one core sends and receives
    host_call = "0.5 ms"                # optional: and what a collective takes of it, whatever it carries
    shares = { all_reduce = 1.3 }       # optional: what an operation was measured to reach of both rates
    [[level.curve]]                     # optional: seconds of a whole collective as measured, as many as there are
    operation = "all_gather"
    ranks = 8                           # of the group; all groups of the level at once
    beside = "computation"              # optional: devices computed meanwhile
    seconds = { "16 KiB" = "80 us", "1 MiB" = "120 us", "64 MiB" = "3 ms" }   # by bytes out of ONE member
    [sources]                           # optional: where each value comes from
    "device.memory" = "data sheet"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from zeromesh import units
from zeromesh.cluster.chips import complete
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.curve import OPERATIONS, Curve
from zeromesh.cluster.device import MATRIX_DTYPES, Device
from zeromesh.cluster.kernel import Kernel
from zeromesh.cluster.level import Level
from zeromesh.errors import ClusterError, InputError, nearest
from zeromesh.files import parse_toml, read_text

_T = TypeVar("_T")
_REQUIRED: Any = object()


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in the TOML file at `path`; what it leaves out about a well-known device is filled in (`chips`).

    Raises:
        ClusterError: the file cannot be read, or a key is missing, unknown, unitless, negative or of the wrong type.
    """
    text = read_text(path, kind="a cluster file", error=ClusterError)
    return complete(parse_cluster(text, where=str(path)))


def parse_cluster(text: str, *, where: str = "cluster file") -> Cluster:
    """The cluster in `text`; `where` opens every message.

    Raises:
        ClusterError: as `read_cluster`.
    """
    return cluster_of(parse_toml(text, where=where, error=ClusterError), where=where)


def cluster_of(table: Mapping[str, Any], *, where: str) -> Cluster:
    """The cluster in the table of a file; raises as `read_cluster`."""
    root = _Table(table, where, "")
    root.only("name", "description", "device", "level", "sources")
    try:
        return Cluster(
            name=root.get("name", _string),
            description=root.get("description", _string, ""),
            device=_device(root.table("device")),
            levels=tuple(_level(level) for level in root.tables("level", _levels)),
            sources=tuple(sorted(root.get("sources", _strings, {}).items())),
        )
    except _Located:
        raise
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


class _Located(ClusterError):
    """A complaint that names its file and key already."""


class _Table:
    """One TOML table with the path that messages name."""

    def __init__(self, values: Mapping[str, Any], where: str, path: str) -> None:
        self.values, self.where, self.path = values, where, path

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(self, key: str, problem: str) -> _Located:
        return _Located(f"{self.where}: {self.key(key)}: {problem}")

    def only(self, *known: str) -> None:
        for name in self.values:
            if name not in known:
                raise self.fail(name, f"unknown key; {nearest(name, known)}")

    def get(self, name: str, read: Callable[[Any], _T], default: Any = _REQUIRED) -> _T:
        if name not in self.values:
            if default is _REQUIRED:
                raise self.fail(name, f"is missing; expected {_expectation(read)}")
            return default  # type: ignore[no-any-return]  # the caller's default has the reader's type
        try:
            return read(self.values[name])
        except InputError as error:
            raise self.fail(name, str(error)) from error

    def table(self, name: str, default: Any = _REQUIRED) -> _Table:
        return _Table(self.get(name, _mapping, default), self.where, self.key(name))

    def tables(self, name: str, read: Callable[[Any], Sequence[Any]], default: Any = _REQUIRED) -> list[_Table]:
        tables = self.get(name, read, default)
        return [_Table(_mapping(t), self.where, f"{self.key(name)}[{i}]") for i, t in enumerate(tables)]


@contextmanager
def _located(table: _Table) -> Iterator[None]:
    """Names the table where what is made of it complains."""
    try:
        yield
    except _Located:
        raise
    except ClusterError as error:
        raise _Located(f"{table.where}: {table.path}: {error}") from error


def _device(table: _Table) -> Device:
    table.only("name", "memory", "memory_bandwidth", "peak", "achievable", "multiprocessors", "cores", "kernel")
    return Device(
        name=table.get("name", _string),
        memory_bytes=table.get("memory", _memory),
        memory_bytes_per_s=table.get("memory_bandwidth", _bandwidth, None),
        peak_flops=_rates(table.table("peak")),
        achievable_flops=_rates(table.table("achievable", {})),
        multiprocessors=table.get("multiprocessors", _count, None),
        cores=table.get("cores", _number, None),
        kernels=tuple(_kernel(kernel) for kernel in table.tables("kernel", _kernels, [])),
    )


def _kernel(table: _Table) -> Kernel:
    table.only("kind", "dtype", "shape", "forward", "backward")
    kind = table.get("kind", _string)
    rate = _rate if kind in ("product", "attention") else _bandwidth
    forward = table.get("forward", rate)
    with _located(table):
        return Kernel(
            kind=kind,
            dtype=table.get("dtype", _string),
            shape=table.get("shape", _counts, ()),
            forward=forward,
            backward=table.get("backward", rate, forward if kind == "optimizer" else _REQUIRED),
        )


def _rates(table: _Table) -> dict[str, float]:
    table.only(*MATRIX_DTYPES)
    rates = {dtype: table.get(dtype, _rate) for dtype in table.values}
    if not rates and table.path.endswith("peak"):
        raise _Located(f'{table.where}: {table.path}: expected a rate by dtype, such as bf16 = "312 TFLOP/s"')
    return rates


def _shares(table: _Table) -> dict[str, float]:
    table.only(*OPERATIONS)
    return {operation: table.get(operation, _number) for operation in table.values}


def _level(table: _Table) -> Level:
    table.only(
        "name",
        "size",
        "bandwidth",
        "latency",
        "kind",
        "ports",
        "busy_latency",
        "host_rate",
        "host_call",
        "shares",
        "curve",
    )
    with _located(table):
        level = Level(
            name=table.get("name", _string),
            size=table.get("size", _count),
            bandwidth_bytes_per_s=table.get("bandwidth", _bandwidth),
            latency_s=table.get("latency", _latency),
            kind=table.get("kind", _string, "auto"),
            ports=table.get("ports", _count, None),
            busy_latency_s=table.get("busy_latency", _latency, None),
            host_bytes_per_s=table.get("host_rate", _bandwidth, None),
            host_call_s=table.get("host_call", _latency, 0.0),
            shares=_shares(table.table("shares", {})),
            curves=tuple(_curve(curve) for curve in table.tables("curve", _curves, [])),
        )
        _require_latency_below(level)
    return level


def _require_latency_below(level: Level) -> None:
    for curve in level.curves:
        _, longest_s = curve.pairs[-1]
        if (least_s := curve.passes * (curve.ranks - 1) * level.latency_s) >= longest_s:
            raise ClusterError(
                f"level {level.name!r}: {curve.operation} of {curve.ranks} ranks waits for {least_s:g} s of latency, "
                f"and its curve's longest message takes {longest_s:g} s: one of the two is wrong"
            )


def _curve(table: _Table) -> Curve:
    table.only("operation", "ranks", "beside", "seconds")
    beside = table.get("beside", _string, "")
    if beside not in ("", "computation"):
        raise table.fail("beside", f'expected "computation" or no such key, got {beside!r}')
    points = table.table("seconds")
    with _located(table):
        return Curve(
            operation=table.get("operation", _string),
            ranks=table.get("ranks", _count),
            points={_size(points, size): points.get(size, _latency) for size in points.values},
            beside_computation=bool(beside),
        )


def _size(table: _Table, text: str) -> float:
    try:
        return _memory(text)
    except InputError as error:
        raise table.fail(text, str(error)) from error


def _string(value: Any) -> str:
    """a string"""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"expected a string, got {value!r}")
    return value


def _count(value: Any) -> int:
    """a whole number of at least 1"""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected a whole number of at least 1, got {value!r}")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    """whole numbers of at least 1"""
    if not isinstance(value, list):
        raise InputError(f"expected a list of whole numbers of at least 1, got {value!r}")
    return tuple(_count(item) for item in value)


def _number(value: Any) -> float:
    """a number above zero"""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"expected a number above zero, got {value!r}")
    return _positive(float(value), value)


def _mapping(value: Any) -> Mapping[str, Any]:
    """a table"""
    if not isinstance(value, Mapping):
        raise InputError(f"expected a table, got {value!r}")
    return value


def _levels(value: Any) -> Sequence[Any]:
    """one [[level]] table per level, innermost first"""
    return _listed(value, _levels, least=1)


def _curves(value: Any) -> Sequence[Any]:
    """one [[level.curve]] table per curve"""
    return _listed(value, _curves)


def _kernels(value: Any) -> Sequence[Any]:
    """one [[device.kernel]] table per kernel"""
    return _listed(value, _kernels)


def _listed(value: Any, read: Callable[[Any], Sequence[Any]], least: int = 0) -> Sequence[Any]:
    if isinstance(value, list) and len(value) >= least and all(isinstance(item, Mapping) for item in value):
        return value
    raise InputError(f"expected {_expectation(read)}, got {value!r}")


def _strings(value: Any) -> dict[str, str]:
    """a table of strings"""
    return {key: _string(item) for key, item in _mapping(value).items()}


def _memory(value: Any) -> float:
    """bytes with a unit, such as "80 GB" """
    return _positive(units.parse_bytes(value), value)


def _bandwidth(value: Any) -> float:
    """a rate with a unit, such as "200 GB/s" """
    return _positive(units.parse_bytes_per_s(value), value)


def _rate(value: Any) -> float:
    """a matrix rate with a unit, such as "312 TFLOP/s" """
    return _positive(units.parse_flop_per_s(value), value)


def _latency(value: Any) -> float:
    """a time with a unit, such as "6 us" """
    seconds = units.parse_seconds(value)
    if not 0 <= seconds < math.inf:
        raise InputError(f"expected a finite time of zero or more, got {value!r}")
    return seconds


def _positive(number: float, value: Any) -> float:
    if not 0 < number < math.inf:
        raise InputError(f"expected a finite value above zero, got {value!r}")
    return number


def _expectation(read: Callable[[Any], Any]) -> str:
    return (read.__doc__ or "a value").strip()
