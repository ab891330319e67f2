"""A wrong rehearsal is refused before any process starts, in one message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from zeromesh.cli.app import main
from zeromesh.errors import InputError
from zeromesh.rehearsal import launch
from zeromesh.rehearsal.launch import rehearse_config

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "_rehearse", fail)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"world": 1024}, "mesh cluster=2 x node=2 has 4 ranks, but --world asks for 1024; .*--set mesh"),
        ([], {"ranks": (0, 4)}, "--rank: ranks of this mesh are 0 to 3, got 4"),
        (["strategy=node=3,rack=1"], {}, "rack"),
        (
            ["mesh={node=4}", "strategy=node=3", "cluster=a800-8x-hdr"],
            *({}, "outermost first cluster, node; the mesh has node"),
        ),
    ],
)
def test_what_is_refused(overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rehearse_config(DEMO, overrides, **options)
    with pytest.raises(AssertionError, match="a process was started"):  # by a mesh that may be re-sized
        rehearse_config(DEMO, ["faults.resize=true"], world=64)


def test_the_command_says_it_once_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeromesh", "rehearse", str(DEMO), "--world", "7"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.count("zeromesh: mesh cluster=2 x node=2 has 4 ranks") == 1
