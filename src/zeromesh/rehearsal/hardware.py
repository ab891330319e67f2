"""The device and links that a rehearsal is timed on, and the size of the device's memory.

[Note: Kernels] Matrix products and attention take the time of their FLOPs, by torch's own formulas
(`torch.utils.flop_counter`) and the planner's constants: [Note: Shape classes] of `zeromesh.cost`. Every other kernel
takes the time of its bytes: it reads each argument and writes each result once. A view of another tensor counts its own
bytes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.collective import FREE, CollectiveCost, Operation
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import InputError
from zeromesh.modules import DTYPE_NAMES
from zeromesh.simulator.run import DEFAULT_MARGIN
from zeromesh.strategy import Axis

aten = torch.ops.aten

Shapes = tuple[float, float, float]
"""Rows, inner and outer dimension of a matrix product."""

_PRODUCTS: dict[Any, Callable[..., Shapes]] = {
    aten.mm: lambda a, b, *_: (a.shape[0], a.shape[1], b.shape[1]),
    aten.addmm: lambda _, a, b, *__: (a.shape[0], a.shape[1], b.shape[1]),
    aten.bmm: lambda a, b, *_: (a.shape[1], a.shape[2], b.shape[2]),
    aten.baddbmm: lambda _, a, b, *__: (a.shape[1], a.shape[2], b.shape[2]),
}

_LOOK_UP = (aten.embedding, aten.index, aten.index_select, aten.gather, aten.take_along_dim)
"""Operators that read as much of their table as they write."""

_OVERWRITE = (aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_, aten.normal_, aten.uniform_)
"""Operators that do not read their destination."""

_BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    compute: ComputeModel
    _by_dtype: dict[torch.dtype, ComputeModel] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, function: OpOverload | None, args: Sequence[Any], result: Any, *, backward: bool) -> float:
        """Seconds of one launch of an operator; `args` are all its arguments, in its schema's order. If `function` is
        None, of a copy from the first argument to the second. With `backward`, matrix products run at another rate."""
        formula = None if function is None else _formula(function)
        if function is None or formula is None:
            return self.compute.memory(moved_bytes(function, args, result))
        packet = function._overloadpacket
        declared = function._schema.arguments
        named = {d.name: value for d, value in zip(declared, args, strict=True)}
        positional = [named[d.name] for d in declared if not d.kwarg_only]
        options = {d.name: named[d.name] for d in declared if d.kwarg_only}
        flops = float(formula(*positional, **options, out_val=result))
        compute = self._of(next(tensors_of(args)).dtype)
        shapes = _PRODUCTS.get(packet)
        if shapes is not None:
            return compute.product(*(max(1.0, n) for n in shapes(*args)), flops=flops, backward=backward)
        if "scaled_dot_product" in packet.__name__:
            flops /= 2 if named.get("is_causal") else 1
            return compute.attention(flops, backward=_BACKWARD in packet.__name__)
        return flops / (compute.matrix_flops * compute.constants.matmul_share)

    def moves(self, function: OpOverload | None) -> bool:
        """Whether the kernel waits for memory and computes next to nothing."""
        return function is None or _formula(function) is None

    def _of(self, dtype: torch.dtype) -> ComputeModel:
        """The model at the rates of `dtype`, if the device has any."""
        if dtype not in self._by_dtype:
            name = self.compute.device.compute_dtype(DTYPE_NAMES.get(dtype, ""))
            self._by_dtype[dtype] = replace(self.compute, dtype=name)
        return self._by_dtype[dtype]


@cache
def _formula(function: OpOverload) -> Callable[..., int] | None:
    """Torch's formula for an operator's FLOPs. The virtual device's own attention uses fused attention's."""
    packet = function._overloadpacket
    if function.namespace == "zeromesh":
        fused = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
        packet = fused[_BACKWARD in packet.__name__]
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula


def moved_bytes(function: OpOverload | None, args: Sequence[Any], result: Any) -> int:
    """Bytes that a kernel reads and writes: [Note: Kernels]."""
    made = sum(map(_held_bytes, tensors_of((result,))))
    sizes = [sum(map(_held_bytes, tensors_of((value,)))) for value in args]
    if function is None:
        return sum(sizes)
    packet = function._overloadpacket
    if packet in _LOOK_UP:
        return 2 * made
    read = written = 0
    for declared, size in zip(function._schema.arguments, sizes, strict=True):
        writes = declared.alias_info is not None and declared.alias_info.is_write
        written += size if writes else 0
        read += 0 if writes and (packet in _OVERWRITE or declared.is_out) else size
    return read + (written or made)  # tensors that are written in place are returned as well


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def _held_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor really takes: an expanded tensor's storage, a sharded parameter's slice."""
    with torch._C.DisableTorchFunctionSubclass():
        sizes, strides = Tensor.size(tensor), Tensor.stride(tensor)
    return prod(size for size, stride in zip(sizes, strides, strict=True) if stride) * tensor.element_size()


_WORD_BYTES = 4


class Hardware:
    """A cluster, whose levels are the mesh's axes, with the shipped constants, which the planner also uses. It gives
    times of kernels and of collectives (`transfers`)."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.constants = cluster, default_constants().on(cluster)
        compute = ComputeModel(device=cluster.device, constants=self.constants)
        self.kernels = KernelModel(compute=compute)
        self.transfers = TransferModel.of(cluster, self.constants, compute)

    @property
    def limit_bytes(self) -> float:
        """A device's memory, less the margin that plans leave."""
        return self.cluster.device.memory_bytes * (1 - DEFAULT_MARGIN)

    def overhead_bytes(self, communicators: int) -> float:
        """Memory of a process without its tensors. The allocator's loss is part of reserved memory."""
        messages = self.cluster.messages
        return self.constants.overhead_bytes(messages=messages, communicators=communicators, dynamic_bytes=0.0)

    def require_levels(self, axes: Sequence[Axis]) -> None:
        """Raises InputError if an axis, for example of a part's mesh, is not a level of the cluster."""
        levels = [level.name for level in self.cluster.levels]
        for axis in axes:
            if axis.mesh_axis not in levels:
                raise InputError(
                    f"axis {axis.name} is none of the levels of {self.cluster.name}, {', '.join(levels)}, so that it "
                    f"has no time: give the part a slice of the mesh, as mesh['{levels[-1]}'], or no cluster"
                )

    def collective(self, axes: Sequence[Axis], operation: Operation, full_bytes: float) -> CollectiveCost:
        """Cost of one collective over the group of `axes`, on a whole buffer of `full_bytes` on the wire."""
        axes = [axis for axis in axes if axis.size > 1]
        if not axes or full_bytes <= 0:
            return FREE
        return self.transfers.joint(axes, operation, max(1, round(full_bytes / _WORD_BYTES)), "fp32")
