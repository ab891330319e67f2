"""A codec that uses torch's operations, for any format and device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zeromesh.errors import InputError
from zeromesh.wires.format import Codec, WireFormat
from zeromesh.wires.target import Target


class TorchCodec(Codec):
    """A codec that uses torch's operations, through fp32, on any device. A format only adds `encode` and `decode`.

    Args:
        form: the format.
        numel: longest tensor at a time, a multiple of the granule; a few 10^5 elements stay in a host's cache.
        memory: `form.memory_bytes(numel)` bytes. This class uses the first `BYTES` per element.

    Raises:
        InputError: the length is not a multiple of the granule.
    """

    BYTES = 8

    def __init__(self, form: WireFormat, numel: int, memory: Tensor) -> None:
        if numel % form.granule:
            raise InputError(f"a codec's length must be a multiple of the granule of {form.granule}; got {numel}")
        self._form = form
        self._values, self._total = memory[: self.BYTES * numel].view(torch.float32).chunk(2)

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor, *, restore: bool) -> None:
        """Writes fp32 `values`, whole granules, to `message`. Overwrites them; with `restore`, by the message's."""

    @abstractmethod
    def decode(self, message: Tensor, values: Tensor) -> None:
        """Fills fp32 `values`, whole granules, with the values of `message`."""

    def quantise_each(
        self,
        sources: Sequence[Tensor],
        messages: Sequence[Tensor],
        residuals: Sequence[Tensor] | None = None,
        *,
        skipped: int = -1,
    ) -> Iterator[Tensor]:
        """See `Codec`. Each message is yielded before the next is written."""
        for rank, (source, message) in enumerate(zip(sources, messages, strict=True)):
            if rank != skipped:
                self.quantise(source, message, None if residuals is None else residuals[rank])
            yield message

    def dequantise_each(self, messages: Sequence[Tensor], targets: Sequence[Tensor], *, skipped: int = -1) -> None:
        for rank, (message, target) in enumerate(zip(messages, targets, strict=True)):
            if rank != skipped:
                self.dequantise(message, target)

    def quantise(self, source: Tensor, message: Tensor, residual: Tensor | None = None) -> None:
        values = self._whole(source.numel())
        numel, message = source.numel(), message[: self._form.message_bytes(source.numel())]
        values[:numel].copy_(source)
        values[numel:].zero_()
        if residual is None:
            self.encode(values, message, restore=False)
            return
        residual.copy_(values[:numel].add_(residual))
        self.encode(values, message, restore=True)
        # After an overflow the residual is zero: a nan would never go away.
        residual.sub_(values[:numel]).nan_to_num_(0.0, 0.0, 0.0)

    def dequantise(self, message: Tensor, target: Tensor) -> None:
        target.copy_(self._decoded(message, target.numel()))

    def reduce(self, messages: Tensor, own: Tensor, own_index: int, target: Target, part: slice) -> None:
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
        self.quantise(self._sum(messages, own, own_index).mul_(target.scale), message, residual)
        self.dequantise(message, target.out[part])

    def _sum(self, messages: Tensor, own: Tensor, own_index: int) -> Tensor:
        total, widened = self._total[: own.numel()].zero_(), self._values[: own.numel()]
        for rank, message in enumerate(messages):
            if rank != own_index:
                total.add_(self._decoded(message, own.numel()))
            else:
                total.add_(own if own.dtype == total.dtype else widened.copy_(own))
        return total

    def _decoded(self, message: Tensor, numel: int) -> Tensor:
        values = self._whole(numel)
        self.decode(message[: self._form.message_bytes(numel)], values)
        return values[:numel]

    def _whole(self, numel: int) -> Tensor:
        """Memory for `numel` elements, rounded up to whole granules."""
        granule = self._form.granule
        return self._values[: -(-numel // granule) * granule]
