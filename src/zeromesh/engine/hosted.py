"""The host's memory for a model's shards, and the work on them there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.host import HostArena, HostLink, free_bytes
from zeromesh.comm.lane import Job
from zeromesh.engine.control import Control
from zeromesh.engine.flat import FlatShards, overlap
from zeromesh.engine.param import UNSETTLED, ShardedParameter
from zeromesh.engine.reductions import own_norms
from zeromesh.errors import ModelError
from zeromesh.files import core_numbers, machine_id
from zeromesh.strategy.stage import HOST

STREAMED = ("step 0", "step 1")
"""The lanes of steps on the device, for units of even and of odd numbers: one's copies run beside the other's step."""

_CLIP = -1  # where a clip stands among the steps of units


def take_host_memory(
    wanted: int, control: Control, device: torch.device, *, call: str, less: str
) -> tuple[HostLink, int]:
    """Memory of the host for this rank's shards, and its share of the host's cores; all ranks call this together.
    The message names the user's `call`, and how it could take `less`.

    Raises:
        ModelError: a machine has less memory than its ranks would take, states of the optimizer not counted.
    """
    found = control.gather((machine_id(), core_numbers(), wanted))
    here = [taken for machine, _, taken in found if machine == machine_id()]
    sharing = [machine for machine, cores, _ in found if (machine, cores) == (machine_id(), core_numbers())]

    def allocate() -> HostLink:
        free = free_bytes(device)
        if free is not None and sum(here) > free:
            raise ModelError(
                f"{len(here)} rank(s) of this machine need {sum(here) / 1e9:.1f} GB of its memory and further memory "
                f"for optimizer states, but only {free / 1e9:.1f} GB are free (MemAvailable, memory.max): {less}"
            )
        return HostLink(HOST, HostArena(max(1, wanted), device), device, ranks=len(here))

    return control.together(allocate, call=call), len(core_numbers()) // len(sharing)


def show_device(model: nn.Module, device: torch.device) -> None:
    """Has modules that tell a device, by which libraries place inputs, tell the one that they compute on. They ask a
    parameter, and that lies on the host."""
    for module in model.modules():
        kind = type(module)
        if isinstance(getattr(kind, "device", None), property) and module.device != device:
            told = {"device": property(lambda self: device), "__module__": kind.__module__, "__doc__": kind.__doc__}
            module.__class__ = type(kind.__name__, (kind,), told)


class HostWork:
    """The work on a model's slices in the host's memory: steps, clips, norms, parking. Whoever looks waits for it."""

    def __init__(self, backend: Any) -> None:
        self._backend: Callable[[], Any] = weakref.ref(backend)  # a `DeviceBackend`, which has this object
        self.steps: dict[int, Any] = {}  # by unit, tickets since the last wait for all; under `_CLIP` a clip
        self.clips = False  # whether clips have asked for norms of the gradients that come down
        self.away = False  # whether the whole model is parked
        self._parked: object = None  # the slices' control, while they lie elsewhere
        self._norms: dict[int, tuple[FlatShards, Tensor]] = {}  # by id of the buffer, until somebody looks at gradients
        # Versions of their memory as they were shown: plain tensors that somebody has kept may be written to.
        self._versions: dict[int, int] = {}

    def add(self, unit: int, ticket: Any) -> None:
        """A ticket that whoever looks waits for; it comes after the unit's before it."""
        self.steps[unit] = ticket
        self._list()

    def step(self, unit: int, job: Job, *, streamed: bool = False) -> None:
        """An optimizer steps on slices of a unit, beside the caller, there or (`streamed`) on the device."""
        backend = self._backend()
        lane = STREAMED[unit % 2] if streamed else "step"
        name = f"step {backend.units[unit].name}"
        self.add(unit, backend.lanes[lane].submit(job, name, after=self.steps.get(unit)))

    @property
    def error(self) -> BaseException | None:
        """That of a step."""
        return next(filter(None, (step.error for step in self.steps.values())), None)

    def owe(self, clip: Any = None) -> Any:
        """Leaves a clip of gradients to a step that asks for it, or to `settle`; returns the one that was left."""
        owed = self.steps.pop(_CLIP, None)
        if clip is not None:
            self.steps[_CLIP] = clip
        if clip is not owed:
            self._list()
        return owed

    def finding_norms(self, buffer: FlatShards) -> Job:
        """Finds the norms of a buffer's gradients on the device, before these come down."""
        there = buffer.shown.device
        pinned = there.type == "cpu" != buffer.device.type  # the launching thread waits for a copy to other memory
        norms = torch.empty(len(buffer.places), dtype=torch.float64, device=there, pin_memory=pinned)
        self._norms[id(buffer)] = buffer, norms
        self._list()
        return partial(_find_norms, buffer, norms)

    def show_norms(self) -> None:
        """The gradients are shown now."""
        self._versions = {key: _version(buffer) for key, (buffer, _) in self._norms.items()}

    def known_norms(self, params: Sequence[ShardedParameter]) -> Sequence[Tensor | None]:
        """The norms that the device has found of parameters' gradients; None of others. From now on it finds them."""
        self.clips = True
        known = {
            id(grad): norm
            for key, (buffer, norms) in self._norms.items()
            if self._versions.get(key) == _version(buffer)
            for grad, norm in zip(buffer.optimizer_grads, norms.unbind(), strict=True)
        }
        return [known.get(id(param.grad)) for param in params]

    def park(self, owner: object, *, whole: bool = False) -> None:
        """The model's shards have left their memory, or the `whole` model has, until this is called with None; `owner`
        is the slices' control."""
        self._parked, self.away = owner, whole
        self._list()
        for unit in self._backend().units:
            vars(unit).pop("sites", None)  # with addresses

    def require_here(self) -> None:
        if self._parked is not None:
            raise ModelError(
                "the model's shards lie in the host's memory inside zm.parked: leave it first (with host=1 and host=2, "
                "forwards without a backward run inside)"
            )

    def settle(self, looked: object = None) -> None:
        """Waits for the work, before somebody looks at slices of the control `looked` (None: of any).

        Raises:
            ModelError: they are parked.
        """
        if looked is None or looked is self._parked:
            self.require_here()
        self._norms.clear()  # who looks may write
        self._versions.clear()
        for unit, ticket in list(self.steps.items()):
            ticket.wait()
            self.steps.pop(unit, None)  # only now: a Ctrl-C may end the wait
        backend = self._backend()
        backend.launch()
        if backend.rewrites:
            backend.land()
        for lane in STREAMED:
            if lane in backend.lanes:
                backend.lanes[lane].synchronize()
        self._list()

    def _list(self) -> None:
        others = [each for each in UNSETTLED if each() not in (None, self)]
        UNSETTLED[:] = [*others, weakref.ref(self)] if self._parked is not None or self.steps or self._norms else others


def _find_norms(buffer: FlatShards, norms: Tensor) -> None:
    held = buffer.state_range
    ranges = [overlap(place, held) for place in buffer.places]
    slices = [buffer.reduced[start - held.start : stop - held.start] for start, stop in ranges]
    norms.copy_(own_norms(slices, 2, buffer.device, [None] * len(slices)), non_blocking=True)


def _version(buffer: FlatShards) -> int:
    assert buffer.host_grads is not None  # else nothing comes down
    return buffer.host_grads._version
