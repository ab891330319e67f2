"""Reports the host's calls in order: kernels, collectives, and the waits between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeromesh.errors import InputError
from zeromesh.simdev.build import native


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel; arguments and results are as torch's operator has them, and who keeps them keeps their memory."""

    name: str  # of torch's operator with its overload, such as `aten::mm` or `aten::add_.Tensor`; or of a copy
    stream: int  # that it runs on
    thread: int  # that issued it
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One launch of a process group: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, gather, scatter,
    reduce, send, receive, or "send and receive", which are one launch."""

    name: str
    stream: int  # that it runs on
    thread: int  # that issued it
    ranks: int  # of the group
    sent_bytes: int  # by this rank, to others
    group: str  # the group's description


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An event is recorded or waited for, or the host waits."""

    kind: str  # "record", "wait", "host waits for stream", "host waits for event" or "host waits for device"
    stream: int  # that records, or waits, or is waited for
    thread: int  # that issued it
    event: int  # number of the recording; a wait has that of the recording that it waits for. 0 where there is none


Entry = Kernel | Collective | Order


class Recorder:
    """Calls `listener` with every entry while the context is open, in the thread that issues it. One at a time."""

    _listening = False

    def __init__(self, listener: Callable[[Entry], None]) -> None:
        self._listener = listener

    def __enter__(self) -> Recorder:
        if Recorder._listening:
            raise InputError("one Recorder at a time: another context of this process is open")
        Recorder._listening = True
        native().listen(self._told)
        return self

    def __exit__(self, *_: object) -> None:
        native().listen(None)
        Recorder._listening = False

    def _told(self, kind: str, name: str, stream: int, *more: Any) -> None:
        thread = threading.get_ident()
        if kind == "kernel":
            arguments, results = more
            entry: Entry = Kernel(name=name, stream=stream, thread=thread, arguments=arguments, results=results)
        elif kind == "collective":
            ranks, sent, group = more
            entry = Collective(name=name, stream=stream, thread=thread, ranks=ranks, sent_bytes=sent, group=group)
        else:
            entry = Order(kind=name, stream=stream, thread=thread, event=more[0])
        self._listener(entry)
