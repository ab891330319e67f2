"""A forged device, in host memory: streams that know what comes after what, and a check of every access against it.

`forged_streams` makes every lane a stream's, as on CUDA. Operations run at once, in the order in which the host issues
them, so numbers are right whatever is waited for; but each stream has a vector clock, which only events and
`wait_stream` carry from one to another. An access to a watched buffer must come after every access that it conflicts
with (one of the two writes) by those clocks: on a device, nothing else would order them. A wait that is missing is
found in any run that passes it, whether or not it would have cost anything.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.comm import lane

Clock = dict[int, int]
"""By stream: how much of it has been done."""


class Event:
    """What a stream had done, and what that came after."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def query(self) -> bool:
        return True


class Stream:
    """One queue of a device."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.device = device
        self.index = len(streams.all)
        self.clock: Clock = {self.index: 1}
        self._streams = streams
        streams.all.append(self)

    def wait_event(self, event: Event) -> None:
        for index, done in event.clock.items():
            self.clock[index] = max(self.clock.get(index, 0), done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(dict(self.clock))
        self.clock[self.index] += 1
        return event

    def __enter__(self) -> Stream:
        self._streams.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.entered.pop()


Access = tuple[int, int, bool, str]
"""Stream, its clock, whether it writes, by what."""


class Streams(TorchDispatchMode):
    """All streams, what is watched, and what has been accessed.

    Attributes:
        races: what was found, as text.
        checked: accesses to watched buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Stream] = []
        self.entered: list[Stream] = []
        self.races: list[str] = []
        self.checked = 0
        self._watched: set[int] = set()
        self._accesses: dict[int, dict[tuple[int, int], list[Access]]] = defaultdict(lambda: defaultdict(list))
        self.main = Stream(self, torch.device("cpu"))

    def current(self, _: object = None) -> Stream:
        return self.entered[-1] if self.entered else self.main

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Their storages must live as long as this is used: another tensor may get the memory."""
        self._watched |= {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not function.is_view and function.namespace != "prim":
            self._look(function, args, kwargs)
        return function(*args, **kwargs)

    def _look(self, function: Any, args: Any, kwargs: Any) -> None:
        for position, name, writes in _arguments(function):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor):
                    self._access(tensor, writes, function.name())

    def _access(self, tensor: Tensor, writes: bool, name: str) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage().data_ptr()
            numel = torch.Tensor.numel(tensor)
            if storage not in self._watched or not numel:
                return
            start = tensor.data_ptr() - storage
        stop = start + numel * tensor.element_size()
        self.checked += 1
        stream = self.current()
        before = self._accesses[storage]
        for (first, last), accesses in list(before.items()):
            if first < stop and start < last:
                self._compare(stream, writes, name, accesses)
                if writes and start <= first and last <= stop:
                    del before[first, last]  # what comes after this write comes after what it came after
        access = stream.index, stream.clock[stream.index], writes, name
        if access not in before[start, stop]:
            before[start, stop].append(access)

    def _compare(self, stream: Stream, writes: bool, name: str, accesses: list[Access]) -> None:
        for index, done, wrote, what in accesses:
            if (writes or wrote) and index != stream.index and stream.clock.get(index, 0) < done:
                kinds = "writes" if writes else "reads"
                self.races.append(
                    f"{name} on stream {stream.index} {kinds} what {what} on stream {index} may not have done"
                )


@functools.cache
def _arguments(function: Any) -> list[tuple[int, str, bool]]:
    """Position, name and whether it is written, of each argument."""
    found = []
    for position, declared in enumerate(function._schema.arguments):
        writes = declared.is_out or (declared.alias_info is not None and declared.alias_info.is_write)
        if function.namespace == "c10d":  # what it writes is not declared; it comes first
            writes = position == 0 and "send" not in function.name()
        found.append((position, declared.name, writes))
    return found


@contextmanager
def forged_streams() -> Iterator[Streams]:
    """Lanes that are made inside run their jobs in forged streams."""
    streams = Streams()
    accelerator = SimpleNamespace(current_stream=streams.current)

    class Torch:
        """The module as `lane` sees it."""

        def __getattr__(self, name: str) -> Any:
            forged = {"accelerator": accelerator, "Stream": lambda device, priority: Stream(streams, device)}
            return forged.get(name) or getattr(torch, name)

    def stream_of(name: str) -> Any:
        runner = lane._Stream(name, torch.device("cpu"))
        runner.close = lambda: None  # type: ignore[method-assign]  # its lane may be dropped after this
        return runner

    with mock.patch.object(lane, "torch", Torch()), mock.patch.object(lane, "_Thread", stream_of), streams:
        yield streams


__all__ = ["Stream", "Streams", "forged_streams"]
