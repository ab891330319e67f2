"""What all ranks say to each other at a step's end: who has used which parameters, and in which order units ran."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zeromesh.comm import Ticket
from zeromesh.engine.backend import DeviceBackend
from zeromesh.engine.control import Control
from zeromesh.errors import MismatchError
from zeromesh.schedule import Interpreter

_PRIME = 2**31 - 1


class Agreement:
    """Of the steps of one model.

    Args:
        interpreter: whose order of units is compared, and which adopts it once all ranks have the same.
        backend: whose parameters are used.
        control: all ranks.
    """

    def __init__(self, interpreter: Interpreter[Ticket], backend: DeviceBackend, control: Control) -> None:
        self._interpreter = interpreter
        self._backend = backend
        self._control = control
        self._ordered = False
        self._said: Ticket | None = None

    def used(self) -> Sequence[int]:
        """Whether any rank has had a gradient of each parameter, in the order of units; collective.

        Raises:
            MismatchError: on all ranks, where parameters are sharded and units were called in different orders.
        """
        used = [flag for unit in self._backend.units for flags in unit.used for flag in flags]
        if self._ordered and not self._interpreter.schedule.shards_params:
            return self._beside(used)
        order = zlib.crc32(repr(self._interpreter.seen).encode()) % _PRIME
        calls = self._interpreter.digest % _PRIME
        words = [*map(int, used), order, -order, calls, -calls]
        *flags, high_order, low_order, high_calls, low_calls = self._control.agree(words)
        self._learn(high_order == -low_order, high_calls == -low_calls)
        return flags

    def _beside(self, used: list[bool]) -> list[bool]:
        """A rank that has used all knows, and does not wait for what the others say, where nothing else is to be
        compared: no gathers, and an order that all have learnt."""
        self._interpreter.digest = 0
        if self._control.group is None:
            return used
        if self._said is not None:
            self._said.wait()  # the last step's, long done; its words must live so long
        words = self._control.words(used, torch.int32)
        self._said = self._backend.agree(words)
        if all(used):
            return used
        self._said.wait()
        return [bool(word) for word in words.tolist()]

    def _learn(self, same_order: bool, same_gathers: bool) -> None:
        schedule, seen = self._interpreter.schedule, self._interpreter.seen
        if schedule.shards_params and not (same_order and same_gathers):
            names = [self._backend.units[unit].name or "(root)" for unit in seen]
            raise MismatchError(
                "all ranks must call the units in the same order while parameters are sharded; this step they did not: "
                f"on rank {self._control.rank} the order was {', '.join(names)}. Gradients of this step are not valid. "
                "Run every unit on every rank (on dummy data if need be), or shard no parameters (stages 0, 1, 2)"
            )
        if not self._ordered and same_order:
            self._ordered = True
            self._interpreter.adopt([*seen, *(unit for unit in schedule.order if unit not in seen)])
        self._interpreter.digest = 0
