"""Signals that end a command as an error does, so that what it has made is removed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit: their default action skips the end of every `with` block.

    A signal that is ignored, as SIGHUP is under nohup, stays so.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
