"""Quantities with units, read from and written for people. Everywhere else numbers are SI: bytes, seconds, FLOP/s.

Prefixes are decimal (k M G T P) or, for bytes, binary (KiB MiB GiB TiB). Bits are spelt out (`Gbit/s`) or `Gbps`:
`Gb/s` is refused, since some read it as bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from zeromesh.errors import InputError, nearest

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()} | {"KB": 1e3}


BYTES = MappingProxyType(_BYTES)
BYTES_PER_S = MappingProxyType(
    {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{p}{unit}": f / 8 for unit in ("bit/s", "bps") for p, f in _DECIMAL.items()}
)
SECONDS = MappingProxyType({"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0})
COUNTS = MappingProxyType(_DECIMAL | _BINARY | {"K": 1e3})
FLOP_PER_S = MappingProxyType({f"{p}{unit}": f for unit in ("FLOP/s", "FLOPS") for p, f in _DECIMAL.items()})

_QUANTITY = re.compile(r"\s*(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")


def parse_bytes(text: object) -> float:
    """Bytes in `text`.

    >>> parse_bytes("80 GB"), parse_bytes("1.5 GiB")
    (80000000000.0, 1610612736.0)
    """
    return _parse(text, BYTES, 'bytes with a unit, such as "80 GB" or "64 GiB"')


def parse_bytes_per_s(text: object) -> float:
    """Bytes per second in `text`.

    >>> parse_bytes_per_s("200 GB/s"), parse_bytes_per_s("100 Mbit/s")
    (200000000000.0, 12500000.0)
    """
    return _parse(text, BYTES_PER_S, 'a rate with a unit, such as "200 GB/s" or "400 Gbit/s"')


def parse_seconds(text: object) -> float:
    """Seconds in `text`.

    >>> parse_seconds("6 us")
    6e-06
    """
    return _parse(text, SECONDS, 'a time with a unit, such as "6 us" or "1.5 ms"')


def parse_flop_per_s(text: object) -> float:
    """Floating-point operations per second in `text`.

    >>> parse_flop_per_s("312 TFLOP/s")
    312000000000000.0
    """
    return _parse(text, FLOP_PER_S, 'a matrix rate with a unit, such as "312 TFLOP/s"')


def parse_count(text: object) -> int:
    """The whole number in `text`, plain or with a prefix.

    >>> parse_count("4096"), parse_count("4M"), parse_count("4Mi")
    (4096, 4000000, 4194304)
    """
    expected = 'a whole number, such as "4194304", "4M" or "4Mi"'
    number = _parse(str(text), COUNTS, expected)
    if not number.is_integer():
        raise InputError(f"expected {expected}, got {text!r}")
    return int(number)


def format_bytes(value_bytes: float, digits: int = 3) -> str:
    """`value_bytes` with a decimal unit.

    >>> format_bytes(80e9), format_bytes(512)
    ('80 GB', '512 B')
    """
    return _format(value_bytes, {f"{p}B": f for p, f in _DECIMAL.items()}, digits)


def format_bytes_per_s(value_bytes_per_s: float, digits: int = 3) -> str:
    """`value_bytes_per_s` with a decimal unit.

    >>> format_bytes_per_s(12.5e9)
    '12.5 GB/s'
    """
    return _format(value_bytes_per_s, {f"{p}B/s": f for p, f in _DECIMAL.items()}, digits)


def format_seconds(value_s: float, digits: int = 3) -> str:
    """`value_s` with a unit from nanoseconds to seconds.

    >>> format_seconds(6e-6), format_seconds(2.5)
    ('6 us', '2.5 s')
    """
    return _format(value_s, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}, digits)


def format_flop_per_s(value_flop_per_s: float, digits: int = 3) -> str:
    """`value_flop_per_s` with a decimal unit.

    >>> format_flop_per_s(312e12)
    '312 TFLOP/s'
    """
    return _format(value_flop_per_s, {f"{p}FLOP/s": f for p, f in _DECIMAL.items()}, digits)


def _parse(text: object, units: Mapping[str, float], expected: str) -> float:
    if not isinstance(text, str):
        raise InputError(f"expected {expected}, got {text!r}: write the unit, as a string")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"expected {expected}, got {text!r}")
    unit = "" if match["unit"] is None and "" in units else match["unit"]
    if unit is None:
        raise InputError(f"expected {expected}, got {text!r}: the unit is missing")
    if unit not in units:
        raise InputError(f"expected {expected}, got {text!r}: unknown unit {unit!r}, {_near(unit, units)}")
    return float(match["number"].replace("_", "")) * units[unit]


def _near(unit: str, units: Mapping[str, float]) -> str:
    if unit.endswith("b/s") and "bit/s" in units:
        prefix = unit.removesuffix("b/s")
        return f"write {prefix}bit/s for bits or {prefix}B/s for bytes"
    return nearest(unit, filter(None, units))


def _format(value: float, units: Mapping[str, float], digits: int) -> str:
    if value == 0 or not math.isfinite(value):
        unit = next((u for u, factor in units.items() if factor == 1.0), "")
        return f"{value:g} {unit}"
    ordered = sorted(units.items(), key=lambda item: item[1])
    rounded = float(f"{abs(value):.{digits - 1}e}")
    name, factor = next(((n, f) for n, f in reversed(ordered) if rounded >= f), ordered[0])
    return f"{_plain(value / factor, digits)} {name}"


def _plain(number: float, digits: int) -> str:
    # %g turns to exponents from 10^digits on; 1234 must not print as 1.23e+03.
    return f"{float(f'{number:.{digits}g}'):.15g}"
