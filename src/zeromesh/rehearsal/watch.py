"""Watches everything that a step issues on the virtual device, and keeps the data for counts and timelines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch._ops import OpOverload

from zeromesh.cost.collective import FREE, Operation
from zeromesh.rehearsal.hardware import Hardware
from zeromesh.rehearsal.places import Places
from zeromesh.rehearsal.result import COMPUTE, Call
from zeromesh.rehearsal.timeline import STEP_ENDS, Communication, Issued, Kernel, Order
from zeromesh.simdev import recorder
from zeromesh.strategy import Axis

EVERYONE = "mesh"
"""The name of the group of all ranks; other groups are named after axes."""

_NOTHING = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "aten::_local_scalar_dense", "aten::lift")
"""Beginnings of the names of operators that launch nothing on a device."""

_COPIES = ("copy to the host", "copy from the host")
"""The device's names for copies."""

_OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
"""The device's operations that the cost model knows under the same names. All others count as all-to-all."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """Gets kernels, collectives and orders from the device, in the host's order. Without hardware they take no time."""

    places: Places
    hardware: Hardware | None
    axes: Mapping[str, Axis]  # of all layouts, by name
    whole: Sequence[Axis]  # of the model's own layout
    issued: list[Issued] = field(default_factory=list)  # everything, for `replay`
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (unit, kind)
    calls: list[Call] = field(default_factory=list)
    host_s: float = 0.0  # processor seconds of the recording, without this object's own
    step_s: float = 0.0  # part of them, in the last step
    _left_s: float = field(default_factory=time.process_time)

    def begin(self) -> None:
        """Begins a step, and resets the counts."""
        self.launches.clear()
        self.calls.clear()
        self.step_s = -self.host_s
        self._left_s = time.process_time()

    def end(self) -> None:
        self.host_s += time.process_time() - self._left_s
        self.step_s += self.host_s
        self.issued.append(Order(at_s=self.host_s, kind=STEP_ENDS))
        self._left_s = time.process_time()

    def __call__(self, entry: recorder.Entry) -> None:
        self.host_s += time.process_time() - self._left_s
        match entry:
            case recorder.Kernel():
                self._kernel(entry)
            case recorder.Collective():
                self._collective(entry)
            case recorder.Order():
                order = Order(at_s=self.host_s, kind=entry.kind, stream=entry.stream, event=entry.event)
                self.issued.append(order)
        self._left_s = time.process_time()

    def _kernel(self, kernel: recorder.Kernel) -> None:
        operator = _operator(kernel.name)
        if kernel.name.startswith(_NOTHING) or (operator is not None and operator.is_view):
            return
        seconds, moving = 0.0, False
        if self.hardware is not None:
            moving = self.hardware.kernels.moves(operator)
            result = kernel.results[0] if len(kernel.results) == 1 else kernel.results
            backward = self.places.now.phase == "backward"
            seconds = (
                kernel.arguments[0].nbytes / self.hardware.constants.host_copy_bytes_per_s
                if kernel.name in _COPIES
                else self.hardware.kernels.seconds(operator, kernel.arguments, result, backward=backward)
            )
        self._launched()
        self.issued.append(
            Kernel(
                at_s=self.host_s,
                stream=kernel.stream,
                seconds=seconds,
                moving=moving,
                place=self.places.now,
                kind=self.places.kind,
                micro_batch=self.places.micro_batch,
            )
        )

    def _collective(self, sent: recorder.Collective) -> None:
        # Our groups are named by axis and purpose. A mesh's group is named by its dimension, which may be several axes.
        own, dimension = sent.group.rpartition(" ")[0], sent.group.removeprefix("mesh_")
        over = [self.axes[own]] if own in self.axes else [axis for axis in self.whole if axis.mesh_axis == dimension]
        axis = EVERYONE if not over else over[0].name if len(over) == 1 else dimension
        self.calls.append(Call(axis=axis, operation=sent.name, sent_bytes=sent.sent_bytes))
        self._launched()
        operation: Operation = next((known for known in _OPERATIONS if known == sent.name), "all_to_all")
        cost = FREE
        if self.hardware is not None and sent.ranks > 1:
            cost = self.hardware.collective(
                over or self.whole, operation, whole_bytes(operation, sent.ranks, sent.sent_bytes)
            )
        self.issued.append(
            Communication(
                at_s=self.host_s,
                stream=sent.stream,
                cost=cost,
                operation=sent.name,
                axis=axis,
                unit=self.places.unit,
                sent_bytes=float(sent.sent_bytes),
                kind=self.places.kind if self.places.kind != COMPUTE else "words",
                micro_batch=self.places.micro_batch,
            )
        )

    def _launched(self) -> None:
        unit = self.places.unit
        if unit is not None:
            self.launches[unit, self.places.kind] += 1


def whole_bytes(operation: Operation, ranks: int, sent_bytes: float) -> float:
    """Bytes of a collective's buffer, from the bytes that one rank sends.

    >>> whole_bytes("all_gather", 4, 300), whole_bytes("all_reduce", 4, 600)
    (400.0, 400.0)
    """
    if operation == "broadcast":
        return sent_bytes
    passes = 2 if operation == "all_reduce" else 1
    return sent_bytes * ranks / (ranks - 1) / passes


@cache
def _operator(name: str) -> OpOverload | None:
    """Returns the operator of a full name; None for a copy, for which the device reports only its two tensors."""
    if "::" not in name or name == "aten::copy_":
        return None
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None
