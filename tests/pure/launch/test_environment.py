"""Torchrun's variables, right and wrong, and the folder through which ranks get their task."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.disk import file_size_limit
from zeromesh.errors import ConfigError
from zeromesh.launch import job as module
from zeromesh.launch.environment import Launched, check_address
from zeromesh.launch.job import JOB, make_job

SET = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_launched_process_knows_its_place() -> None:
    assert Launched.of(SET) == Launched(rank=3, world=4, local_rank=1, local_world=2)
    # A process started by hand has no launcher.
    assert Launched.of({"PATH": "/bin", "LOCAL_RANK": "7"}) is None


BROKEN = [
    ({"RANK": None}, "has WORLD_SIZE but not RANK"),
    ({"WORLD_SIZE": None}, "has RANK but not WORLD_SIZE"),
    ({"RANK": "first"}, "RANK must be a whole number of at least 0 and below WORLD_SIZE = 4; got 'first'"),
    ({"RANK": "4"}, "RANK must be a whole number of at least 0 and below WORLD_SIZE = 4; got '4'"),
    ({"RANK": "-1"}, "RANK must be"),
    ({"RANK": ""}, "RANK must be"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number of at least 1; got '0'"),
    ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE must be"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be a whole number of at least 0 and below LOCAL_WORLD_SIZE = 2; got '2'"),
    ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must be"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_what_cannot_be_right_is_named(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (SET | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        Launched.of(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR must say where rank 0 listens; it is not set"),
        ({"MASTER_ADDR": " "}, "it is empty"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be a whole number of at least 1 and below 65536; it is not set"),
        ({"MASTER_PORT": "http"}, "below 65536; got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be"),
    ],
)
def test_where_the_ranks_meet(changes: dict[str, str | None], message: str) -> None:
    check_address(ADDRESS)
    environ = {name: value for name, value in (ADDRESS | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_address(environ)


@pytest.mark.parametrize("count", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_do_not_know_of_each_other_are_no_runs(count: str) -> None:
    """`srun -n 8 zeromesh train` would be eight runs that write to one directory."""
    assert Launched.of({count: "1"}) is None
    assert Launched.of(SET | {count: "8"}) is not None
    with pytest.raises(ConfigError, match=rf"has {count}=8 but neither RANK nor WORLD_SIZE.*; unset {count} if"):
        Launched.of({count: "8"})


NEEDED = r"a temporary directory, which cannot be written: .*set TMPDIR to a directory with room"


def test_a_temporary_directory_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=f"{NEEDED}"), make_job("module:function", {}):
        pass
    # A disk that is full.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=NEEDED), file_size_limit(0), make_job("module:function", {}):
        pass
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_when_a_rank_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank says which result it could not leave; nobody takes half a result for a whole one."""
    monkeypatch.setenv("RANK", "0")
    job = {"task": "builtins:dict", "options": {}, "local": False, "prints": False}
    monkeypatch.setattr(module, "find_task", lambda task: lambda rendezvous: "result" * 100)
    (tmp_path / JOB).write_text(json.dumps(job))
    with file_size_limit(50):
        assert module.main(tmp_path) == 1
    assert "rank 0 failed: OSError: [Errno 27] File too large" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("result") and path.suffix == ".json"]
