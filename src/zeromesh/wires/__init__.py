"""Wire formats: the messages of n elements. One folder each, with one line in `REGISTERED`. Torch-free but for the
codecs, which are imported when the first message is made.

A wire sends the elements in one of `DTYPES`, which collectives add up as they are, or coded: in messages of a
`WireFormat`, which its codec writes and reads. The notation, the bytes on the wire and in memory, the simulator and
the engine ask the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.format import WireFormat

__all__ = ["DTYPES", "REGISTERED", "QuantFormat", "WireFormat", "coded", "registered_wire", "spellings"]

DTYPES = ("fp32", "bf16", "fp16")
"""In which elements are sent as they are."""

REGISTERED: list[type[WireFormat]] = [QuantFormat]


@cache
def coded(wire: str | None) -> WireFormat | None:
    """The format that the notation spells `wire`; None where elements are sent as they are.

    Raises:
        NotationError: of a format that cannot be, such as a block of 7.
    """
    found = (form.parse(wire) for form in REGISTERED) if wire else ()
    return next((form for form in found if form is not None), None)


def spellings() -> tuple[str, ...]:
    """The spellings of all wires."""
    return (*DTYPES, *(text for form in REGISTERED for text in form.spellings))


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
