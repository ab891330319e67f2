"""Which labs are found and whose they are, in made-up directories. Removal is tested with real namespaces."""

import os

import pytest

from lab import Registry


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


def test_namespaces_are_found_by_their_name(registry):
    make_namespaces(registry, "zmlab-41-5-0-root", "zmlab-41-5-0-0.1", "zmlab-41-5-10-root", "zc0", "zmlab")
    assert registry.leftovers() == ("zmlab-41-5-0", "zmlab-41-5-10")
    assert registry.namespaces("zmlab-41-5-0") == ("zmlab-41-5-0-0.1", "zmlab-41-5-0-root")
    run_process(registry, 41, start=5)
    assert registry.leftovers() == ()


def test_no_directory_means_no_labs(tmp_path):
    assert Registry(netns=tmp_path / "b").labs() == ()
