"""One accelerator, as data, with measured rates by kind of work, shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Self

from zeromesh.errors import ClusterError, nearest, one_of, short_repr

#: Kinds of work, with the numbers in their shapes. Rates are FLOP/s for the first two, and bytes/s for the others.
KERNELS = {
    "product": ("rows", "inner", "outer"),
    "attention": ("context", "head_dim"),
    "elementwise": (),
    "gradients": (),
    "optimizer": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Rates of one device while all others on its machine do the same.

    `backward` is the rate of the backward pass. For a product, the backward computes both gradients. For gradients, it
    adds them to older ones; the forward copies them to where they are collected. An optimizer's is equal to `forward`.
    """

    kind: str  # one of `KERNELS`
    dtype: str  # of the computation; collected gradients and an optimizer's states are in fp32
    shape: tuple[int, ...] = ()  # as listed in `KERNELS`
    forward: float
    backward: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.kind not in KERNELS:
            raise ClusterError(f"the kind of a kernel must be {one_of(self.kind, KERNELS)}")
        names = KERNELS[self.kind]
        if len(self.shape) != len(names) or not all(size >= 1 for size in self.shape):
            raise ClusterError(
                f"the shape of a kernel of kind {self.kind} is {', '.join(names) or 'empty'}; got {self.shape}"
            )
        for rate in (self.forward, self.backward):
            if not 0 < rate < inf:
                raise ClusterError(f"a kernel's rates must be finite and above 0, got {rate}")

    def rate(self, *, backward: bool) -> float:
        return self.backward if backward else self.forward

    def times(self, factor: float) -> Self:
        return replace(self, forward=self.forward * factor, backward=self.backward * factor)

    def distance(self, shape: Sequence[float]) -> float:
        """The distance from another shape of this kind: the sum of absolute logarithms of the sizes' ratios."""
        return sum(abs(log(size / own)) for size, own in zip(shape, self.shape, strict=True))


#: Matrix dtypes that may have a peak, in a training run's order of preference. The last two are only for the products
#: of blocks, if requested. mxfp8 has a scale for each 32 elements, fp8 one for each tensor.
MATRIX_DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8", "mxfp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory and rates of one device.

    Matrix rates are in FLOP/s by dtype: dense peaks, and the best that a micro-benchmark reached, if known. They are
    mappings, stored as sorted pairs so that devices hash. `cores` are processor cores for each device, if the same
    cores compute and move the bytes of collectives, as on CPU; one computes at a time. None: communication takes no
    processor from the computation.
    """

    name: str  # from the vendor
    memory_bytes: float  # that one process can allocate
    peak_flops: Mapping[str, float] | tuple[tuple[str, float], ...]
    achievable_flops: Mapping[str, float] | tuple[tuple[str, float], ...] = field(default=())
    memory_bytes_per_s: float | None = None  # nominal rate of the device's memory, None if unknown
    multiprocessors: int | None = None  # that compute; collectives' kernels take some of them; None if unknown
    cores: float | None = None
    kernels: tuple[Kernel, ...] = ()  # measured rates, by kind of work and shape; they override the rates above

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", _pairs(self.peak_flops))
        object.__setattr__(self, "achievable_flops", _pairs(self.achievable_flops))
        if self.memory_bytes <= 0:
            raise ClusterError(f"device {self.name!r}: memory must be positive, got {self.memory_bytes}")
        if not self.peak_flops:
            raise ClusterError(f"device {self.name!r}: a peak for at least one dtype of {', '.join(MATRIX_DTYPES)}")
        if self.memory_bytes_per_s is not None and self.memory_bytes_per_s <= 0:
            raise ClusterError(f"device {self.name!r}: memory bandwidth must be positive")
        if self.multiprocessors is not None and self.multiprocessors < 1:
            raise ClusterError(f"device {self.name!r}: multiprocessors must be at least 1, got {self.multiprocessors}")
        if self.cores is not None and self.cores <= 0:
            raise ClusterError(f"device {self.name!r}: cores must be positive, got {self.cores}")
        for dtype, rate in (*self.peak_flops, *self.achievable_flops):
            if dtype not in MATRIX_DTYPES:
                known = nearest(dtype, MATRIX_DTYPES)
                raise ClusterError(f"device {self.name!r}: unknown dtype {dtype!r} in peak; {known}")
            if rate <= 0:
                raise ClusterError(f"device {self.name!r}: the rate for {dtype} must be positive, got {rate}")
        peaks = dict(self.peak_flops)
        for dtype, rate in dict(self.achievable_flops).items():
            peak = peaks.get(dtype, 0.0)
            if rate > peak:
                raise ClusterError(
                    f"device {self.name!r}: achievable is what was measured of the peak, so {dtype} needs a peak of at "
                    f"least {rate:.4g} FLOP/s, got {f'{peak:.4g}' if peak else 'none'}"
                )

    @property
    def matrix_dtype(self) -> str:
        """The dtype that training computes in: bf16 if the device has it, else fp16 (V100), else fp32."""
        known = dict(self.peak_flops)
        return next(dtype for dtype in MATRIX_DTYPES if dtype in known)

    def compute_dtype(self, wanted: str) -> str:
        """The dtype whose rates apply to parameters in `wanted`: the same, if the device has a peak for it."""
        return wanted if wanted in dict(self.peak_flops) else self.matrix_dtype

    def peak(self, dtype: str | None = None) -> float:
        """The dense peak in FLOP/s for `dtype` (default: `matrix_dtype`). Raises ClusterError if it is unknown."""
        wanted = dtype or self.matrix_dtype
        known = dict(self.peak_flops)
        if wanted not in known:
            raise ClusterError(f"device {self.name!r} has no peak for {wanted}; {nearest(wanted, known)}")
        return known[wanted]

    def achievable(self, dtype: str | None = None) -> float | None:
        """The best measured matrix rate in FLOP/s for `dtype`; None if there is no measurement."""
        return dict(self.achievable_flops).get(dtype or self.matrix_dtype)

    def kernel(self, kind: str, dtype: str, shape: Sequence[float] = ()) -> Kernel | None:
        """Returns the measured kernel of this kind and dtype with the nearest shape; None if there is none."""
        fitting = [kernel for kernel in self.kernels if (kernel.kind, kernel.dtype) == (kind, dtype)]
        return min(fitting, key=lambda kernel: kernel.distance(shape), default=None)


def _pairs(rates: Mapping[str, float] | tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(dict(rates).items()))
