"""Progress of long work, on standard error where that is a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PROGRESS_AFTER_S = 2.0
"""Work that is shorter shows no progress."""

_doing: list[list[str]] = []  # (work, how far it is) of each `progress` that is open, innermost last


@contextmanager
def progress(work: str) -> Iterator[None]:
    """Shows the work inside on standard error, where that is a terminal, once it has taken some seconds.

    The first of several ranks shows it; the innermost of nested work is shown.
    """
    shows = not _doing and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    _doing.append([work, ""])
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(ended,), daemon=True)
    if shows:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if shows:
            thread.join()
        _doing.pop()


def note(done: str) -> None:
    """Says how far the innermost `progress` is: "3 of 12 layers"."""
    if _doing:
        _doing[-1][1] = done


def _show(ended: threading.Event) -> None:
    start_s = time.monotonic()
    if ended.wait(PROGRESS_AFTER_S):
        return
    from rich.console import Console  # most work ends before
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        while not ended.wait(0.1):
            work = ": ".join(filter(None, _doing[-1]))
            text = f"{work}, {time.monotonic() - start_s:.0f} s"
            status.update(Text(text, no_wrap=True, overflow="ellipsis"))
