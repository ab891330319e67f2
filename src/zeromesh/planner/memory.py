"""Bytes of model state per device, in closed form.

With Psi parameters, Psi' of them trainable, w the dtypes' bytes and N3, N3d, N2, N1 the products of the axis sizes at
each stage:

    parameters  w_p * Psi / (N3 * N3d)
    gradients   w_g * Psi' / (N3 * N2)
    states      (w_m + moments) * Psi' / (N3 * N3d * N2 * N1)       w_m = 0 where masters are parts of compute copies
    kept        w * Psi / (product of the parameter axes that are not kept)

These leave out padding, so they bound from below what `zeromesh.schedule.MemoryPlan` allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.model.spec import DTYPE_BYTES
from zeromesh.schedule import FlatBuffer
from zeromesh.schedule.placed import Placed
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.simulator.memory import MOMENTS
from zeromesh.strategy import Layout
from zeromesh.wires import coded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Bytes on one device."""

    params: float
    grads: float
    optimizer: float
    kept: float = 0.0

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optimizer + self.kept


def bytes_each(wire: str) -> float:
    """Bytes of one element on a wire, the scales of quantised blocks included."""
    form = coded(wire)
    numel = form.granule if form else 1
    return wire_bytes(numel, wire) / numel


def moment_bytes(master_dtype: str) -> float:
    """Of the optimizer's states beside the master, for each of its elements."""
    return MOMENTS * DTYPE_BYTES[master_dtype]


def model_state(
    layout: Layout,
    num_params: int,
    num_trainable: int | None = None,
    *,
    param_dtype: str = "bf16",
    grad_dtype: str = "fp32",
    master_dtype: str = "fp32",
) -> ModelState:
    """Model-state bytes per device of a layout.

    Args:
        layout: the strategy on its mesh.
        num_params: Psi.
        num_trainable: Psi'; None for all.

    >>> layout = Layout.of("node=3,cluster[4]=1,cluster[*]=0", [("node", 8), ("cluster", 128)])
    >>> round(model_state(layout, 27_573_049_344, grad_dtype="bf16").total / 1e9, 2)
    24.13
    """
    trainable = num_params if num_trainable is None else num_trainable
    by_param, by_grad = layout.degree(layout.param_axes), layout.degree(layout.grad_axes)
    by_state = layout.degree(layout.significant)
    buffer = FlatBuffer(numel=num_params, param_dtype=param_dtype, master_dtype=master_dtype)
    placed = Placed.of(layout, buffer)
    master = 0.0 if placed.master_in_params else DTYPE_BYTES[master_dtype]
    dropped = layout.degree([axis for axis in layout.param_axes if not axis.stage.kept])
    return ModelState(
        params=DTYPE_BYTES[param_dtype] * num_params / by_param,
        grads=DTYPE_BYTES[grad_dtype] * trainable / by_grad,
        optimizer=(master + moment_bytes(master_dtype)) * trainable / by_state,
        kept=bytes_each(placed.kept_wire) * num_params / dropped if placed.kept_axis else 0.0,
    )
