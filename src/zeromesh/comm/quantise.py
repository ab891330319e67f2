"""Blockwise quantisation: what a flat tensor looks like on an int8 or int4 wire.

[Note: Wire format] Each block of `block` consecutive elements has one scale s = max|x| / Q, Q = 127 for int8 and 7 for
int4, and codes round(x / s) in -Q..Q. A message of n elements is the codes of all blocks, then their scales; the last
block is filled up with zeros. An int4 byte is c + 16 * d, signed, for the codes c of element j and d of element
j + block/2 of its block: |c| <= 7, so d is the nearest integer to byte / 16, and packing and unpacking are arithmetic
on whole vectors. ::

    int8, block 128   | 128 codes | 128 codes | ... | scale | scale | ...      1.03 bytes an element
    int4, block 128   |  64 bytes |  64 bytes | ... | scale | scale | ...       .53 bytes an element

[Note: Error] One quantisation moves an element by at most h*max|x| of its block, with h = 1/(2Q) for rounding to
nearest and 1/Q for stochastic rounding. Stochastic rounding is unbiased: floor(x/s + u) with u uniform has mean x/s; u
has 16 bits, so what is left is under 2^-17 of a step. A block with an infinity or a nan comes back non-finite, so
overflow detection still sees it; blocks whose maximum is under 1e-35 come back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeromesh.comm.summing import Target
from zeromesh.errors import InputError
from zeromesh.strategy.stage import QUANTISED_BLOCK, quantised

SMALLEST = 1e-35
"""Below, the inverse of a scale would not be finite in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """A quantised wire.

    Args:
        bits: 8 or 4.
        block: elements that share a scale.
        scale_dtype: fp32, or bf16 for half the scales' bytes; a bf16 scale is rounded up, so codes stay in range.
        stochastic: round at random, without bias, instead of to nearest.

    Raises:
        InputError: another number of bits, a block that cannot be packed, or another scale dtype.
    """

    bits: int
    block: int = QUANTISED_BLOCK
    scale_dtype: torch.dtype = torch.float32
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InputError(f"a quantised wire has 8 or 4 bits; got {self.bits}")
        if self.block < 8 or self.block % 8:
            raise InputError(f"a quantisation block must be a multiple of 8 elements, at least 8; got {self.block}")
        if self.scale_dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"block scales are fp32 or bf16; got {self.scale_dtype}")

    @classmethod
    def of(cls, wire: str, *, stochastic: bool = False) -> QuantFormat:
        """The format of a wire of the notation, such as `int8` or `int4[32]`.

        Raises:
            InputError: not a quantised wire, or a block that cannot be.
        """
        form = quantised(wire)
        if form is None:
            raise InputError(f"a quantised wire is int8 or int4; got {wire!r}")
        return cls(bits=form.bits, block=form.block, stochastic=stochastic)

    @property
    def largest(self) -> int:
        """Q: [Note: Wire format]."""
        return 127 if self.bits == 8 else 7

    @property
    def step(self) -> float:
        """h: [Note: Error]; a bf16 scale is up to 2^-7 too large."""
        inflated = 1 + 2**-7 if self.scale_dtype == torch.bfloat16 else 1 + 2**-22
        return inflated / (self.largest if self.stochastic else 2 * self.largest)

    def error_bound(self, quantisations: int) -> float:
        """How far values may end from the exact ones after that many quantisations in a row, over their largest size.

        With M the largest |x| at the start, the k-th quantisation meets values of at most M*(1+h)^(k-1) and moves them
        by at most h of that: together M*((1+h)^k - 1), about k*h*M. A mean over ranks does not enlarge it.
        """
        return float((1 + self.step) ** quantisations - 1)

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements."""
        return self.blocks(numel) * (self.block * self.bits // 8 + self.scale_dtype.itemsize)

    def split(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The codes, as signed (blocks, bytes), and the scales, as (blocks, 1), of a message."""
        blocks = self.blocks(numel)
        row_bytes = self.block * self.bits // 8
        codes_bytes = blocks * row_bytes
        codes = message[:codes_bytes].view(blocks, row_bytes)
        return codes.view(torch.int8), message[codes_bytes : self.message_bytes(numel)].view(self.scale_dtype).view(
            blocks, 1
        )


class Quantiser:
    """Quantises and dequantises with torch's operations, in memory of its own.

    Args:
        form: of the wire.
        numel: longest tensor at a time, a multiple of the block; a few 10^5 stay in the cache.
        device: of the tensors.
        generator: of the noise of stochastic rounding.
        memory: `memory_bytes(form, numel)` bytes; None to allocate them.

    Raises:
        InputError: the length is not a multiple of the block, or stochastic rounding has no generator.
    """

    def __init__(
        self,
        form: QuantFormat,
        numel: int,
        device: torch.device,
        generator: torch.Generator | None = None,
        memory: Tensor | None = None,
    ) -> None:
        if numel % form.block:
            raise InputError(f"a quantiser's length must be a multiple of the block of {form.block}; got {numel}")
        self.form = form
        self.numel = numel
        if form.stochastic and generator is None:
            raise InputError("stochastic rounding needs a generator of its own: the default one is the model's")
        if memory is None:
            memory = torch.zeros(self.memory_bytes(form, numel), dtype=torch.uint8, device=device)
        blocks = numel // form.block
        lengths = [numel, numel, numel, blocks, blocks, numel // 2 if form.stochastic else 0]
        fp32: Tensor = memory[: 4 * sum(lengths)].view(torch.float32)
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        views = [fp32[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        self._values, self._scratch, self._total, inverse, lowest, noise = views
        self._inverse, self._lowest = inverse.view(-1, 1), lowest.view(-1, 1)
        self._noise = noise.view(torch.int16)
        self._generator = generator

    @staticmethod
    def memory_bytes(form: QuantFormat, numel: int) -> int:
        """Bytes of memory for tensors of up to `numel` elements."""
        return numel * (14 if form.stochastic else 12) + numel // form.block * 8

    def quantise(self, source: Tensor, message: Tensor, residual: Tensor | None = None) -> None:
        """Writes `source` to `message`.

        Args:
            source: flat, of any floating dtype.
            message: `message_bytes(source.numel())` bytes.
            residual: error feedback: added to the source first, then replaced by what the message lost.
        """
        values = self._load(source, residual)
        rows = values.view(-1, self.form.block)
        codes, scales = self.form.split(message, source.numel())
        inverse = self._scale(rows, scales)
        if residual is not None:
            residual.copy_(values[: source.numel()])
        rows.mul_(inverse)
        self._round(values)
        self._pack(rows, codes)
        if residual is not None:
            rows.mul_(scales)
            # After an overflow nothing is owed: a nan would stay for ever.
            residual.sub_(values[: source.numel()]).nan_to_num_(0.0, 0.0, 0.0)

    def dequantise(self, message: Tensor, target: Tensor) -> None:
        """Writes what `message` holds to `target`, rounded once to its dtype."""
        target.copy_(self._unpacked(message, target.numel()))

    def reduce(self, messages: Tensor, own: Tensor, own_index: int, target: Target, part: slice) -> None:
        """Adds up in fp32, in the order of the ranks, what several of them sent and the own piece as it is.

        Args:
            messages: (ranks, message bytes); the row of `own_index` is not read.
            own: flat, of any floating dtype; may be `target.out[part]` itself.
            target: of the sum.
            part: of the target, as long as `own`.
        """
        target.store(self._sum(messages, own, own_index), part, self._values[: own.numel()])

    def requantise(
        self,
        messages: Tensor,
        own: Tensor,
        own_index: int,
        target: Target,
        part: slice,
        message: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        """`reduce`, times the target's scale, to a message; what that holds goes to `target.out[part]`.

        Args:
            messages, own, own_index, part: as for `reduce`.
            target: of what the message holds; nothing is added to it.
            message, residual: as for `quantise`.
        """
        self.quantise(self._sum(messages, own, own_index).mul_(target.scale), message, residual)
        self.dequantise(message, target.out[part])

    def _sum(self, messages: Tensor, own: Tensor, own_index: int) -> Tensor:
        total, widened = self._total[: own.numel()].zero_(), self._values[: own.numel()]
        for rank, message in enumerate(messages):
            if rank != own_index:
                total.add_(self._unpacked(message, own.numel()))
            else:
                total.add_(own if own.dtype == total.dtype else widened.copy_(own))
        return total

    def _load(self, source: Tensor, residual: Tensor | None) -> Tensor:
        """The source in fp32, filled up with zeros to whole blocks."""
        values = self._values[: self.form.blocks(source.numel()) * self.form.block]
        values[: source.numel()].copy_(source)
        values[source.numel() :].zero_()
        if residual is not None:
            values[: source.numel()].add_(residual)
        return values

    def _scale(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Fills `scales` and returns their inverses: zero where the block counts as zero."""
        inverse, lowest = self._inverse[: len(rows)], self._lowest[: len(rows)]
        torch.amax(rows, 1, keepdim=True, out=inverse)
        torch.amin(rows, 1, keepdim=True, out=lowest)
        torch.maximum(inverse, lowest.neg_(), out=inverse)
        inverse.masked_fill_(inverse < SMALLEST, 0).div_(self.form.largest)
        if scales.dtype == torch.bfloat16:
            inverse.mul_(1 + 2**-8)  # half a unit in the last place, so that rounding to nearest does not round down
        scales.copy_(inverse)
        inverse.copy_(scales).reciprocal_()
        return inverse.masked_fill_(scales == 0, 0)

    def _round(self, values: Tensor) -> None:
        if not self.form.stochastic:
            values.round_()
            return
        noise = self._noise[: values.numel()]
        # Four numbers of 16 bits a draw: drawing takes most of the time.
        noise.view(torch.int64).random_(-(2**63), None, generator=self._generator)
        uniform = self._scratch[: values.numel()].copy_(noise)
        values.add_(uniform.add_(2**15 + 0.5).mul_(2**-16)).floor_()
        values.clamp_(-self.form.largest, self.form.largest)

    def _pack(self, rows: Tensor, codes: Tensor) -> None:
        if self.form.bits == 8:
            codes.copy_(rows)
            return
        half = self.form.block // 2
        packed = self._scratch[: codes.numel()].view_as(codes)
        codes.copy_(torch.add(rows[:, :half], rows[:, half:], alpha=16, out=packed))

    def _unpacked(self, message: Tensor, numel: int) -> Tensor:
        codes, scales = self.form.split(message, numel)
        rows = self._values[: len(codes) * self.form.block].view(-1, self.form.block)
        if self.form.bits == 8:
            rows.copy_(codes)
        else:
            half = self.form.block // 2
            both = self._scratch[: codes.numel()].view_as(codes).copy_(codes)
            high = torch.mul(both, 1 / 16, out=rows[:, half:]).round_()
            torch.add(both, high, alpha=-16, out=rows[:, :half])
        rows.mul_(scales)
        return self._values[:numel]
