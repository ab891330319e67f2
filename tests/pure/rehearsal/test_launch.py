"""What is wrong with a rehearsal is said before any process starts, in one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zeromesh.cli.app import main
from zeromesh.errors import ClusterError, MeshError, NotationError
from zeromesh.rehearsal import launch
from zeromesh.rehearsal.launch import rehearse_config

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "_rehearse", fail)


def test_a_world_that_the_mesh_does_not_give() -> None:
    with pytest.raises(
        MeshError, match=r"mesh cluster=2 x node=2 has 4 ranks, but --world asks for 1024; .*--set mesh"
    ):
        rehearse_config(DEMO, world=1024)


def test_a_mesh_that_may_be_resized_gives_it() -> None:
    with pytest.raises(AssertionError, match="a process was started"):
        rehearse_config(DEMO, ["faults.resize=true"], world=64)


def test_a_rank_that_the_mesh_does_not_have() -> None:
    with pytest.raises(MeshError, match="--rank: ranks of this mesh are 0 to 3, got 4"):
        rehearse_config(DEMO, ranks=(0, 4))


def test_a_strategy_that_does_not_fit_the_mesh() -> None:
    with pytest.raises((MeshError, NotationError), match="rack"):
        rehearse_config(DEMO, ["strategy=node=3,rack=1"])


def test_a_cluster_of_other_levels() -> None:
    with pytest.raises(ClusterError, match="outermost first cluster, node; the mesh has node"):
        rehearse_config(DEMO, ["mesh={node=4}", "strategy=node=3", "cluster=a800-8x-hdr"])


def test_the_command_says_it_once_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeromesh", "rehearse", str(DEMO), "--world", "7"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.count("zeromesh: mesh cluster=2 x node=2 has 4 ranks") == 1
