"""Debug mode: the parameters that a unit computes with are compared before and after every use.

A gather slot carries the unit and the generation that were last gathered into it. Before a use they must be the unit's
own; and the bytes must be those of every other use in the same generation, forward, recomputation and backward, which
autograd's saved tensors take for granted and cannot check: [Note: Gathered states] of the interpreter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as untransformed

from zeromesh.comm.lane import Ticket
from zeromesh.engine.backend import DeviceBackend, written
from zeromesh.errors import InternalError
from zeromesh.schedule.interpreter import Interpreter

Stamp = tuple[int, int]  # unit and generation

_BLOCK = 1024


class SlotGuard:
    """A `schedule.Backend` before another one. It waits for the device at each use, so it is slow."""

    _interpreter: Interpreter[Ticket]

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self.refresh, self.reduce = backend.refresh, backend.reduce
        self.wait, self.has_grads = backend.wait, backend.has_grads
        self._stamps: dict[int, Stamp] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    def follow(self, interpreter: Interpreter[Ticket]) -> None:
        self._interpreter = interpreter

    def unshard(self, unit: int, *, from_kept: bool, after: Ticket | None) -> Ticket | None:
        slot = self._slot(unit)
        if slot is not None:
            self._stamps[slot] = self._stamp(unit)
        return self._backend.unshard(unit, from_kept=from_kept, after=after)

    def use(self, unit: int) -> None:
        self._check_stamp(unit, "before its use")
        generation, found = self._interpreter.states[unit].generation, self._fingerprint(unit)
        before = self._seen.get(unit)
        self._seen[unit] = generation, found
        if before is not None and before[0] == generation and before[1] != found:
            raise InternalError(
                f"unit {self._name(unit)!r} was gathered twice in generation {generation} with different values: a "
                f"parameter was changed by hand without zm.refresh(model), or the gather or its source is at fault"
            )
        self._backend.use(unit)

    def unuse(self, unit: int) -> None:
        seen = self._seen.get(unit)
        # At the start nothing has been used; a step inside a forward's reach changes gathered parameters in place.
        if seen is not None and seen[0] == self._interpreter.states[unit].generation:
            self._check_stamp(unit, "after its use")
            if seen[1] != self._fingerprint(unit):
                raise written(self._backend.units[unit].name)
        self._backend.unuse(unit)

    def _check_stamp(self, unit: int, when: str) -> None:
        slot = self._slot(unit)
        if slot is not None and self._stamps.get(slot) != self._stamp(unit):
            holder, generation = self._stamps.get(slot, (unit, 0))
            raise InternalError(
                f"slot {slot} holds generation {generation} of unit {self._name(holder)!r} {when} by "
                f"{self._name(unit)!r}, which is at generation {self._interpreter.states[unit].generation}"
            )

    def _slot(self, unit: int) -> int | None:
        return self._interpreter.schedule.memory.gather.slot_of[unit]

    def _stamp(self, unit: int) -> Stamp:
        return unit, self._interpreter.states[unit].generation

    def _name(self, unit: int) -> str:
        return self._backend.units[unit].name or "(root)"

    def _fingerprint(self, unit: int) -> int:
        with untransformed():  # `torch.func` gives no bytes
            return fingerprint([buffer.full for buffer in self._backend.units[unit].buffers])


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A number that changes with any element of flat tensors and with the order of their blocks of 1024."""
    crc = 0
    for tensor in tensors:
        bits = tensor.detach().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.itemsize])
        whole = bits.numel() // _BLOCK * _BLOCK
        sums = [bits[:whole].view(-1, _BLOCK).sum(1), bits[whole:].sum().view(1)]
        crc = zlib.crc32(torch.cat(sums).cpu().numpy().tobytes(), crc)
    return crc
