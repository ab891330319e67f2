"""SIGTERM asks a run to save and to end, from the moment a process starts. Torch-free.

The handler only takes note: collectives are under way, so the loop asks between two steps, and all ranks end after the
same one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_asked = threading.Event()


@contextmanager
def noticing_sigterm() -> Iterator[None]:
    """Takes note of SIGTERM inside; in another thread than the main one, which receives no signals, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    before: Any = signal.signal(signal.SIGTERM, _notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def was_asked() -> bool:
    """Whether SIGTERM has come."""
    return _asked.is_set()


def end_at_once() -> None:
    """For a run that cannot save: SIGTERM ends it as it ends any process, now if it has come already."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _notice:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_asked():
            os.kill(os.getpid(), signal.SIGTERM)


def _notice(_number: int, _frame: FrameType | None) -> None:
    _asked.set()
