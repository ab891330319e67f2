"""Quantities with units, read from and written for people. Everywhere else numbers are SI: bytes, seconds, FLOP/s.

Prefixes are decimal (k M G T P) or, for bytes, binary (KiB MiB GiB TiB). Bits are spelt out (`Gbit/s`) or `Gbps`:
`Gb/s` is refused, since some read it as bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zeromesh.errors import InputError, nearest

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

_QUANTITY = re.compile(r"\s*(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")


@dataclass(frozen=True, slots=True)
class Quantity:
    """Numbers of one kind, each with its unit.

    >>> BYTES.parse("80 GB"), BYTES.parse("1.5 GiB"), SECONDS.parse("6 us"), FLOP_PER_S.parse("312 TFLOP/s")
    (80000000000.0, 1610612736.0, 6e-06, 312000000000000.0)
    >>> BYTES_PER_S.parse("200 GB/s"), BYTES_PER_S.parse("100 Mbit/s")
    (200000000000.0, 12500000.0)
    >>> BYTES.format(80e9), BYTES.format(512), BYTES_PER_S.format(12.5e9), SECONDS.format(6e-6), SECONDS.format(2.5)
    ('80 GB', '512 B', '12.5 GB/s', '6 us', '2.5 s')
    """

    expected: str  # the kind with examples, for messages
    written: Mapping[str, float]  # units of text for people, in SI
    others: Mapping[str, float]  # units that are read as well

    def parse(self, text: object) -> float:
        """The number in `text`, in SI."""
        units = {**self.written, **self.others}
        if not isinstance(text, str):
            raise InputError(f"expected {self.expected}, got {text!r}: write the unit, as a string")
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise InputError(f"expected {self.expected}, got {text!r}")
        unit = "" if match["unit"] is None and "" in units else match["unit"]
        if unit is None:
            raise InputError(f"expected {self.expected}, got {text!r}: the unit is missing")
        if unit not in units:
            raise InputError(f"expected {self.expected}, got {text!r}: unknown unit {unit!r}, {_near(unit, units)}")
        return float(match["number"].replace("_", "")) * units[unit]

    def format(self, value: float, digits: int = 3) -> str:
        """A number in SI with the unit in which it is short."""
        if value == 0 or not math.isfinite(value):
            unit = next((u for u, factor in self.written.items() if factor == 1.0), "")
            return f"{value:g} {unit}"
        ordered = sorted(self.written.items(), key=lambda item: item[1])
        rounded = float(f"{abs(value):.{digits - 1}e}")
        name, factor = next(((n, f) for n, f in reversed(ordered) if rounded >= f), ordered[0])
        # %g turns to exponents from 10^digits on; 1234 must not print as 1.23e+03.
        return f"{float(f'{value / factor:.{digits}g}'):.15g} {name}"


def _near(unit: str, units: Mapping[str, float]) -> str:
    if unit.endswith("b/s") and "bit/s" in units:
        prefix = unit.removesuffix("b/s")
        return f"write {prefix}bit/s for bits or {prefix}B/s for bytes"
    return nearest(unit, filter(None, units))


def _prefixed(unit: str, prefixes: Mapping[str, float] = _DECIMAL, each: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * each for prefix, factor in prefixes.items()}


BYTES = Quantity(
    'bytes with a unit, such as "80 GB" or "64 GiB"', _prefixed("B"), _prefixed("B", _BINARY) | {"KB": 1e3}
)
BYTES_PER_S = Quantity(
    'a rate with a unit, such as "200 GB/s" or "400 Gbit/s"',
    _prefixed("B/s"),
    _prefixed("B/s", _BINARY) | {"KB/s": 1e3} | _prefixed("bit/s", each=1 / 8) | _prefixed("bps", each=1 / 8),
)
SECONDS = Quantity(
    'a time with a unit, such as "6 us" or "1.5 ms"',
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    {"µs": 1e-6, "min": 60.0, "h": 3600.0},
)
FLOP_PER_S = Quantity('a matrix rate with a unit, such as "312 TFLOP/s"', _prefixed("FLOP/s"), _prefixed("FLOPS"))
_COUNT = Quantity('a whole number, such as "4194304", "4M" or "4Mi"', _DECIMAL, _BINARY | {"K": 1e3})

parse_bytes, format_bytes = BYTES.parse, BYTES.format
parse_bytes_per_s, format_bytes_per_s = BYTES_PER_S.parse, BYTES_PER_S.format
parse_seconds, format_seconds = SECONDS.parse, SECONDS.format
parse_flop_per_s, format_flop_per_s = FLOP_PER_S.parse, FLOP_PER_S.format


def parse_count(text: object) -> int:
    """The whole number in `text`, plain or with a prefix.

    >>> parse_count("4096"), parse_count("4M"), parse_count("4Mi")
    (4096, 4000000, 4194304)
    """
    number = _COUNT.parse(str(text))
    if not number.is_integer():
        raise InputError(f"expected {_COUNT.expected}, got {text!r}")
    return int(number)
