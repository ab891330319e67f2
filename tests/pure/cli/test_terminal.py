"""`plan` and `simulate` in a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from zeromesh import progress
from zeromesh.cli import app as cli

COLUMNS = 80
BASE = [
    *("--model", "llama-7b", "--cluster", "frontier-mi250x", "--world", "64", "--seq-len", "4096"),
    *("--global-batch-tokens", "1048576", "--micro-batch", "1", "--activation-checkpointing", "full"),
]


def in_terminal(*arguments: str, erased: bool = False) -> tuple[int, list[str]]:
    """Exit code and lines of `zeromesh ARGUMENTS` in a terminal, its control sequences taken out, and erased lines too
    unless asked for. In a fork of this process, since imports take as long as most commands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child, ours = pty.fork()
    if child == 0:
        run_here(arguments)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # Linux's end of a terminal that nothing has open
            break
        if not chunk:
            break
        chunks.append(chunk)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ours)
    text = re.sub(r"\x1b\[(?:\?25[hl]|[0-9;]*m)", "", b"".join(chunks).decode()).replace("\r\n", "\n")
    if not erased:
        text = re.sub(r"[^\n]*\n?\r(?:\x1b\[1A)?\x1b\[2K", "", text)
    return code, [re.sub(r"\x1b\[[0-9;]*[A-Z]", "", line).rstrip() for line in text.split("\n")]


def run_here(arguments: Sequence[str]) -> NoReturn:
    """In the child, which has a terminal as its standard streams."""
    code = 1
    try:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm-256color"
        sys.argv = ["zeromesh", *arguments]
        with open(0) as sys.stdin, open(1, "w") as sys.stdout, open(2, "w") as sys.stderr:
            try:
                cli.main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def names_of(lines: list[str]) -> list[str]:
    return [word.strip(",;:") for line in lines for word in line.split() if "=" in word]


def test_a_plan_breaks_no_name_and_drops_no_memory() -> None:
    code, lines = in_terminal("plan", *BASE, "--within", "0", "--what-if", "cluster.bandwidth=2x")
    assert code == 0 and max(map(len, lines)) <= COLUMNS
    start = lines.index("candidates") + 1
    blocks = [lines[index : index + 3] for index in range(start, lines.index("", start), 3)]
    assert len(blocks) > 1
    for name, step, memory in blocks:
        assert name.startswith("  package=") and " a step, " in step
        assert re.match(r"    [\d.]+ [GM]B; \d+ micro-batch(es)? of 1 sequence, ", memory)
    names = [name for name in names_of(lines) if name.startswith("package=")]
    assert names and all(name.count("cluster") >= 1 for name in names)  # whole to their last axis
    assert any(line.startswith("  what if cluster.bandwidth=2x: package=") for line in lines)


def test_progress_is_shown_in_a_terminal_alone(zeromesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("plan", *BASE, "--world", "16", "--global-batch-tokens", "131072", "--no-robust", "--json")
    monkeypatch.setattr(progress, "PROGRESS_AFTER_S", 0)
    code, lines = in_terminal(*arguments, erased=True)
    text = "".join(lines)
    shown = re.findall(r"searching layouts: [\d,]+ simulated, at most [\d.]+% from the fastest, \d+ s", text)
    assert code == 0 and len(shown) > 1
    assert text.endswith("}")  # the bar is overwritten
    code, out, err = zeromesh(*arguments, "--splits", "none")
    assert code == 0 and err == "" and out.startswith("{")
