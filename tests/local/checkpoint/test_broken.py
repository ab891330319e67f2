"""Broken checkpoints: an error that names the file and the reason, exit code 2, and nothing changed on the disk."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeromesh as zm
from tests.local.checkpoint.broken import DATA, INDEX, KINDS, MANIFEST, Tiny, manifest, seen, sign
from zeromesh.errors import CheckpointError


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.local.checkpoint.broken", str(tmp_path_factory.mktemp("broken"))]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", KINDS)
def test_command_line_names_file_and_reason(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    kind, outcome = KINDS[name], outcomes[name]
    assert re.search(kind.reason, outcome["error"]), outcome["error"]
    assert outcome["error"].startswith("zeromesh: ") and "Traceback" not in outcome["error"]
    assert f"{outcome['checkpoint']}/{kind.file}".rstrip("/") in outcome["error"]
    assert outcome["code"] == 2
    assert not outcome["changed"]


def test_what_is_whole_loads(outcomes: dict[str, dict[str, Any]]) -> None:
    """So that the others are refused for what they are."""
    for name in ("whole", "whole of torch's"):
        assert outcomes[name]["code"] == 0, outcomes[name]["error"]
        assert not outcomes[name]["changed"]
    assert not Path("/tmp/zeromesh-must-not-exist").exists()


# ---- any change


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zm.shard(Tiny(5), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2]), use_cache=False).logits.sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, zm.Checkpoints]]:
    """A checkpoint that the examples break and mend, and what loads it."""
    root = tmp_path_factory.mktemp("mutated")
    model, optimizer = make()
    with zm.Checkpoints(root / "checkpoints", model, optimizer) as checkpoints:
        checkpoints.save(1, {"scheduler": {"last": (1, 2)}})
        where = checkpoints.wait()
        assert where is not None
        yield Path(where), checkpoints


def load_or_refuse(checkpoints: zm.Checkpoints, path: Path) -> bool:
    """Whether it loads. If not: no other error than ours, and the checkpoint's name in it. No change on the disk."""
    before = seen(path)
    try:
        checkpoints.load(path)
        loaded = True
    except CheckpointError as error:
        assert str(path) in str(error)
        loaded = False
    assert seen(path) == before
    return loaded


# What stands in a manifest, and what does not belong there.
WRONG = st.sampled_from(
    [None, True, -1, 0, 1, 3, 1 << 40, 1 << 64, 0.5, "", "x", "../x", "int64", [], [1], {}, {"a": 1}, [[[]]]]
)


def paths_in(value: Any) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, inner in items for rest in paths_in(inner))]


@settings(max_examples=150)
@given(st.data())
def test_any_wrong_value_in_a_manifest(whole: tuple[Path, zm.Checkpoints], data: st.DataObject) -> None:
    """With the right checksum, so that what is wrong is found by what it is."""
    path, checkpoints = whole
    good = (path / MANIFEST).read_bytes()
    head, body = manifest(path)
    kind = data.draw(st.sampled_from(sorted(body)))
    *way, last = data.draw(st.sampled_from([(kind, *rest) for rest in paths_in(body[kind])]))
    place = body
    for key in way:
        place = place[key]
    change = data.draw(st.sampled_from(["replace", "remove", "double"]))
    if change == "replace":
        place[last] = data.draw(WRONG)
    elif change == "remove":
        place.pop(last)
    elif isinstance(place, list):
        place.insert(last, copy.deepcopy(place[last]))
    else:
        place[f"{last}2"] = copy.deepcopy(place[last])
    sign(path, head, body)
    try:
        load_or_refuse(checkpoints, path)
    finally:
        (path / MANIFEST).write_bytes(good)


def mutate(data: st.DataObject, good: bytes) -> bytes:
    at = data.draw(st.integers(0, len(good) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=20))
    ways = [
        good[:at],
        good[:at] + noise + good[at + len(noise) :],
        good[:at] + noise + good[at:],
        good[:at] + good[at + len(noise) :],
    ]
    return data.draw(st.sampled_from(ways))


@settings(max_examples=100)
@given(st.data())
def test_any_changed_bytes(whole: tuple[Path, zm.Checkpoints], data: st.DataObject) -> None:
    """Cut, changed, longer or shorter: refused, or (bytes that nothing reads) the right values."""
    path, _ = whole
    file = path / data.draw(st.sampled_from([MANIFEST, DATA]))
    good = file.read_bytes()
    model, optimizer = make()
    expected = zm.full_state_dict(model)
    for value in model.parameters():
        value.local.zero_()
    file.write_bytes(mutate(data, good))
    try:
        loaded = load_or_refuse(zm.Checkpoints(path.parent, model, optimizer), path)
        for key, value in zm.full_state_dict(model).items():
            assert torch.equal(value, expected[key]) or not (loaded or value.any())
    finally:
        file.write_bytes(good)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "theirs"
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save({"model": Tiny(5).state_dict()}, checkpoint_id=path)
    return path


@settings(max_examples=150)
@given(st.data())
def test_any_changed_bytes_of_torchs(whole: tuple[Path, zm.Checkpoints], theirs: Path, data: st.DataObject) -> None:
    """It has no checksums: values may be wrong, but nothing is called, and no error is any other than ours."""
    file = theirs / data.draw(st.sampled_from([INDEX, DATA]))
    good = file.read_bytes()
    file.write_bytes(mutate(data, good))
    try:
        load_or_refuse(whole[1], theirs)
    finally:
        file.write_bytes(good)
