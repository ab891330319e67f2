"""Cluster files: TOML with units in the values. Every error message names the file, the key and the expected value.

::

    name = "a800-8x-hdr"
    host_memory = "2 TB"                # optional: of one machine (a `node`, or a member of the innermost level)
    host_copy = "25 GB/s"               # optional, measured: between it and a device, in both directions at once
    host_step = "60 GB/s"               # optional, measured: of that memory, for optimizer steps of all its ranks
    [device]
    name = "A800-SXM4-80GB"
    memory = "80 GB"
    memory_bandwidth = "2039 GB/s"      # optional
    multiprocessors = 108               # optional: kernels of collectives take some of them
    cores = 0.5                         # optional: on CPU, cores for each device, which compute and move bytes
    [device.peak]                       # dense matrix rate
    bf16 = "312 TFLOP/s"
    [device.achievable]                 # optional: best measured matrix rate
    bf16 = "271.2 TFLOP/s"
    [[device.kernel]]                   # optional: measured kernels, any number; see `kernel`
    kind = "product"                    # product, attention, elementwise or optimizer
    dtype = "bf16"
    shape = [4096, 4096, 11008]         # rows, inner, outer; attention: context, head_dim; others: none
    forward = "250 TFLOP/s"             # elementwise, optimizer: a rate of bytes
    backward = "240 TFLOP/s"            # an optimizer has none
    [[level]]                           # innermost first
    name = "node"
    size = 8
    bandwidth = "200 GB/s"              # one direction, out of ONE member
    down = "100 GB/s"                   # optional: into ONE member, if it differs; collectives take the slower
    latency = "6 us"
    kind = "nvlink"                     # optional, `LINK_KINDS`; else by place: the outermost level is a network
    ports = 4                           # optional, links that the bandwidth is made of
    busy_latency = "2 ms"               # optional: on CPU, the latency while devices compute
    host_rate = "1.2 GB/s"              # optional: on CPU, bytes that one core sends and receives
    host_call = "0.5 ms"                # optional: on CPU, further processor time of a collective, at any size
    shares = { all_reduce = 1.3 }       # optional: measured share of both rates, by operation
    [[level.curve]]                     # optional: measured seconds of a whole collective, any number
    operation = "all_gather"
    ranks = 8                           # of the group; all groups of the level at once
    beside = "computation"              # optional: devices computed meanwhile
    seconds = { "16 KiB" = "80 us", "1 MiB" = "120 us", "64 MiB" = "3 ms" }   # by bytes out of ONE member
    [sources]                           # optional: where each value comes from
    "device.memory" = "data sheet"
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from zeromesh import units
from zeromesh.cluster.chips import complete
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import MATRIX_DTYPES, Device, Kernel
from zeromesh.cluster.level import OPERATIONS, Curve, Level
from zeromesh.errors import ClusterError, InputError, nearest
from zeromesh.files.users import parse_toml, read_text

_DIGITS = 5
"""Digits of a written figure."""


def read_cluster(path: str | Path) -> Cluster:
    """Reads the cluster in the TOML file at `path`, and fills in missing values of a well-known device (`chips`).
    Raises ClusterError if the file cannot be read, or a key is missing, unknown, unitless, negative or of the wrong
    type."""
    text = read_text(path, kind="a cluster file", error=ClusterError)
    return complete(parse_cluster(text, where=str(path)))


def parse_cluster(text: str, *, where: str = "cluster file") -> Cluster:
    """Parses the cluster in `text`; `where` begins every message. Raises ClusterError as `read_cluster` does."""
    return cluster_of(parse_toml(text, where=where, error=ClusterError), where=where)


def cluster_of(table: Mapping[str, Any], *, where: str) -> Cluster:
    """Makes a cluster from a file's table. Raises as `read_cluster` does."""
    try:
        return _Cluster.model_validate(table).made
    except ValidationError as error:
        raise ClusterError(f"{where}: " + "\n  ".join(dict.fromkeys(map(_complaint, error.errors())))) from None


def cluster_toml(cluster: Cluster, *, remarks: tuple[str, ...] = ()) -> str:
    """Returns the text of a file for `read_cluster`; `remarks` precede it as comments. Figures keep five digits."""
    table = _Cluster.of(cluster).model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    return "\n".join([*(f"# {remark}" for remark in remarks), *_toml(table, "")]).replace("\n\n\n", "\n\n") + "\n"


def _toml(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yields the values of a table first, then its sub-tables."""
    below = {k: v for k, v in table.items() if _is_tables(v) or (isinstance(v, Mapping) and k not in _INLINE)}
    yield from (f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in below)
    for key, value in below.items():
        name = f"{path}{key}"
        for each in value if _is_tables(value) else (value,):
            yield from ("", f"[[{name}]]" if _is_tables(value) else f"[{name}]", *_toml(each, f"{name}."))


_INLINE = ("shares", "seconds")
"""Tables that are written on one line."""


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value)


def _key(key: str) -> str:
    return key if key.isidentifier() else _value(key)


def _value(value: Any) -> str:
    # A JSON string is a TOML basic string, except for DEL, which no name here has.
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


# ---- values: how each is read from a file, and written to one


def _quantity(
    parse: Callable[[object], float], write: Callable[[float, int], str], least: float, expected: str
) -> tuple[BeforeValidator, PlainSerializer]:
    """Makes a field for numbers with a unit, finite and above `least`."""

    def read(value: Any) -> float:
        number = parse(value)
        if not least < number < math.inf:
            raise InputError(f"expected {expected}, got {value!r}")
        return number

    return BeforeValidator(read), PlainSerializer(lambda value: write(value, _DIGITS))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"expected a string, got {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected a whole number of at least 1, got {value!r}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"expected a number above zero, got {value!r}")
    return float(value)


def _known(names: Sequence[str], value: str) -> str:
    if value not in names:
        raise InputError(f"unknown key; {nearest(value, names)}")
    return value


_BELOW_ZERO = -5e-324
_ABOVE = "a finite value above zero"
_BANDWIDTH = _quantity(units.parse_bytes_per_s, units.format_bytes_per_s, 0, _ABOVE)
_FLOPS = _quantity(units.parse_flop_per_s, units.format_flop_per_s, 0, _ABOVE)
Text = Annotated[str, BeforeValidator(_text), Field(description="a string")]
Count = Annotated[int, BeforeValidator(_count), Field(description="a whole number of at least 1")]
Number = Annotated[float, *_quantity(_number, lambda value, _: float(f"{value:.4g}"), 0, _ABOVE)]
Bytes = Annotated[
    float,
    *_quantity(units.parse_bytes, units.format_bytes, 0, _ABOVE),
    Field(description='bytes with a unit, such as "80 GB"'),
]
Bandwidth = Annotated[float, *_BANDWIDTH, Field(description='a rate with a unit, such as "200 GB/s"')]
Flops = Annotated[float, *_FLOPS, Field(description='a matrix rate with a unit, such as "312 TFLOP/s"')]
Seconds = Annotated[
    float,
    *_quantity(units.parse_seconds, units.format_seconds, _BELOW_ZERO, "a finite time of zero or more"),
    Field(description='a time with a unit, such as "6 us"'),
]
Dtype = Annotated[str, AfterValidator(partial(_known, MATRIX_DTYPES))]
Operation = Annotated[str, AfterValidator(partial(_known, OPERATIONS))]


# ---- tables; their fields are those of the dataclasses, under the names in the file


class _Table(BaseModel):
    """A table that makes a dataclass of its fields, and can be made from one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @cached_property
    def made(self) -> Any:
        raise NotImplementedError

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _ = self.made  # raises errors about this table
        return self

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls.model_construct(**{name: getattr(value, name) for name in cls.model_fields if hasattr(value, name)})


class _Kernel(_Table):
    kind: Text
    dtype: Text
    shape: tuple[Count, ...] = ()
    forward: float
    backward: float | None = None

    @field_validator("forward", "backward", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        return (_FLOPS if info.data.get("kind") in ("product", "attention") else _BANDWIDTH)[0].func(value)  # type: ignore[call-arg]

    @field_serializer("forward", "backward")
    def _write(self, value: float | None) -> Any:
        return value and (_FLOPS if self.kind in ("product", "attention") else _BANDWIDTH)[1].func(value)  # type: ignore[call-arg]

    @cached_property
    def made(self) -> Kernel:
        if self.backward is None and self.kind != "optimizer":
            raise ClusterError("backward is missing; expected a rate")
        return Kernel(**{**dict(self), "backward": self.backward or self.forward})

    @classmethod
    def of(cls, value: Kernel) -> Any:
        made = super().of(value)
        return made.model_copy(update={"backward": None}) if value.kind == "optimizer" else made


class _Curve(_Table):
    operation: Text
    ranks: Count
    beside: str = ""
    points: dict[Bytes, Seconds] = Field(alias="seconds")

    @field_validator("beside")
    @classmethod
    def _beside(cls, value: str) -> str:
        if value not in ("", "computation"):
            raise InputError(f'expected "computation" or no key, got {value!r}')
        return value

    @cached_property
    def made(self) -> Curve:
        return Curve(
            operation=self.operation, ranks=self.ranks, points=self.points, beside_computation=bool(self.beside)
        )

    @classmethod
    def of(cls, value: Curve) -> Any:
        beside = "computation" if value.beside_computation else ""
        return cls.model_construct(
            operation=value.operation, ranks=value.ranks, beside=beside, points=dict(value.points)
        )


class _Device(_Table):
    name: Text
    memory_bytes: Bytes = Field(alias="memory")
    memory_bytes_per_s: Bandwidth | None = Field(None, alias="memory_bandwidth")
    multiprocessors: Count | None = None
    cores: Number | None = None
    peak_flops: dict[Dtype, Flops] = Field(alias="peak", description="a rate by dtype")
    achievable_flops: dict[Dtype, Flops] = Field({}, alias="achievable")
    kernels: tuple[_Kernel, ...] = Field((), alias="kernel")

    @field_validator("peak_flops")
    @classmethod
    def _some(cls, value: dict[str, float]) -> dict[str, float]:
        if not value:
            raise InputError('expected a rate by dtype, such as bf16 = "312 TFLOP/s"')
        return value

    @cached_property
    def made(self) -> Device:
        return Device(**{**dict(self), "kernels": tuple(kernel.made for kernel in self.kernels)})

    @classmethod
    def of(cls, value: Device) -> Any:
        peaks = {"peak_flops": dict(value.peak_flops), "achievable_flops": dict(value.achievable_flops)}
        return super().of(value).model_copy(update={**peaks, "kernels": tuple(map(_Kernel.of, value.kernels))})


class _Level(_Table):
    name: Text
    size: Count
    bandwidth_bytes_per_s: Bandwidth = Field(alias="bandwidth")
    down: Bandwidth = math.inf
    latency_s: Seconds = Field(alias="latency")
    kind: Text = "auto"
    ports: Count | None = None
    busy_latency_s: Seconds | None = Field(None, alias="busy_latency")
    host_bytes_per_s: Bandwidth | None = Field(None, alias="host_rate")
    host_call_s: Seconds = Field(0.0, alias="host_call")
    shares: dict[Operation, Number] = {}
    curves: tuple[_Curve, ...] = Field((), alias="curve")

    @cached_property
    def made(self) -> Level:
        given = dict(self)
        # In a ring each member sends as much as it receives, so both go at the rate of the slower direction.
        given["bandwidth_bytes_per_s"] = min(self.bandwidth_bytes_per_s, given.pop("down"))
        level = Level(**{**given, "curves": tuple(curve.made for curve in self.curves)})
        for curve in level.curves:
            _, longest_s = curve.pairs[-1]
            if (least_s := curve.passes * (curve.ranks - 1) * level.latency_s) >= longest_s:
                raise ClusterError(
                    f"level {level.name!r}: {curve.operation} of {curve.ranks} ranks has {least_s:g} s of latency, but "
                    f"the longest message of its curve takes only {longest_s:g} s: one of the two is wrong"
                )
        return level

    @classmethod
    def of(cls, value: Level) -> Any:
        own = {"shares": dict(value.shares), "curves": tuple(map(_Curve.of, value.curves))}
        return super().of(value).model_copy(update=own)


_LEVELS = "one [[level]] table per level, innermost first"


class _Cluster(_Table):
    name: Text
    description: str = ""
    host_memory_bytes: Bytes | None = Field(None, alias="host_memory")
    host_copy_bytes_per_s: Bandwidth | None = Field(None, alias="host_copy")
    host_step_bytes_per_s: Bandwidth | None = Field(None, alias="host_step")
    device: _Device
    levels: tuple[_Level, ...] = Field(alias="level", description=_LEVELS)
    sources: dict[str, Text] = {}

    @field_validator("levels")
    @classmethod
    def _some(cls, value: tuple[_Level, ...]) -> tuple[_Level, ...]:
        if not value:  # a minimum length would also complain if a level is wrong
            raise InputError(f"expected {_LEVELS}")
        return value

    @cached_property
    def made(self) -> Cluster:
        own = {"device": self.device.made, "levels": tuple(level.made for level in self.levels)}
        return Cluster(**{**dict(self), **own, "sources": tuple(sorted(self.sources.items()))})

    @classmethod
    def of(cls, value: Cluster) -> Any:
        own = {"device": _Device.of(value.device), "levels": tuple(map(_Level.of, value.levels))}
        return super().of(value).model_copy(update={**own, "sources": dict(value.sources)})


# ---- errors


def _complaint(error: Any) -> str:
    """Returns a message with the key as in the file, and the expected value."""
    path, field = "", None
    kind: type[_Table] = _Cluster
    for place in error["loc"]:
        if place == "[key]":
            continue
        if isinstance(place, int):
            path += f"[{place}]"
            continue
        path += f".{place}" if path else str(place)
        field = next((each for each in kind.model_fields.values() if each.alias == place), None)
        field = field or kind.model_fields.get(place)
        kind = _TABLES.get(str(place), kind)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        message = f"is missing; expected {(field and field.description) or 'a value'}"
    elif error["type"] == "extra_forbidden":
        known = [each.alias or name for name, each in kind.model_fields.items()]
        message = f"unknown key; {nearest(str(error['loc'][-1]), known)}"
    return f"{path}: {message}" if path else message


_TABLES: dict[str, type[_Table]] = {"device": _Device, "kernel": _Kernel, "level": _Level, "curve": _Curve}
