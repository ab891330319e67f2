"""Seconds of a unit's forward and backward on one device.

[Note: Shape classes] There are three kinds of work, each with its own measured efficiency:

- matrix products: achievable rate * share / (1 + d0 * (1/rows + 1/inner + 1/outer) / 3), since a product's arithmetic
  intensity falls with the reciprocals of its dimensions; d0 is `matmul_scale`.
- fused attention: achievable rate * share, on the scores that a causal kernel computes. If every token saw `context`
  tokens, the sequence or the window, these are the share 1 - context / (2 * seq_len) of all scores.
- everything else: bytes over the device's memory bandwidth * share.

If the device's file has kernels, the rate is that of the measured kernel of the same dtype with the nearest shape. For
products, the term in brackets is then that of the asked shape over that of the measured one. The bytes of "everything
else" are counted by `ActivationSpec.elementwise`, as in the measurement.

In the backward, a product computes the input's gradient and, if the weight is trainable, the weight's: the same three
dimensions in another order. An elementwise kernel reads its saved values and the gradient, and writes one: twice the
forward's traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeromesh.cluster.device import Device, Kernel
from zeromesh.cost.constants import Constants
from zeromesh.model.spec import AttentionSpec, MatmulSpec, Recomputation, UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of one micro-batch on one device. `recompute` is the part of the backward that runs the forward again.
    `weights` is the part of `backward` that only gradients of weights need. `moving` is the share of the total in which
    the device waits for its memory."""

    forward: float
    backward: float
    recompute: float
    weights: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.recompute + self.backward

    def collecting(self, seconds: float) -> UnitSeconds:
        """Returns a copy whose backward ends with `seconds` for copying gradients."""
        if not seconds:
            return self
        return replace(
            self,
            backward=self.backward + seconds,
            weights=self.weights + seconds,
            moving=(self.moving * self.total + seconds) / (self.total + seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """A device, with the constants for its achievable rates."""

    device: Device
    constants: Constants
    dtype: str | None = None  # of matrix products; None: the device chooses

    @property
    def matrix_flops(self) -> float:
        """The best rate of a matrix product in FLOP/s: the measured one, or the usual share of the peak."""
        measured = self.device.achievable(self.dtype)
        return measured if measured is not None else self.device.peak(self.dtype) * self.constants.achievable_share

    @property
    def memory_bytes_per_s(self) -> float:
        """The memory rate of elementwise kernels. If the device states no bandwidth, a typical one."""
        stated = self.device.memory_bytes_per_s
        nominal = self.device.peak() / self.constants.flops_per_byte if stated is None else stated
        return nominal * self.constants.memory_share

    def unit(self, unit: UnitSpec, *, tokens: float, seq_len: int, recomputation: Recomputation) -> UnitSeconds:
        """Seconds of one of `unit`'s copies, for `tokens` tokens in sequences of `seq_len`."""
        products = sum(self.matmul(m, tokens) for m in unit.matmuls)
        attention = self._attention_of(unit.attention, tokens, seq_len)
        other = tokens / self.matrix_flops
        moving = self.elementwise(unit, tokens, seq_len)
        forward = products + attention + moving + unit.other_forward_flops * other
        if not unit.returned:
            return UnitSeconds(
                forward=forward, backward=0.0, recompute=0.0, moving=moving / forward if forward else 0.0
            )
        gradients = [(m.returned * self.matmul(m, tokens, backward=True), m.trainable_share) for m in unit.matmuls]
        weights = sum(seconds * share for seconds, share in gradients)
        moving_back = 2 * self.elementwise(unit, tokens, seq_len, backward=True)
        backward = (
            sum(seconds for seconds, _ in gradients)
            + weights
            + self._attention_of(unit.attention, tokens, seq_len, backward=True)
            + moving_back
            + unit.other_backward_flops * other
        )
        again, recompute = unit.recomputes(recomputation), 0.0
        if again:
            selective = recomputation is Recomputation.SELECTIVE
            recompute = sum(self.matmul(m, tokens) for m in unit.selected_matmuls) + moving if selective else forward
        whole = forward + recompute + backward
        return UnitSeconds(
            forward=forward,
            backward=backward,
            recompute=recompute,
            weights=weights,
            moving=(moving + again * moving + moving_back) / whole if whole else 0.0,
        )

    def matmul(self, matmul: MatmulSpec, tokens: float, *, backward: bool = False) -> float:
        """Forward seconds of one `MatmulSpec`, for all of its count; or the seconds of one gradient."""
        rows = max(1.0, tokens * matmul.rows_per_token)
        model = self if matmul.dtype is None else replace(self, dtype=matmul.dtype)
        return model.product(rows, matmul.inner, matmul.outer, flops=matmul.forward_flops * tokens, backward=backward)

    def product(self, rows: float, inner: float, outer: float, *, flops: float, backward: bool = False) -> float:
        """Seconds of matrix products of these dimensions, with `flops` FLOPs together: [Note: Shape classes]."""
        constants = self.constants
        measured = self._kernel("product", rows, inner, outer)
        waste = self._waste(rows, inner, outer)
        if measured is not None:
            return flops / measured.rate(backward=backward) * waste / self._waste(*measured.shape)
        share = constants.matmul_backward_share if backward else constants.matmul_share
        return flops * waste / (self.matrix_flops * share)

    def _waste(self, rows: float, inner: float, outer: float) -> float:
        return 1 + self.constants.matmul_scale * (1 / rows + 1 / inner + 1 / outer) / 3

    def attention(self, flops: float, *, backward: bool = False, shape: tuple[float, float] | None = None) -> float:
        """Seconds of fused attention with `flops` FLOPs for all heads and queries, without skipped ones.

        `shape`: the tokens that a query sees, and the elements of a head, if known.
        """
        constants = self.constants
        measured = self._kernel("attention", *shape) if shape else None
        if measured is not None:
            return flops / measured.rate(backward=backward)
        share = constants.attention_backward_share if backward else constants.attention_forward_share
        return flops / (self.matrix_flops * share)

    def optimizer(self, elements: float) -> float:
        """Seconds of an AdamW step on `elements` of the state shard."""
        moved = elements * self.constants.optimizer_bytes
        measured = self._kernel("optimizer")
        return moved / measured.forward if measured else self.memory(moved)

    def host_step(self, elements: float, devices: int) -> float:
        """Seconds of a step in the host's memory, while the ranks of `devices` step at once."""
        return elements * self.constants.optimizer_bytes * devices / self.constants.host_memory_bytes_per_s

    def gradients(self, moved_bytes: float, *, added: bool = False) -> float:
        """Seconds for copying gradients from where autograd leaves them; if `added`, for adding them to others."""
        measured = self._kernel("gradients")
        return moved_bytes / measured.rate(backward=added) if measured else self.memory(moved_bytes)

    def _kernel(self, kind: str, *shape: float) -> Kernel | None:
        return self.device.kernel(kind, self.dtype or self.device.matrix_dtype, shape)

    def memory(self, moved_bytes: float) -> float:
        """Seconds of a kernel that reads and writes `moved_bytes`: copies, casts, quantisation."""
        return moved_bytes / self.memory_bytes_per_s

    def _attention_of(
        self, attention: AttentionSpec | None, tokens: float, seq_len: int, *, backward: bool = False
    ) -> float:
        if attention is None:
            return 0.0
        flops = attention.backward_flops(seq_len) if backward else attention.forward_flops(seq_len)
        flops = flops * causal_share(attention, seq_len) * tokens
        return self.attention(flops, backward=backward, shape=(attention.context(seq_len), attention.head_dim))

    def elementwise(self, unit: UnitSpec, tokens: float, seq_len: int, *, backward: bool = False) -> float:
        """Seconds of a forward's memory traffic, or of as many bytes in the backward, which has twice as many."""
        moved = unit.activations.elementwise.at(seq_len) * tokens
        measured = self._kernel("elementwise")
        return moved / measured.rate(backward=backward) if measured else self.memory(moved * self.constants.traffic)


def causal_share(attention: AttentionSpec, seq_len: int) -> float:
    # A fused causal kernel skips masked scores; an unfused one computes all. The first tokens of a sequence see 1, 2, 3
    # ... tokens, half a context on average. Those after them see the whole context.
    return 1 - attention.causal * attention.context(seq_len) / (2 * seq_len) if attention.fused else 1.0
