"""A measured rate of a device for one kind of work, shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import Self

from zeromesh.errors import ClusterError, one_of

#: Kinds of work, and the numbers that a shape of each has. Rates of the first two are FLOP/s, of the others bytes/s.
KERNELS = {
    "product": ("rows", "inner", "outer"),
    "attention": ("context", "head_dim"),
    "elementwise": (),
    "gradients": (),
    "optimizer": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Rates of one device while all others of its machine do the same.

    `backward` is that of the backward pass; of a product that of both gradients; of gradients, which are copied to
    where they are collected, that of adding them to older ones. An optimizer has none: its `forward`.
    """

    kind: str  # one of `KERNELS`
    dtype: str  # computed in; gradients and an optimizer's states are collected and held in fp32
    shape: tuple[int, ...] = ()  # as `KERNELS` lists them
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
        """From another shape of its kind: the sum of the logarithms of how often one size goes into the other."""
        return sum(abs(log(size / own)) for size, own in zip(shape, self.shape, strict=True))
