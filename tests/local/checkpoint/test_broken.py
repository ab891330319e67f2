"""Broken checkpoints: an error that names the file and the reason, and nothing changed on the disk."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeromesh as zm
from zeromesh.checkpoint.manifest import head_line
from zeromesh.errors import CheckpointError

DATA, MANIFEST, INDEX = "__0_0.distcp", "manifest.json", ".metadata"
Breaks = Callable[[Path], object]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.head = nn.Linear(4, 5)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.tanh(self.block(self.embed(input_ids)))))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zm.shard(Tiny(), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2])).logits.sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, zm.Checkpoints]]:
    """A checkpoint that the examples break and mend, and its loader."""
    root = tmp_path_factory.mktemp("broken")
    model, optimizer = make()
    with zm.Checkpoints(root / "checkpoints", model, optimizer) as checkpoints:
        checkpoints.save(1, {"scheduler": {"last": (1, 2)}})
        where = checkpoints.wait()
        assert where is not None
        yield Path(where), checkpoints


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "theirs"
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save({"model": Tiny().state_dict()}, checkpoint_id=path)
    return path


def seen(directory: Path) -> dict[str, str]:
    """Everything below a directory, without following links or opening pipes or very long files."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        is_file = path.is_file() and not path.is_symlink() and status.st_size < 1 << 30
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        found[str(path.relative_to(directory))] = f"{status.st_mode} {status.st_size} {status.st_mtime_ns} {content}"
    return found


def load_or_refuse(checkpoints: zm.Checkpoints, path: Path) -> str:
    """Why it does not load, if so: no other error than ours, and the checkpoint's name in it. No change on the disk."""
    before, reason = seen(path), ""
    try:
        checkpoints.load(path)
    except CheckpointError as error:
        reason = str(error)
        assert str(path) in reason
    assert seen(path) == before
    return reason


# ---- ways to break things


def rewrite(file: str, change: Callable[[bytes], bytes]) -> Breaks:
    return lambda at: (at / file).write_bytes(change((at / file).read_bytes()))


def replace(file: str, make: Breaks = lambda path: None) -> Breaks:
    """Something else in a file's place, or nothing; in the whole checkpoint's with "" for the file."""

    def breaks(at: Path) -> None:
        (at / file).unlink() if file else shutil.rmtree(at)
        make(at / file if file else at)

    return breaks


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 8]) + data[position + 1 :]


def flip_in_tensor(at: Path) -> None:
    offset = manifest(at)[1]["tensors"]["model.head.weight"][2][0][3]
    rewrite(DATA, lambda data: flip(data, offset + 17))(at)


def manifest(at: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    head, body = (at / MANIFEST).read_bytes().splitlines()
    return json.loads(head), json.loads(body)


def sign(at: Path, head: dict[str, Any], body: Any) -> None:
    text = json.dumps(body).encode()
    head = {key: value for key, value in head.items() if key != "crc32"}
    head |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (at / MANIFEST).write_bytes(head_line(head) + text + b"\n")


def signed(change: Callable[[dict[str, Any]], object]) -> Breaks:
    """The manifest's content changed, with a checksum that is right: an attack, or a bug of the one who wrote it."""

    def breaks(at: Path) -> None:
        head, body = manifest(at)
        change(body)
        sign(at, head, body)

    return breaks


def head(**changes: Any) -> Breaks:
    """The manifest's first line changed, with a checksum that is right."""

    def breaks(at: Path) -> None:
        before, body = manifest(at)
        sign(at, before | changes, body)

    return breaks


def field(name: str, index: int, value: Any) -> Breaks:
    """A row of the manifest changed: [dtype, shape, [[start, stop, file, offset, checksums], ...]]."""
    return signed(lambda body: body["tensors"][name].__setitem__(index, value))


def chunk(**changes: Any) -> Breaks:
    places = ("start", "stop", "file", "offset", "crcs")

    def change(body: dict[str, Any]) -> None:
        for key, value in changes.items():
            body["tensors"]["model.head.weight"][2][0][places.index(key)] = value

    return signed(change)


def tensors(**changes: str | None) -> Breaks:
    """Rows of the manifest taken out, or copied from others, by their names with __ for dots."""

    def change(body: dict[str, Any]) -> None:
        of = body["tensors"]
        for name, source in changes.items():
            of.pop(name.replace("__", ".")) if source is None else of.update({name.replace("__", "."): of[source]})

    return signed(change)


def index(change: Callable[[Any], object]) -> Breaks:
    """torch's own index changed, through torch's own classes."""

    def breaks(at: Path) -> None:
        loaded = pickle.loads((at / INDEX).read_bytes())
        change(loaded)
        (at / INDEX).write_bytes(pickle.dumps(loaded))

    return breaks


def set_places(**changes: Any) -> Breaks:
    def change(loaded: Any) -> None:
        for place in loaded.storage_data.values():
            for key, value in changes.items():
                setattr(place, key, value)

    return index(change)


def absurd_index(loaded: Any) -> None:
    """A box of 2**62 elements in as many rows as there are."""
    entry = loaded.state_dict_metadata["model.head.weight"]
    entry.size = torch.Size((1 << 31, 1 << 31))
    entry.chunks[0].sizes = torch.Size((1 << 31, (1 << 31) - 1))


MUST_NOT_EXIST = Path(f"/tmp/zeromesh-must-not-exist-{os.getpid()}")


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {MUST_NOT_EXIST}",)


EVIL = pickle.dumps(Evil())
LONG_BINPUT_BOMB = b"\x80\x02}r\xff\xff\xff\xff."
BYTEARRAY_BOMB = b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"."


def leftover(at: Path) -> None:
    (at / ".saving-step-00000002-17").mkdir(parents=True)
    (at / ".saving-step-00000002-17" / DATA).write_bytes(b"half")


STRUCTURE = "does not have the structure of a manifest"
FIRST_LINE = "its first line is not that of a zeromesh-checkpoint"
STATE = "optim.state.head.bias.exp_avg"

KINDS: dict[str, tuple[str, Breaks, str]] = {
    # name: (file that the error must name, function that breaks it, reason that the error must give)
    "data removed": (DATA, replace(DATA), "No such file"),
    "data empty": (DATA, rewrite(DATA, lambda data: b""), "is too short"),
    "data longer": (DATA, rewrite(DATA, lambda data: data + b"x"), "is too long"),
    "data changed": (DATA, flip_in_tensor, r"model\.head\.weight at \d+ must have CRC-32"),
    "data a directory": (DATA, replace(DATA, Path.mkdir), "not a regular file"),
    "data a pipe": (DATA, replace(DATA, os.mkfifo), "not a regular file"),
    "data a loop": (DATA, replace(DATA, lambda at: at.symlink_to(DATA)), "symbolic links"),
    "data of another tensor": (DATA, chunk(offset=64 * 9), "must have CRC-32"),
    # the manifest's bytes
    "manifest removed": (MANIFEST, replace(MANIFEST), "is missing"),
    "manifest cut in its body": (MANIFEST, rewrite(MANIFEST, lambda d: d[:900]), "SHA-256"),
    "manifest nested": (MANIFEST, rewrite(MANIFEST, lambda d: b"[" * 10**6), FIRST_LINE),
    "manifest a pickle": (MANIFEST, rewrite(MANIFEST, lambda d: EVIL), FIRST_LINE),
    "manifest a pipe": (MANIFEST, replace(MANIFEST, os.mkfifo), "is missing or no file"),
    "manifest of 2 TiB": (MANIFEST, lambda at: os.truncate(at / MANIFEST, 1 << 41), "longer than"),
    # its first line
    "other version": (MANIFEST, head(version=99), "has version 99 .* reads version"),
    "other format": (MANIFEST, head(format="x"), FIRST_LINE),
    "step absurd": (MANIFEST, head(step=10**400), FIRST_LINE),
    "manifest of another step": (MANIFEST, head(step=2), "of two checkpoints are mixed"),
    # its content, with the right checksum
    "a tensor is missing": (
        *("", tensors(model__block__bias=None)),
        r"another model(.|\n)*block\.bias: in the model, not in the checkpoint",
    ),
    "a tensor too many": (
        *("", tensors(model__x="model.block.bias")),
        r"another model(.|\n)*x: in the checkpoint, not in the model",
    ),
    "another shape": (
        *("", field("model.block.weight", 1, [2, 8])),
        r"another model(.|\n)*block\.weight: shape \(4, 4\) in the model, \(2, 8\) in the checkpoint",
    ),
    "another dtype": (
        *("", field("model.block.weight", 0, "int32")),
        r"block\.weight: torch\.float32 in the model, int32 in the checkpoint",
    ),
    "unknown dtype": (MANIFEST, field(STATE, 0, "float7"), "has dtype float7"),
    "wider dtype": (DATA, field("model.head.weight", 0, "float64"), "CRC-32"),
    "absurd shape": ("", field("rng.0.torch", 1, [1 << 60]), "cannot be a generator's state"),
    "too many dimensions": (MANIFEST, field("rng.0.torch", 1, [1] * 99), STRUCTURE),
    "generator's state of another shape": (MANIFEST, field("rng.0.torch", 1, [7]), "must|has 7 elements"),
    "state of another shape": ("", field("optim.state.block.weight.exp_avg", 1, [16]), r"must have shape \(4, 4\)"),
    "state of an unknown parameter": (
        *("", tensors(optim__state__other__exp_avg=STATE)),
        "of 1 parameters that the optimizer does",
    ),
    "offset too far": (DATA, chunk(offset=1 << 40), "is too short"),
    "no checksums": (DATA, chunk(crcs=[]), "no checksum for block 0"),
    "checksum wrong": (DATA, chunk(crcs=[1]), "must have CRC-32 0x00000001"),
    "hole at the end": (MANIFEST, chunk(stop=3), "the files hold the first 3"),
    "box twice": (
        *(MANIFEST, signed(lambda body: body["tensors"]["model.head.weight"][2].__imul__(2))),
        "must be covered from element",
    ),
    "file outside": (MANIFEST, signed(lambda body: body.update(files=[["../x.distcp", 9]])), "own directory"),
    "file unknown": ("x.distcp", signed(lambda body: body.update(files=[["x.distcp", 9]])), "No such file"),
    "file's size wrong": (DATA, signed(lambda body: body.update(files=[[DATA, 9]])), "is too long"),
    "user's state a text": ("", signed(lambda body: body["state"].update(user="x")), "must be a dict"),
    "user's state malformed": (
        *("", signed(lambda body: body["state"].update(user={"__items__": [[[], 1]]}))),
        "not what a checkpoint holds",
    ),
    "options a number": ("", signed(lambda body: body["state"].update(groups=5)), "options cannot be read"),
    # the directory
    "a file": ("", replace("", lambda at: at.write_text("x")), "Not a directory"),
    "nothing": ("", replace(""), "is no checkpoint"),
    "empty": ("", replace("", Path.mkdir), "is no checkpoint"),
    "a loop": ("", replace("", lambda at: at.symlink_to(at.name)), "symbolic links"),
    "half written": ("", replace("", leftover), "is no checkpoint"),
}
OF_TORCH: dict[str, tuple[Breaks, str]] = {
    "index empty": (rewrite(INDEX, lambda d: b""), "is not an index"),
    "index cut": (rewrite(INDEX, lambda d: d[:400]), "is not an index"),
    "index that calls": (rewrite(INDEX, lambda d: EVIL), r"posix\.system"),
    # Not for want of memory, which would be the end of the process where there is enough to begin with.
    "index of huge places": (rewrite(INDEX, lambda d: LONG_BINPUT_BOMB), "not an index.*has no attribute 'state'"),
    "index of huge bytes": (rewrite(INDEX, lambda d: BYTEARRAY_BOMB), r"is not an index.*KeyError\(150\)"),
    "index of 2 TiB": (lambda at: os.truncate(at / INDEX, 1 << 41), "longer than"),
    "index of an absurd box": (index(absurd_index), "does not lie row by row"),
    "index of a box twice": (
        index(lambda d: d.state_dict_metadata["model.head.weight"].chunks.__imul__(2)),
        "must be covered from element",
    ),
    "index with a hole": (
        index(lambda d: d.state_dict_metadata["model.head.weight"].chunks.clear()),
        "the files hold the first 0",
    ),
    "index of a file outside": (set_places(relative_path="../x"), "not in the checkpoint's own"),
    "index of a place too far": (set_places(offset=1 << 50), "is not an index|too short"),
    "index of an absurd length": (set_places(length=1 << 60), "is not an index|too short|cannot be read"),
    "torch's data removed": (replace(DATA), "No such file"),
    "torch's data cut": (rewrite(DATA, lambda d: d[:1000]), "is not an index|too short"),
    "torch's data a pipe": (replace(DATA, os.mkfifo), "not a regular file"),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """So that a number in a file that decides how much is allocated shows. Threads' stacks take half of it."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", [*KINDS, *OF_TORCH])
@pytest.mark.usefixtures("little_memory")
def test_file_and_reason_are_named(whole: tuple[Path, zm.Checkpoints], theirs: Path, tmp_path: Path, name: str) -> None:
    file, breaks, expected = KINDS[name] if name in KINDS else (INDEX, *OF_TORCH[name])
    checkpoint = tmp_path / "step-00000001"
    shutil.copytree(whole[0] if name in KINDS else theirs, checkpoint)
    breaks(checkpoint)
    reason = load_or_refuse(whole[1], checkpoint)
    assert re.search(expected, reason), reason
    assert f"{checkpoint}/{file}".rstrip("/") in reason
    assert not MUST_NOT_EXIST.exists()


def test_what_is_whole_loads(whole: tuple[Path, zm.Checkpoints], theirs: Path) -> None:
    """So that the others are refused for their damage."""
    assert [load_or_refuse(whole[1], path) for path in (whole[0], theirs)] == ["", ""]


# ---- any change

# Values that a manifest has, and values that do not belong there.
WRONG = [None, True, -1, 0, 1, 3, 1 << 40, 1 << 64, 0.5, "", "x", "../x", "int64", [], [1], {}, {"a": 1}, [[[]]]]


def paths_in(value: Any) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, inner in items for rest in paths_in(inner))]


@settings(max_examples=150)
@given(st.data())
def test_any_wrong_value_in_a_manifest(whole: tuple[Path, zm.Checkpoints], data: st.DataObject) -> None:
    """With the right checksum, so that a wrong value is found by itself."""
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
        place[last] = data.draw(st.sampled_from(WRONG))
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
    start, after = good[:at], good[at + len(noise) :]
    return data.draw(st.sampled_from([start, start + noise + after, start + noise + good[at:], start + after]))


@settings(max_examples=60)
@given(st.data())
def test_any_changed_bytes(whole: tuple[Path, zm.Checkpoints], data: st.DataObject) -> None:
    """Cut, changed, longer or shorter: refused by the file's name, or (bytes that nothing reads) the right values."""
    path, _ = whole
    file = path / data.draw(st.sampled_from([MANIFEST, DATA]))
    good = file.read_bytes()
    model, optimizer = make()
    expected = zm.full_state_dict(model)
    for value in model.parameters():
        value.local.zero_()
    file.write_bytes(mutate(data, good))
    try:
        reason = load_or_refuse(zm.Checkpoints(path.parent, model, optimizer), path)
        assert not reason or file.name in reason
        for key, value in zm.full_state_dict(model).items():
            assert torch.equal(value, expected[key]) or (reason and not value.any())
    finally:
        file.write_bytes(good)


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
