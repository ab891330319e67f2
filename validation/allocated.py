"""Peak of allocated bytes, for engines whose buffers come and go with every unit.

`memory` counts gather buffers as the engine holds them; for FSDP as the caching allocator ends up holding them: the sum
over buffers that live at different times. A profile of *allocated* bytes shows less at each moment. While the backward
of unit u runs, with p the unit that ran before it in the forward::

    saved by all units up to u | gathered u and p | gradient shards of the units behind u

In addition there is the worse of two moments. Either u's computation runs: the memory that it holds, and the gradient
of its largest weight. Or it has ended: the gradients of u's weights, the flat gradient that they are copied into before
it is reduced, and u's input with its gradient. A unit with one weight needs no copy.

From torch.distributed.fsdp (FullyShardedDataParallel with BackwardPrefetch.BACKWARD_PRE): _flat_param.py takes views of
one flat parameter by `torch.split`, whose backward concatenates their gradients. _runtime_utils.py gathers the previous
unit in the pre-backward hook. It frees the unsharded gradient when its reduction is issued (`record_stream`, so it no
longer counts as allocated).
"""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.model.spec import DTYPE_BYTES, ModelSpec, Recomputation, UnitSpec, in_execution_order


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedPeak:
    """FSDP with every unit wrapped, including embedding and head."""

    model: ModelSpec
    world: int
    tokens: int  # per micro-batch and device
    seq_len: int
    recomputation: Recomputation  # of the blocks
    param_dtype: str = "bf16"  # of gathered parameters, and of gradients before they are reduced
    grad_dtype: str = "fp32"  # of gradient shards

    def above_backward_end(self) -> float:
        """Bytes on one device at the peak, beyond those that remain after the backward."""
        units = [unit for unit in in_execution_order(self.model.units) for _ in range(unit.count)]
        saved = [self.tokens * unit.saved_bytes(self.seq_len, self.recomputation) for unit in units]
        shards = [DTYPE_BYTES[self.grad_dtype] * unit.num_trainable / self.world for unit in units]
        peak = 0.0
        for index, unit in enumerate(units):
            gathered = self._weights(unit) + (self._weights(units[index - 1]) if index else 0.0)
            missing = sum(shards[: index + 1])  # shards that the end of the backward has, but this moment does not
            peak = max(peak, sum(saved[:index]) + gathered + self._own(unit) - missing)
        return peak

    def _own(self, unit: UnitSpec) -> float:
        """Bytes of the unit at the worse of the two moments."""
        width = DTYPE_BYTES[self.param_dtype]
        trained = [tensor.num_elements for tensor in unit.tensors if tensor.trainable]
        running = self.tokens * unit.backward_peak_bytes(self.seq_len, self.recomputation)
        copies = 2 if len(trained) > 1 else 1
        ended = 2 * self.tokens * width * self.model.hidden + copies * width * sum(trained)
        return max(running + width * max(trained, default=0), ended)

    def _weights(self, unit: UnitSpec) -> float:
        return DTYPE_BYTES[self.param_dtype] * unit.num_params
