"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromesh.cli import app as cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def zeromesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Exit code, stdout and stderr of `zeromesh ARGUMENTS`; an error that is a traceback fails the test."""

    def run(*arguments: str | Path, main: Callable[[], None] = cli.main) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zeromesh", *map(str, arguments)])
        code: str | int | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err

    return run
