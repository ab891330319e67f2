"""What a wire format says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zeromesh.wires.codec import Codec


class WireFormat(ABC):
    """How elements are coded in messages; a value, whose `str` is how the notation spells it.

    [Note: Laws] Of a multiple of `granule` elements the message is as long as those of its parts together, so that a
    tensor can go in pieces. Zeros come back as zeros. An infinity or a nan comes back as one or the other, so that
    overflow detection still sees it.

    Args:
        spellings: all that `parse` takes, for messages.
    """

    __slots__ = ()
    spellings: ClassVar[tuple[str, ...]]

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
        """Of the host's codec, for tensors of up to `numel` elements; a multiple of 8 where `numel` is one."""

    @abstractmethod
    def codec(self, numel: int, memory: Tensor, generator: torch.Generator | None) -> Codec:
        """The codec for tensors of up to `numel` elements where `memory` is, which is of `memory_bytes(numel)` on the
        host, and of any length on a device, where there is none to spare."""

    def missing_on(self, device_type: str) -> str | None:
        """Why this device cannot have a codec, and what to do; None if it can."""
        return None if device_type == "cpu" else f"{self} has no kernels for {device_type}: choose another wire"
