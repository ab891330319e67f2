"""Compares every access with the waits of streams, events and the host."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.errors import InputError
from zeromesh.simdev.build import as_value, native


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """An access without an order after an earlier one to the same bytes on another stream, if one of them writes."""

    operation: str
    where: str  # file and line of the caller outside torch
    stream: int  # -1 for the host's own access to pinned memory
    writes: bool
    earlier_operation: str  # this and the next three: of the access that may not have finished
    earlier_where: str
    earlier_stream: int
    earlier_writes: bool

    def __str__(self) -> str:
        return (
            f"{self.operation} at {self.where} {_verb(self.writes)} on {self._place} what "
            f"{self.earlier_operation} at {self.earlier_where} may still {_verb(self.earlier_writes)[:-1]} on stream "
            f"{self.earlier_stream}: nothing orders one after the other"
        )

    @property
    def _place(self) -> str:
        return "the host" if self.stream < 0 else f"stream {self.stream}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyFree:
    """A block that became free for its stream again, before that stream waited for another stream's work on it."""

    size_bytes: int  # as requested
    where: str  # of the release
    stream: int  # the block's own
    earlier_operation: str  # this and the next two: of the access that may not have finished
    earlier_where: str
    earlier_stream: int

    def __str__(self) -> str:
        return (
            f"{self.size_bytes} bytes of stream {self.stream} were freed at {self.where} while "
            f"{self.earlier_operation} at {self.earlier_where} on stream {self.earlier_stream} may still use them: "
            f"wait for it before, or call record_stream"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """The host waited for values from the device."""

    operation: str  # the operation that read them
    stream: int  # the stream that it waited for
    stack: list[str]  # the callers outside torch, "file:line", innermost first
    size_bytes: int  # bytes that were read, if known

    @property
    def where(self) -> str:
        return self.stack[0] if self.stack else "autograd"

    def __str__(self) -> str:
        return f"{self.operation} at {self.where} waits for stream {self.stream}"


class HostWait(HostRead):
    """The host waited for the device without reading from it: it synchronised, or sent memory that is not pinned."""

    __slots__ = ()


class Checker:
    """Checks all kernels of the process while the context is open. Only one can be open.

    Attributes:
        races, early_frees, host_reads, host_waits: the findings, in order. Each distinct race and early free appears
            once; all reads and waits appear.
        checked: number of accesses that were checked.

    Example:
        >>> from zeromesh import simdev
        >>> with simdev.Checker() as checker:  # doctest: +SKIP
        ...     train_one_step()
        >>> assert not checker.races and not checker.early_frees  # doctest: +SKIP
    """

    def __enter__(self) -> Checker:
        if native().is_checking():
            raise InputError("one Checker at a time: another context of this process is open")
        native().start_checking()
        return self

    def __exit__(self, *_: object) -> None:
        native().stop_checking()

    @property
    def races(self) -> list[Race]:
        return list(dict.fromkeys(as_value(Race, found) for found in native().races()))

    @property
    def early_frees(self) -> list[EarlyFree]:
        return list(dict.fromkeys(as_value(EarlyFree, found) for found in native().early_frees()))

    @property
    def host_reads(self) -> list[HostRead]:
        return [as_value(HostRead, found) for found in native().host_reads()]

    @property
    def host_waits(self) -> list[HostWait]:
        return [as_value(HostWait, found) for found in native().host_waits()]

    @property
    def checked(self) -> int:
        return int(native().checked())


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"
