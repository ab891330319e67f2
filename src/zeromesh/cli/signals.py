"""Signals that end a command as an error does, so that what it has made is removed."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def exit_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into SystemExit: their default action skips every `with` block's end.

    A signal that is ignored, as SIGHUP is under nohup, stays so.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
