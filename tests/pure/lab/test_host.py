"""Machines where no lab can be made: one message each, and nothing is tried."""

import os

import pytest

from zeromesh.errors import InputError, LabError
from zeromesh.lab import Lab, Registry, unavailable_reason
from zeromesh.lab.plan import Command
from zeromesh.lab.shell import execute


def test_not_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"needs root .* runs as user 1000: use sudo"), Lab("2@1gbit"):
        pass
    assert "needs root" in (unavailable_reason() or "")


def test_missing_programs_are_named_with_their_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LabError, match=r"needs ip, tc, bridge, setpriv, not found in PATH: install iproute2 util-linux"
    ):
        Lab("2@1gbit").up()


def test_a_leftover_is_named_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    registry = Registry(directory=tmp_path, netns=tmp_path, proc=tmp_path)
    (tmp_path / "zmlab-41-0-root").touch()
    with pytest.raises(LabError, match=r"a killed run left lab zmlab-41-0 .* remove it with: zeromesh lab down"):
        Lab("2@1gbit", registry=registry).up()
    assert [path.name for path in tmp_path.iterdir()] == ["zmlab-41-0-root"]


def test_a_lab_that_is_not_up_runs_nothing():
    with pytest.raises(InputError, match="is not up"):
        Lab("2@1gbit").run(["true"])


def test_a_failed_batch_names_the_line_and_the_complaint():
    script = "echo 'Error: no such device.' >&2; echo 'Command failed -:2' >&2; exit 1"
    command = Command(argv=("sh", "-c", script), stdin="first line\nsecond line\n", purpose="make veth pairs")
    with pytest.raises(LabError, match=r"cannot make veth pairs: sh -c .* second line: Error: no such device\.$"):
        execute(command)
