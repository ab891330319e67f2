"""Which labs are found and whose they are, in made-up directories; machines where no lab can be made."""

import os

import pytest

from lab import Lab, LabError, Registry, unavailable_reason
from lab.plan import Command
from lab.shell import execute
from zeromesh.errors import InputError


@pytest.fixture
def registry(tmp_path):
    for name in ("netns", "proc"):
        (tmp_path / name).mkdir()
    return Registry(netns=tmp_path / "netns", proc=tmp_path / "proc")


def run_process(registry, pid, *, start, state="S"):
    directory = registry.proc / str(pid)
    directory.mkdir(exist_ok=True)
    # The name of a process may hold spaces and parentheses.
    fields = [state, *["0"] * 18, str(start), "0"]
    (directory / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")


def make_namespaces(registry, *names):
    for name in names:
        (registry.netns / name).touch()


def test_a_lab_is_live_while_its_owner_runs(registry):
    run_process(registry, os.getpid(), start=100)
    name = registry.own_name(7)
    assert name == f"zmlab-{os.getpid()}-100-7"
    make_namespaces(registry, f"{name}-root")
    assert registry.labs() == (name,)
    assert registry.leftovers() == ()


@pytest.mark.parametrize("change", ["gone", "zombie", "pid used again"])
def test_a_lab_is_leftover_when_its_owner_does_not_run(registry, change):
    make_namespaces(registry, "zmlab-41-100-0-root")
    if change != "gone":
        run_process(registry, 41, start=101 if change == "pid used again" else 100, state="SZ"[change == "zombie"])
    assert registry.leftovers() == ("zmlab-41-100-0",)


def test_namespaces_are_found_by_their_name(registry, tmp_path):
    make_namespaces(registry, "zmlab-41-5-0-root", "zmlab-41-5-0-0.1", "zmlab-41-5-10-root", "zc0", "zmlab")
    assert registry.leftovers() == ("zmlab-41-5-0", "zmlab-41-5-10")
    assert registry.namespaces("zmlab-41-5-0") == ("zmlab-41-5-0-0.1", "zmlab-41-5-0-root")
    run_process(registry, 41, start=5)
    assert registry.leftovers() == ()
    # No directory means no labs.
    assert Registry(netns=tmp_path / "b").labs() == ()


def test_where_no_lab_can_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"needs root .* runs as user 1000: use sudo"), Lab("2@1gbit"):
        pass
    assert "needs root" in (unavailable_reason() or "")
    # Missing programs are named with their packages.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LabError, match=r"needs ip, tc, bridge, setpriv, not found in PATH: install iproute2 util-linux"
    ):
        Lab("2@1gbit").up()
    # A lab that is not up runs nothing.
    with pytest.raises(InputError, match="is not up"):
        Lab("2@1gbit").run(["true"])
    monkeypatch.undo()  # a failed batch names the line and the complaint
    script = "echo 'Error: no such device.' >&2; echo 'Command failed -:2' >&2; exit 1"
    command = Command(argv=("sh", "-c", script), stdin="first line\nsecond line\n", purpose="make veth pairs")
    with pytest.raises(LabError, match=r"cannot make veth pairs: sh -c .* second line: Error: no such device\.$"):
        execute(command)
