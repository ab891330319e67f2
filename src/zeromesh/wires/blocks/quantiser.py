"""int8 and int4 messages with torch's operations: [Note: Wire format]."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromesh.errors import InputError
from zeromesh.wires.blocks import SCALE_BYTES, QuantFormat
from zeromesh.wires.codec import TorchCodec

SMALLEST = 1e-35
"""Below this, the inverse of a scale would not be finite in fp32."""


def split(form: QuantFormat, message: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Splits a message into the codes, as signed (blocks, bytes), and the scales, as (blocks, 1)."""
    stop = blocks * form.row_bytes
    codes, scales = message[:stop].view(torch.int8), message[stop : stop + blocks * SCALE_BYTES].view(torch.float32)
    return codes.view(blocks, form.row_bytes), scales.view(blocks, 1)


class Quantiser(TorchCodec):
    """Quantises and dequantises, in the memory that it is given.

    Args:
        form: the wire's format.
        numel, memory: see `TorchCodec`.
        generator: generates the noise of stochastic rounding, on the host. A device draws with its own, seeded by this
            one.

    Raises:
        InputError: the length is not a multiple of the block, or stochastic rounding has no generator.
    """

    def __init__(self, form: QuantFormat, numel: int, memory: Tensor, generator: torch.Generator | None = None) -> None:
        super().__init__(form, numel, memory)
        if form.stochastic and generator is None:
            raise InputError("stochastic rounding needs a generator of its own: the default one is the model's")
        self.form = form
        blocks = numel // form.block
        lengths = [numel, blocks, blocks, numel // 2 if form.stochastic else 0]
        fp32: Tensor = memory[self.BYTES * numel :][: 4 * sum(lengths)].view(torch.float32)
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        views = [fp32[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        self._scratch, inverse, lowest, noise = views
        self._inverse, self._lowest = inverse.view(-1, 1), lowest.view(-1, 1)
        self._noise = noise.view(torch.int16)
        if generator is not None and not memory.is_cpu:
            seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            generator = torch.Generator(memory.device).manual_seed(int(seed))
        self._generator = generator

    def encode(self, values: Tensor, message: Tensor, *, restore: bool) -> None:
        rows = values.view(-1, self.form.block)
        codes, scales = split(self.form, message, len(rows))
        rows.mul_(self._scale(rows, scales))
        self._round(values)
        self._pack(rows, codes)
        if restore:
            rows.mul_(scales)

    def decode(self, message: Tensor, values: Tensor) -> None:
        rows = values.view(-1, self.form.block)
        codes, scales = split(self.form, message, len(rows))
        if self.form.bits == 8:
            rows.copy_(codes)
        else:
            half = self.form.block // 2
            both = self._scratch[: codes.numel()].view_as(codes).copy_(codes)
            high = torch.mul(both, 1 / 16, out=rows[:, half:]).round_()
            torch.add(both, high, alpha=-16, out=rows[:, :half])
        rows.mul_(scales)

    def _scale(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Fills `scales` and returns their inverses, with zero for blocks that count as zero."""
        inverse, lowest = self._inverse[: len(rows)], self._lowest[: len(rows)]
        torch.amax(rows, 1, keepdim=True, out=inverse)
        torch.amin(rows, 1, keepdim=True, out=lowest)
        torch.maximum(inverse, lowest.neg_(), out=inverse)
        inverse.masked_fill_(inverse < SMALLEST, 0).div_(self.form.largest)
        scales.copy_(inverse)
        inverse.copy_(scales).reciprocal_()
        return inverse.masked_fill_(scales == 0, 0)

    def _round(self, values: Tensor) -> None:
        if not self.form.stochastic:
            values.round_()
            return
        noise = self._noise[: values.numel()]
        # Each draw gives four 16-bit numbers, since drawing takes most of the time.
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
