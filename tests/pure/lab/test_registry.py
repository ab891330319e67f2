"""Which labs are found and whose they are, in made-up directories. Removal is tested with real namespaces."""

import json
import os

import pytest

from zeromesh.errors import LabError
from zeromesh.lab import Registry


@pytest.fixture
def registry(tmp_path):
    for name in ("labs", "netns", "proc"):
        (tmp_path / name).mkdir()
    return Registry(directory=tmp_path / "labs", netns=tmp_path / "netns", proc=tmp_path / "proc")


def run_process(registry, pid, *, start, state="S"):
    directory = registry.proc / str(pid)
    directory.mkdir(exist_ok=True)
    # The name of a process may hold spaces and parentheses.
    fields = [state, *["0"] * 18, str(start), "0"]
    (directory / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")


def test_a_lab_is_live_while_its_owner_runs(registry):
    run_process(registry, os.getpid(), start=100)
    record = registry.add("zmlab-7-0", tree="2@1gbit,1")
    assert registry.labs() == (record,)
    assert (record.owner_start, record.tree) == (100, "2@1gbit,1")
    assert registry.is_live(record)
    assert registry.leftovers() == ()


@pytest.mark.parametrize("change", ["gone", "zombie", "pid used again"])
def test_a_lab_is_leftover_when_its_owner_does_not_run(registry, change):
    run_process(registry, os.getpid(), start=100)
    record = registry.add("zmlab-7-0", tree="2@1gbit,1")
    if change == "gone":
        (registry.proc / str(os.getpid()) / "stat").unlink()
    else:
        run_process(
            registry, os.getpid(), start=100 if change == "zombie" else 101, state="Z" if change == "zombie" else "S"
        )
    assert registry.leftovers() == (record,)


def test_namespaces_without_a_record_are_found_by_their_name(registry):
    for name in ("zmlab-41-0-root", "zmlab-41-0-0.1", "zmlab-41-10-root", "zc0", "zmlab"):
        (registry.netns / name).touch()
    assert [(lab.name, lab.owner_pid) for lab in registry.leftovers()] == [("zmlab-41-0", 41), ("zmlab-41-10", 41)]
    assert registry.namespaces("zmlab-41-0") == ("zmlab-41-0-0.1", "zmlab-41-0-root")
    run_process(registry, 41, start=5)
    assert registry.leftovers() == ()


def test_no_directories_mean_no_labs(tmp_path):
    assert Registry(directory=tmp_path / "a", netns=tmp_path / "b").labs() == ()


@pytest.mark.parametrize("text", ["", "{", json.dumps({"nmae": "x"})])
def test_a_damaged_record_is_named(registry, text):
    (registry.directory / "zmlab-7-0.json").write_text(text)
    with pytest.raises(LabError, match=r"zmlab-7-0\.json: not a record of a lab: .*delete it"):
        registry.labs()
