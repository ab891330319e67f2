"""Wire formats: the messages of n elements. One folder each, with one line in `REGISTERED`, which is imported when the
first wire is no dtype. Torch-free but for the codecs, which are imported when the first message is made.

A wire sends the elements in one of `DTYPES`, which collectives add up as they are, or coded: in messages of a
`WireFormat`, which its codec writes and reads. The notation, the bytes on the wire and in memory, the simulator and
the engine ask the format.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeromesh.wires.format import WireFormat

DTYPES = ("fp32", "bf16", "fp16")
"""In which elements are sent as they are."""

REGISTERED: list[str | type[WireFormat]] = ["zeromesh.wires.blocks:QuantFormat"]
"""Each, or where it is defined."""


@cache
def coded(wire: str | None) -> WireFormat | None:
    """The format that the notation spells `wire`; None where elements are sent as they are.

    NotationError for a format that cannot be, such as a block of 7.
    """
    found = (form.parse(wire) for form in _formats()) if wire and wire not in DTYPES else ()
    return next((form for form in found if form is not None), None)


def spellings() -> tuple[str, ...]:
    return (*DTYPES, *(text for form in _formats() for text in form.spellings))


def _formats() -> Iterator[type[WireFormat]]:
    return (resolve_name(form) if isinstance(form, str) else form for form in REGISTERED)


@cache
def has_triton(device_type: str) -> bool:
    """Whether kernels in Triton run on torch's devices of this type, here; else torch's operations do their work."""
    return device_type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


@contextmanager
def registered_wire(form: type[WireFormat]) -> Iterator[None]:
    """A further format, for as long as this is open."""
    REGISTERED.append(form)
    coded.cache_clear()
    try:
        yield
    finally:
        REGISTERED.remove(form)
        coded.cache_clear()
