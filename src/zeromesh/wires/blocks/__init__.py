"""Blockwise quantisation: a flat tensor on an int8 or int4 wire.

[Note: Wire format] Each block of `block` consecutive elements has one scale s = max|x| / Q, Q = 127 for int8 and 7 for
int4, and codes round(x / s) in -Q..Q. A message of n elements has the codes of all blocks, then their scales; the last
block is padded with zeros. An int4 byte is c + 16 * d, signed, with c the code of element j and d that of element j +
block/2 of its block. Since |c| <= 7, d is the nearest integer to byte / 16, so packing and unpacking are arithmetic on
whole vectors. ::

    int8, block 128   | 128 codes | 128 codes | ... | scale | scale | ...      1.03 bytes an element
    int4, block 128   |  64 bytes |  64 bytes | ... | scale | scale | ...       .53 bytes an element

[Note: Error] One quantisation moves an element by at most h*max|x| of its block, with h = 1/(2Q) for rounding to
nearest and 1/Q for stochastic rounding. Stochastic rounding is unbiased: floor(x/s + u) with u uniform has mean x/s; u
has 16 bits, so the remaining bias is under 2^-17 of a step. A block with an infinity or a nan comes back non-finite, so
overflow detection still sees it; blocks whose maximum is under 1e-35 come back as zeros.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Self

from zeromesh.errors import NotationError
from zeromesh.wires import has_triton
from zeromesh.wires.format import Codec, WireFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 128
"""Elements that share one fp32 scale, unless the wire says otherwise. Smaller blocks have tighter error bounds, but
each halving costs 3 % more bytes with int8."""

LARGEST_BLOCK = 1024
SCALE_BYTES = 4
_SPELT = re.compile(r"int(?P<bits>[48])(\[(?P<block>\d{1,9})\])?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat(WireFormat):
    """`int8`, or `int4[32]` with blocks of another size.

    Raises:
        NotationError: another number of bits, or a block that cannot be packed.
    """

    spellings = ("int8", "int4", "int8[BLOCK]", "int4[BLOCK]")
    kernels: ClassVar[bool] = True

    bits: int
    block: int = BLOCK  # elements that share a scale, a multiple of 8 from 8 to `LARGEST_BLOCK`
    stochastic: bool = False  # round at random, without bias, instead of to nearest

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise NotationError(f"a quantised wire has 8 or 4 bits; got {self.bits}")
        if self.block % 8 or not 8 <= self.block <= LARGEST_BLOCK:
            raise NotationError(
                f"blocks of a quantised wire have a multiple of 8 elements, 8 to {LARGEST_BLOCK}, as in "
                f"int{self.bits}[32]; got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = _SPELT.fullmatch(text)
        return match and cls(bits=int(match["bits"]), block=int(match["block"] or BLOCK))

    def __str__(self) -> str:
        return f"int{self.bits}" + (f"[{self.block}]" if self.block != BLOCK else "")

    @property
    def granule(self) -> int:
        return self.block

    @property
    def largest(self) -> int:
        """Q: [Note: Wire format]."""
        return 127 if self.bits == 8 else 7

    @property
    def step(self) -> float:
        """h: [Note: Error]."""
        return (1 + 2**-22) / (self.largest if self.stochastic else 2 * self.largest)

    def unbiased(self) -> Self:
        return replace(self, stochastic=True)

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    def message_bytes(self, numel: int) -> int:
        return self.blocks(numel) * (self.row_bytes + SCALE_BYTES)

    def memory_bytes(self, numel: int) -> int:
        return numel * (14 if self.stochastic else 12) + self.blocks(numel) * 8

    def codec(self, numel: int, memory: Tensor, generator: torch.Generator | None) -> Codec:
        # By name: this module needs no torch, and Triton need not be installed where it is not used.
        if has_triton(memory.device.type):
            found: Codec = resolve_name(f"{__name__}.kernels:TritonQuantiser")(self, generator)
        else:
            found = resolve_name(f"{__name__}.quantiser:Quantiser")(self, numel, memory, generator)
        return found
