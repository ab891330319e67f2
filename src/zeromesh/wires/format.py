"""The interface of wire formats."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zeromesh.wires.codec import Codec


@cache
def has_triton(device_type: str) -> bool:
    """Whether kernels in Triton run on torch's devices of this type, here; else torch's operations do their work."""
    return device_type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


class WireFormat(ABC):
    """How elements are coded in messages; a value, whose `str` is how the notation spells it.

    [Note: Laws] Of a multiple of `granule` elements the message is as long as those of its parts together, so that a
    tensor can go in pieces. Zeros come back as zeros. An infinity or a nan comes back as one or the other, so that
    overflow detection still sees it.

    [Note: Which codec] One of torch's operations, on any device, in memory that the schedule counts; a format's kernels
    in Triton, which need none, where it has some and `has_triton`. What exchanges messages takes the first, always.

    Args:
        spellings: all that `parse` takes, for messages.
        kernels: whether there are some in Triton.
    """

    __slots__ = ()
    spellings: ClassVar[tuple[str, ...]]
    kernels: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """The format that is spelt so; None if it is another's.

        Raises:
            NotationError: this one's, and wrong.
        """

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def granule(self) -> int:
        """Elements that are coded together."""

    @abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements."""

    @property
    @abstractmethod
    def step(self) -> float:
        """How far one coding moves an element, at most, over the largest of its granule."""

    @property
    def stochastic(self) -> bool:
        """Whether its codec draws noise."""
        return False

    def unbiased(self) -> WireFormat:
        """The same messages with errors of mean zero, for sums over many steps; itself, where it knows no other way."""
        return self

    def error_bound(self, codings: int) -> float:
        """How far values may end from the exact ones after that many codings in a row, over their largest size.

        With M the largest |x| at the start, the k-th coding meets values of at most M*(1+h)^(k-1) and moves them by at
        most h of that: together M*((1+h)^k - 1), about k*h*M. A mean over ranks does not enlarge it.
        """
        return float((1 + self.step) ** codings - 1)

    @abstractmethod
    def memory_bytes(self, numel: int) -> int:
        """Memory of the codec of torch's operations for up to `numel` elements; a multiple of 8 if `numel` is one."""

    @abstractmethod
    def codec(self, numel: int, memory: Tensor, generator: torch.Generator | None) -> Codec:
        """The codec for tensors of up to `numel` elements where `memory` is: `memory_bytes(numel)` bytes, or any number
        where kernels need none. The generator of what is drawn is on the host."""
