"""The interface of wire formats and of their codecs, which write messages, read them and add them up. Torch-free."""

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
        """Writes every source to its message, and yields the message. The skipped one is yielded without being written.

        Args:
            sources: equally long, flat, of any floating dtype. They are views of one tensor, equally far apart; so are
                messages and residuals.
            messages: `message_bytes(numel of a source)` bytes each. Bytes beyond, here and below, are not touched.
            residuals: error feedback. They are added to the sources first, then replaced by the messages' rounding
                errors.
            skipped: index of a source to leave out; -1 leaves none out.
        """

    @abstractmethod
    def dequantise_each(self, messages: Sequence[Tensor], targets: Sequence[Tensor], *, skipped: int = -1) -> None:
        """Writes each message's values, but the skipped one's, to its target, rounded once to the target's dtype."""

    def quantise(self, source: Tensor, message: Tensor, residual: Tensor | None = None) -> None:
        """Does `quantise_each` for one source."""
        for _ in self.quantise_each([source], [message], None if residual is None else [residual]):
            pass

    def dequantise(self, message: Tensor, target: Tensor) -> None:
        """Does `dequantise_each` for one message."""
        self.dequantise_each([message], [target])

    @abstractmethod
    def reduce(self, messages: Tensor, own: Tensor, own_index: int, target: Target, part: slice) -> None:
        """Sums in fp32, in the order of ranks, the messages of other ranks and this rank's own piece as it is.

        Args:
            messages: (ranks, message bytes); the row of `own_index` is not read.
            own: flat, of any floating dtype; may be `target.out[part]` itself.
            target: where the sum goes.
            part: range of the target, as long as `own`.
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
        """Codes the result of `reduce`, scaled by the target, into a message. Its values go to `target.out[part]`.

        Args:
            messages, own, own_index, part: as for `reduce`.
            target: where the message's values go; nothing is added to them.
            message, residual: as for `quantise`.
        """


class WireFormat(ABC):
    """How elements are coded in messages. It is a value, and its `str` is its spelling in the notation.

    [Note: Laws] If a tensor is cut at multiples of `granule`, its message is as long as those of the parts together, so
    it can be sent in pieces. Zeros come back as zeros. An infinity or a nan comes back as one of the two, so that
    overflow detection still sees it.

    [Note: Which codec] One codec uses torch's operations, on any device, in memory that the schedule counts. The other
    uses a format's Triton kernels, which need no memory; it is taken if there are kernels and the device `has_triton`.
    A transport of messages always takes the first codec.

    Args:
        spellings: all that `parse` accepts, for messages.
        kernels: whether it has Triton kernels.
    """

    __slots__ = ()
    spellings: ClassVar[tuple[str, ...]]
    kernels: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the format with this spelling; None if it is another format's.

        Raises:
            NotationError: the spelling is this format's, but invalid.
        """

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def granule(self) -> int:
        """Number of elements that are coded together."""

    @abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements."""

    @property
    @abstractmethod
    def step(self) -> float:
        """How far one coding moves an element at most, divided by the largest of its granule."""

    @property
    def stochastic(self) -> bool:
        """Whether the codec draws noise."""
        return False

    def unbiased(self) -> WireFormat:
        """Returns a format with the same messages and errors of mean zero, for long sums; itself if it has none."""
        return self

    def error_bound(self, codings: int) -> float:
        """How far values may move from the exact ones in `codings` codings in a row, divided by their largest size.

        Let M be the largest |x| at the start. The k-th coding meets values of at most M*(1+h)^(k-1), and moves them by
        at most h of that. Together this is M*((1+h)^k - 1), about k*h*M. A mean over ranks does not enlarge it.
        """
        return float((1 + self.step) ** codings - 1)

    @abstractmethod
    def memory_bytes(self, numel: int) -> int:
        """Memory of the torch codec for up to `numel` elements; a multiple of 8 if `numel` is one."""

    @abstractmethod
    def codec(self, numel: int, memory: Tensor, generator: torch.Generator | None) -> Codec:
        """Returns the codec for tensors of up to `numel` elements on the device of `memory`. `memory` has
        `memory_bytes(numel)` bytes, or any number if kernels need none. `generator`, for random numbers, is on the
        host."""
