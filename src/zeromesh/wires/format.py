"""The interface of wire formats and of their codecs, who write and read messages and add them up. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zeromesh.wires.target import Target


class Codec(ABC):
    """Writes and reads messages of one format, without allocating."""

    @abstractmethod
    def quantise_each(
        self,
        sources: Sequence[Tensor],
        messages: Sequence[Tensor],
        residuals: Sequence[Tensor] | None = None,
        *,
        skipped: int = -1,
    ) -> Iterator[Tensor]:
        """Writes every source to its message, and yields that; the skipped one is not written.

        Args:
            sources: equally long, flat, of any floating dtype; views of one tensor, equally far apart, as are messages
                and residuals.
            messages: `message_bytes(numel of a source)` bytes; bytes beyond them, here and below, are not touched.
            residuals: error feedback: added to the sources first, then replaced by the messages' rounding errors.
            skipped: index of one that is left out; -1 leaves none out.
        """

    @abstractmethod
    def dequantise_each(self, messages: Sequence[Tensor], targets: Sequence[Tensor], *, skipped: int = -1) -> None:
        """Writes every message's values to its target, rounded once to its dtype, but for the skipped one."""

    def quantise(self, source: Tensor, message: Tensor, residual: Tensor | None = None) -> None:
        """`quantise_each` of one."""
        for _ in self.quantise_each([source], [message], None if residual is None else [residual]):
            pass

    def dequantise(self, message: Tensor, target: Tensor) -> None:
        """`dequantise_each` of one."""
        self.dequantise_each([message], [target])

    @abstractmethod
    def reduce(self, messages: Tensor, own: Tensor, own_index: int, target: Target, part: slice) -> None:
        """Adds up in fp32, in the order of the ranks, the messages of the others and the own piece as it is.

        Args:
            messages: (ranks, message bytes); the row of `own_index` is not read.
            own: flat, of any floating dtype; may be `target.out[part]` itself.
            target: of the sum.
            part: of the target, as long as `own`.
        """

    @abstractmethod
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
        """`reduce`, times the target's scale, to a message, whose values go to `target.out[part]`.

        Args:
            messages, own, own_index, part: as for `reduce`.
            target: of the message's values; nothing is added to them.
            message, residual: as for `quantise`.
        """


class WireFormat(ABC):
    """How elements are coded in messages; a value, whose `str` is how the notation spells it.

    [Note: Laws] Of a multiple of `granule` elements the message is as long as those of its parts together, so that a
    tensor can go in pieces. Zeros come back as zeros. An infinity or a nan comes back as one or the other, so that
    overflow detection still sees it.

    [Note: Which codec] One of torch's operations, on any device, in memory that the schedule counts; a format's kernels
    in Triton, which need none, where it has some and the device `has_triton`. A transport of messages always takes the
    first.

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
        where kernels need none. The generator of random numbers is on the host."""
