"""Triton kernels of the quantised wires. Messages are those of [Note: Wire format], as `Quantiser` writes them.

Each kernel reads and writes every byte once: a program holds some blocks in registers from load to store. One launch
serves all ranks, with a row of programs each, since one message may be too short to fill a device. Under
TRITON_INTERPRET=1 they run on the CPU, slowly, for tests. Rounding to nearest gives the same codes as torch's
operations: divisions are rounded (`/` is approximate on a device), and products are not fused into the sums that follow
(`LAUNCH`). Stochastic rounding draws different, equally uniform noise.
"""

# Triton has no types, compiles functions from their source, and need not be installed.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeromesh.errors import InputError
from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.blocks.quantiser import SMALLEST, split
from zeromesh.wires.format import Codec
from zeromesh.wires.target import Target

ROWS = 16
"""Blocks per program. With a block of 128, each thread has eight neighbouring elements of each half: 16 bytes of
bf16."""

NOISE_ROUNDS = tl.constexpr(7)
"""Philox-4x32 passes the tests of BigCrush with 7 rounds or more (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3", table 2). Triton's default is 10."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23. Adding it leaves no bits for a fraction, so it rounds half to even, and the sum's lowest byte is the
number. A conversion would run at a quarter of the rate."""

LAUNCH = {"enable_fp_fusion": False}
"""Options of every kernel: equal codes are worth the additional instructions."""


@triton.jit
def _inverse_and_scale(largest, has_nan, LARGEST: tl.constexpr, SMALLEST_: tl.constexpr):
    scale = tl.where(largest < SMALLEST_, 0.0, tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)))
    scale = tl.where(has_nan, float("nan"), scale)  # tl.max drops nans on a device
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(one, tl.where(scale == 0.0, 1.0, scale)))
    return inverse, scale


@triton.jit
def _round(values, noise, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Rounds to integers within +-LARGEST, plus MAGIC: to nearest, or STOCHASTIC with uniform `noise` in [1, 2)."""
    if STOCHASTIC:
        rounded = (values - 1.5) + noise + MAGIC  # below 128 no bit of the noise is lost
        return tl.minimum(tl.maximum(rounded, MAGIC - LARGEST), MAGIC + LARGEST)
    else:
        return values + MAGIC  # the values are within LARGEST except for their rounding


@triton.jit
def _noise(seed, rows, ROWS_: tl.constexpr, COLUMNS: tl.constexpr):
    """Uniform 16-bit numbers in [1, 2) for both halves of some blocks. One draw serves eight elements."""
    draws = rows[:, None] * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :]
    one, two, three, four = tl.randint4x(seed, draws, NOISE_ROUNDS)
    return _between(one, two, ROWS_, COLUMNS), _between(three, four, ROWS_, COLUMNS)


@triton.jit
def _between(one, two, ROWS_: tl.constexpr, COLUMNS: tl.constexpr):
    """Floating-point numbers in [1, 2): each half of a word is a fraction, plus 2**-17, so that their mean is 1.5."""
    words = tl.reshape(tl.join(one, two), (ROWS_, COLUMNS // 2)).to(tl.uint32, bitcast=True)
    upper, lower = ((words >> 9) & 0x7FFF80) | 0x3F800040, ((words << 7) & 0x7FFF80) | 0x3F800040
    return tl.reshape(tl.join(upper, lower), (ROWS_, COLUMNS)).to(tl.float32, bitcast=True)


@triton.jit
def _bounded(columns, numel, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a half. If HALF is no power of two, the lanes beyond it are moved outside the tensor."""
    if HALF == COLUMNS:
        return columns  # the compiler sees that they are contiguous, and uses wide loads and stores
    else:
        return tl.where(columns < HALF, columns, numel)


@triton.jit
def _two_halves(pointer, rows, columns, numel, HALF: tl.constexpr):
    """Loads the lower and upper halves of some blocks of a flat tensor, in fp32, with zeros behind its end."""
    low = rows[:, None] * (2 * HALF) + columns[None, :]
    high = low + HALF
    first = tl.load(pointer + low, mask=low < numel, other=0.0).to(tl.float32)
    second = tl.load(pointer + high, mask=high < numel, other=0.0).to(tl.float32)
    return low, high, first, second


@triton.jit
def _store_message(
    codes, scales, rows, columns, blocks, low, high, first, second, seed,
    HALF: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr, SMALLEST_: tl.constexpr, ROWS_: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantises two halves of some blocks, and stores codes and scales. Returns the values that the message holds."""
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    nans = tl.max((first != first).to(tl.int32), axis=1) + tl.max((second != second).to(tl.int32), axis=1)
    inverse, scale = _inverse_and_scale(largest, nans > 0, LARGEST, SMALLEST_)
    if STOCHASTIC:
        first_noise, second_noise = _noise(seed, rows, ROWS_, COLUMNS)
    else:
        first_noise, second_noise = first, second
    first = _round(first * inverse[:, None], first_noise, LARGEST, STOCHASTIC)
    second = _round(second * inverse[:, None], second_noise, LARGEST, STOCHASTIC)
    first_code, second_code = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    inside = (rows < blocks)[:, None] & (columns < HALF)[None, :]
    if BITS == 8:
        tl.store(codes + low, first_code.to(tl.int8), mask=inside)
        tl.store(codes + high, second_code.to(tl.int8), mask=inside)
    else:
        packed = first_code + (second_code << 4)
        tl.store(codes + rows[:, None] * HALF + columns[None, :], packed.to(tl.int8), mask=inside)
    tl.store(scales + rows, scale.to(scales.dtype.element_ty), mask=rows < blocks)
    return (first - MAGIC) * scale[:, None], (second - MAGIC) * scale[:, None]


@triton.jit
def _load_message(codes, scales, rows, columns, blocks, HALF: tl.constexpr, BITS: tl.constexpr):
    """Loads and dequantises two halves of some blocks."""
    inside = (rows < blocks)[:, None] & (columns < HALF)[None, :]
    scale = tl.load(scales + rows, mask=rows < blocks, other=0.0).to(tl.float32)
    if BITS == 8:
        low = rows[:, None] * (2 * HALF) + columns[None, :]
        first = tl.load(codes + low, mask=inside, other=0).to(tl.float32)
        second = tl.load(codes + low + HALF, mask=inside, other=0).to(tl.float32)
    else:
        packed = tl.load(codes + rows[:, None] * HALF + columns[None, :], mask=inside, other=0).to(tl.float32)
        second = tl.floor(packed * 0.0625 + 0.5)
        first = packed - 16.0 * second
    return first * scale[:, None], second * scale[:, None]


@triton.jit
def _store_lost(residual, low, high, first, second, numel):
    """Stores a message's rounding errors. After an overflow it stores zeros: a nan would never go away."""
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    second = tl.where(tl.abs(second) < float("inf"), second, 0.0)
    tl.store(residual + low, first.to(residual.dtype.element_ty), mask=low < numel)
    tl.store(residual + high, second.to(residual.dtype.element_ty), mask=high < numel)


@triton.jit(do_not_specialize=["seed"])  # else Triton compiles anew for one seed in 16
def _quantise_kernel(
    source, codes, scales, residual, source_stride, codes_stride, scales_stride, residual_stride, skipped, numel,
    blocks, seed,
    HALF: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr, SMALLEST_: tl.constexpr, FEEDBACK: tl.constexpr, ROWS_: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == skipped:
        return
    rank = tl.program_id(1).to(tl.int64)
    source += rank * source_stride
    codes += rank * codes_stride
    scales += rank * scales_stride
    residual += rank * residual_stride
    seed += tl.program_id(1)
    rows = (tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    bounded = _bounded(columns, numel, HALF, COLUMNS)
    low, high, first, second = _two_halves(source, rows, bounded, numel, HALF)
    if FEEDBACK:
        _, _, first_lost, second_lost = _two_halves(residual, rows, bounded, numel, HALF)
        first += first_lost
        second += second_lost
    first_sent, second_sent = _store_message(
        codes, scales, rows, columns, blocks, low, high, first, second, seed,
        HALF, BITS, LARGEST, STOCHASTIC, SMALLEST_, ROWS_, COLUMNS,
    )  # fmt: skip
    if FEEDBACK:
        _store_lost(residual, low, high, first - first_sent, second - second_sent, numel)


@triton.jit
def _dequantise_kernel(
    codes, scales, target, codes_stride, scales_stride, target_stride, skipped, numel, blocks,
    HALF: tl.constexpr, BITS: tl.constexpr, ROWS_: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == skipped:
        return
    rank = tl.program_id(1).to(tl.int64)
    codes += rank * codes_stride
    scales += rank * scales_stride
    target += rank * target_stride
    rows = (tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    first, second = _load_message(codes, scales, rows, columns, blocks, HALF, BITS)
    bounded = _bounded(columns, numel, HALF, COLUMNS)
    low = rows[:, None] * (2 * HALF) + bounded[None, :]
    high = low + HALF
    tl.store(target + low, first.to(target.dtype.element_ty), mask=low < numel)
    tl.store(target + high, second.to(target.dtype.element_ty), mask=high < numel)


@triton.jit
def _add_up(
    codes, scales, codes_stride, scales_stride, own_first, own_second, own_index, rows, columns, blocks, factor,
    TERMS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Adds up all ranks' terms in their order, this rank's as it is, and multiplies the sum by `factor`."""
    first = tl.zeros_like(own_first)
    second = tl.zeros_like(own_second)
    for term in range(TERMS):
        if term == own_index:
            first += own_first
            second += own_second
        else:
            received_first, received_second = _load_message(
                codes + term * codes_stride, scales + term * scales_stride, rows, columns, blocks, HALF, BITS
            )
            first += received_first
            second += received_second
    return first * factor, second * factor


@triton.jit
def _reduce_kernel(
    codes, scales, codes_stride, scales_stride, own, own_index, out, numel, blocks, factor,
    TERMS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, ACCUMULATE: tl.constexpr,
    ROWS_: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    bounded = _bounded(columns, numel, HALF, COLUMNS)
    low, high, own_first, own_second = _two_halves(own, rows, bounded, numel, HALF)
    first, second = _add_up(
        codes, scales, codes_stride, scales_stride, own_first, own_second, own_index, rows, columns, blocks, factor,
        TERMS, HALF, BITS,
    )  # fmt: skip
    if ACCUMULATE:
        _, _, out_first, out_second = _two_halves(out, rows, bounded, numel, HALF)
        first += out_first
        second += out_second
    # `out` may be `own`: each element stored here was loaded above by the same program, and by no other.
    tl.store(out + low, first.to(out.dtype.element_ty), mask=low < numel)
    tl.store(out + high, second.to(out.dtype.element_ty), mask=high < numel)


@triton.jit(do_not_specialize=["seed"])
def _requantise_kernel(
    codes, scales, codes_stride, scales_stride, own, own_index, out, sum_codes, sum_scales, residual, numel, blocks,
    factor, seed,
    TERMS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr, SMALLEST_: tl.constexpr, FEEDBACK: tl.constexpr, ROWS_: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    bounded = _bounded(columns, numel, HALF, COLUMNS)
    low, high, own_first, own_second = _two_halves(own, rows, bounded, numel, HALF)
    first, second = _add_up(
        codes, scales, codes_stride, scales_stride, own_first, own_second, own_index, rows, columns, blocks, factor,
        TERMS, HALF, BITS,
    )  # fmt: skip
    if FEEDBACK:
        _, _, first_lost, second_lost = _two_halves(residual, rows, bounded, numel, HALF)
        first += first_lost
        second += second_lost
    first_sent, second_sent = _store_message(
        sum_codes, sum_scales, rows, columns, blocks, low, high, first, second, seed,
        HALF, BITS, LARGEST, STOCHASTIC, SMALLEST_, ROWS_, COLUMNS,
    )  # fmt: skip
    if FEEDBACK:
        _store_lost(residual, low, high, first - first_sent, second - second_sent, numel)
    tl.store(out + low, first_sent.to(out.dtype.element_ty), mask=low < numel)
    tl.store(out + high, second_sent.to(out.dtype.element_ty), mask=high < numel)


class TritonQuantiser(Codec):
    """Does as `Quantiser`, with one kernel for each operation and without memory of its own.

    Args:
        form: the wire's format.
        generator: generates the seeds of stochastic rounding, on the host.
    """

    def __init__(self, form: QuantFormat, generator: torch.Generator | None = None) -> None:
        if form.stochastic and generator is None:
            raise InputError("stochastic rounding needs a generator of its own: the default one is the model's")
        self.form = form
        self._generator = generator

    def quantise_each(
        self,
        sources: Sequence[Tensor],
        messages: Sequence[Tensor],
        residuals: Sequence[Tensor] | None = None,
        *,
        skipped: int = -1,
    ) -> Iterator[Tensor]:
        """See `Codec`; in one launch."""
        codes, scales = split(self.form, messages[0], self.form.blocks(sources[0].numel()))
        blocks, residuals = len(codes), sources if residuals is None else residuals
        if blocks:
            _quantise_kernel[self._programs(blocks, len(sources))](
                sources[0], codes, scales, residuals[0], _apart(sources), *_message_strides(messages, scales),
                _apart(residuals), skipped, sources[0].numel(), blocks, self._seed(),
                **self._shape, **self._rounding, FEEDBACK=residuals is not sources, **LAUNCH,
            )  # fmt: skip
        yield from messages

    def dequantise_each(self, messages: Sequence[Tensor], targets: Sequence[Tensor], *, skipped: int = -1) -> None:
        """See `Codec`; in one launch."""
        codes, scales = split(self.form, messages[0], self.form.blocks(targets[0].numel()))
        blocks = len(codes)
        if blocks:
            _dequantise_kernel[self._programs(blocks, len(targets))](
                codes, scales, targets[0], *_message_strides(messages, scales), _apart(targets), skipped,
                targets[0].numel(), blocks, **self._shape, **LAUNCH,
            )  # fmt: skip

    def reduce(self, messages: Tensor, own: Tensor, own_index: int, target: Target, part: slice) -> None:
        codes, scales = split(self.form, messages[0], self.form.blocks(own.numel()))
        blocks = len(codes)
        if blocks:
            _reduce_kernel[self._programs(blocks)](
                codes, scales, messages.stride(0), messages.stride(0) // scales.element_size(), own, own_index,
                target.out[part], own.numel(), blocks, float(target.scale),
                TERMS=len(messages), **self._shape, ACCUMULATE=target.accumulate, **LAUNCH,
            )  # fmt: skip

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
        codes, scales = split(self.form, messages[0], self.form.blocks(own.numel()))
        sum_codes, sum_scales = split(self.form, message, self.form.blocks(own.numel()))
        blocks = len(codes)
        if blocks:
            _requantise_kernel[self._programs(blocks)](
                codes, scales, messages.stride(0), messages.stride(0) // scales.element_size(), own, own_index,
                target.out[part], sum_codes, sum_scales, own if residual is None else residual, own.numel(), blocks,
                float(target.scale), self._seed(),
                TERMS=len(messages), **self._shape, **self._rounding, FEEDBACK=residual is not None, **LAUNCH,
            )  # fmt: skip

    @staticmethod
    def _programs(blocks: int, ranks: int = 1) -> tuple[int, int]:
        return (triton.cdiv(blocks, ROWS), ranks)

    @property
    def _shape(self) -> dict[str, int]:
        half = self.form.block // 2
        return {"HALF": half, "BITS": self.form.bits, "ROWS_": ROWS, "COLUMNS": triton.next_power_of_2(half)}

    @property
    def _rounding(self) -> dict[str, float]:
        return {"LARGEST": float(self.form.largest), "STOCHASTIC": self.form.stochastic, "SMALLEST_": SMALLEST}

    def _seed(self) -> int:
        if self._generator is None:
            return 0
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**31, generator=self._generator))


def _apart(tensors: Sequence[Tensor]) -> int:
    """Elements from each tensor to the next."""
    if len(tensors) == 1:
        return 0
    return (tensors[1].data_ptr() - tensors[0].data_ptr()) // tensors[0].element_size()


def _message_strides(messages: Sequence[Tensor], scales: Tensor) -> tuple[int, int]:
    """Distances from the codes of each message to the next message's, and from scales to scales."""
    return _apart(messages), _apart(messages) // scales.element_size()
