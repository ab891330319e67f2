"""Wire formats: how n elements become a message. Each has a folder and a line in `REGISTERED`, which is imported when
the first wire that is not a dtype comes up. Torch-free except for the codecs, which are imported for the first message.

A wire sends elements in one of `DTYPES`, which collectives sum directly, or coded, in messages of a `WireFormat` that
its codec writes and reads. The notation, the bytes on the wire and in memory, the simulator and the engine all ask the
format.
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
"""Dtypes in which elements are sent as they are."""

REGISTERED: list[str | type[WireFormat]] = ["zeromesh.wires.blocks:QuantFormat"]
"""Each format's class, or its location."""


@cache
def coded(wire: str | None) -> WireFormat | None:
    """Returns the format that the notation spells `wire`; None if elements are sent as they are.

    NotationError for an impossible format, such as a block of 7.
    """
    found = (form.parse(wire) for form in _formats()) if wire and wire not in DTYPES else ()
    return next((form for form in found if form is not None), None)


def spellings() -> tuple[str, ...]:
    return (*DTYPES, *(text for form in _formats() for text in form.spellings))


def _formats() -> Iterator[type[WireFormat]]:
    return (resolve_name(form) if isinstance(form, str) else form for form in REGISTERED)


@cache
def has_triton(device_type: str) -> bool:
    """Whether Triton kernels run here on torch devices of this type. If not, torch's operations do their work."""
    return device_type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


@contextmanager
def registered_wire(form: type[WireFormat]) -> Iterator[None]:
    """Adds a format for as long as the context is open."""
    REGISTERED.append(form)
    coded.cache_clear()
    try:
        yield
    finally:
        REGISTERED.remove(form)
        coded.cache_clear()
