"""Reports the host's calls in order: kernels, collectives, and waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeromesh.errors import InputError
from zeromesh.simdev.build import native


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel. Arguments and results are those of torch's operator; keeping them keeps their memory."""

    name: str  # torch's operator with its overload, such as `aten::mm` or `aten::add_.Tensor`, or a copy
    stream: int  # the stream that it runs on
    thread: int  # the thread that issued it
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One launch of a process group: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, gather, scatter,
    reduce, send, receive, or "send and receive", which is one launch."""

    name: str
    stream: int  # the stream that it runs on
    thread: int  # the thread that issued it
    ranks: int  # of the group
    sent_bytes: int  # by this rank, to others
    group: str  # the group's description


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Recording of an event, a wait for an event, or a wait of the host."""

    kind: str  # "record", "wait", "host waits for stream", "host waits for event" or "host waits for device"
    stream: int  # the stream that records, waits, or is waited for
    thread: int  # the thread that issued it
    event: int  # number of the recording, also for a wait for it; 0 if there is none


Entry = Kernel | Collective | Order


class Recorder:
    """Calls `listener` with every entry while the context is open, in the issuing thread. Only one can be open."""

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
