"""The folder by way of which ranks are told what to do, where there is no room for it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.disk import file_size_limit
from zeromesh.errors import ConfigError
from zeromesh.launch import job as module
from zeromesh.launch.job import JOB, make_job

NEEDED = r"a temporary directory, which cannot be written: .*set TMPDIR to a directory with room"


def test_a_directory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=f"{NEEDED}"), make_job("module:function", {}):
        pass


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=NEEDED), file_size_limit(0), make_job("module:function", {}):
        pass
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_when_a_rank_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it could not leave it says; nobody takes half a result for one."""
    monkeypatch.setenv("RANK", "0")
    job = {"task": "builtins:dict", "options": {}, "local": False, "prints": False}
    monkeypatch.setattr(module, "find_task", lambda task: lambda rendezvous: "result" * 100)
    (tmp_path / JOB).write_text(json.dumps(job))
    with file_size_limit(50):
        assert module.main(tmp_path) == 1
    assert "rank 0 failed: OSError: [Errno 27] File too large" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("result") and path.suffix == ".json"]
