"""Machines where no lab can be made: one message each, and nothing is tried."""

import os

import pytest

from lab import Lab, LabError, unavailable_reason
from lab.plan import Command
from lab.shell import execute
from zeromesh.errors import InputError


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


def test_a_lab_that_is_not_up_runs_nothing():
    with pytest.raises(InputError, match="is not up"):
        Lab("2@1gbit").run(["true"])


def test_a_failed_batch_names_the_line_and_the_complaint():
    script = "echo 'Error: no such device.' >&2; echo 'Command failed -:2' >&2; exit 1"
    command = Command(argv=("sh", "-c", script), stdin="first line\nsecond line\n", purpose="make veth pairs")
    with pytest.raises(LabError, match=r"cannot make veth pairs: sh -c .* second line: Error: no such device\.$"):
        execute(command)
