"""Saving and loading in one process: files in sight at each moment, files that stay, and faults of the disk."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.disk import file_size_limit
from tests.local.checkpoint.test_broken import seen
from zeromesh.checkpoint import saver as saver_module
from zeromesh.checkpoint.directory import list_checkpoints
from zeromesh.checkpoint.loader import load_newest, load_path
from zeromesh.checkpoint.manifest import BLOCK_BYTES
from zeromesh.checkpoint.peers import Peers, Progress
from zeromesh.checkpoint.read import Reader, require_match
from zeromesh.checkpoint.saver import Saver, Snapshot, Staging
from zeromesh.checkpoint.states import from_plain, random_states, set_random_states, to_plain
from zeromesh.checkpoint.storage import LocalStorage, open_storage
from zeromesh.checkpoint.write import entries_of, write_file, write_tensor
from zeromesh.errors import CheckpointError, CommunicationError
from zeromesh.pieces.piece import DTYPES, Piece, share, whole

BIG = BLOCK_BYTES // 4 * 2 + 1000
"""Elements of fp32 in two whole blocks and a part of a third."""


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.big": torch.rand(2, BIG // 2, generator=generator),
        "model.small": torch.tensor(float(step)),
        "model.half": torch.rand(3, 5, generator=generator).bfloat16(),
        "model.none": torch.zeros(0, 2),
    }


def snapshot(step: int) -> Snapshot:
    pieces = [whole(name, tensor) for name, tensor in tensors(step).items()]
    return Snapshot(step=step, pieces=pieces, state={"user": {"a": 1}})


def saver_of(root: Path | str, keep: int = 2, keep_every: int = 0) -> Saver:
    return Saver(open_storage(root), Peers(), keep=keep, keep_every=keep_every, lock_wait_s=0.0)


def save(root: Path | str, *steps: int, keep: int = 5, keep_every: int = 0) -> None:
    saver = saver_of(root, keep, keep_every)
    for step in steps:
        saver.save(snapshot(step))
    saver.close()


def load(root: Path | str) -> tuple[Reader | None, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    loaded = load_newest(open_storage(root), Peers(), lambda reader: found.update(restore(reader)))
    return loaded, found


def restore(reader: Reader) -> dict[str, Tensor]:
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors(0).items()}
    pieces = [whole(name, target) for name, target in targets.items()]
    require_match(reader.where, reader.manifest.tensors, entries_of((), pieces), "model.")
    reader.fill(pieces)
    return targets


def require_step(found: dict[str, Tensor], step: int) -> None:
    for name, expected in tensors(step).items():
        assert torch.equal(found[name], expected), name


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("remote", [False, True])
def test_newest_comes_back_and_old_ones_go(tmp_path: Path, remote: bool) -> None:
    root = f"file://{tmp_path}/run" if remote else str(tmp_path / "run")
    save(root, 1, 2, 3, 4, 5, keep=2, keep_every=3)
    assert names(tmp_path / "run") == ["step-00000003", "step-00000004", "step-00000005"]
    loaded, found = load(root)
    assert loaded is not None and loaded.manifest.step == 5 and loaded.manifest.state == {"user": {"a": 1}}
    require_step(found, 5)
    save(root, 4)  # a run that went back: newest is the one made last, beside the older one of that name
    loaded, found = load(root)
    assert loaded is not None and loaded.where.endswith("step-00000004.1")


def test_what_a_kill_leaves_on_an_object_store_is_passed_over_and_goes(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/run"
    unfinished = tmp_path / "run" / "step-00000001"
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    assert load(root) == (None, {})
    of_torch = tmp_path / "run" / "step-00001000"
    of_torch.mkdir()
    (of_torch / ".metadata").write_bytes(b"torch's")
    save(root, 1)
    assert names(tmp_path / "run") == ["step-00000001.1", "step-00001000"]
    with pytest.warns(UserWarning, match="step-00001000/manifest.json cannot be read"):
        loaded, _ = load(root)
    assert loaded is not None and loaded.manifest.step == 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 7), st.data())
def test_replicas_shares_are_everything_once_and_even(lengths: list[int], count: int, data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=6, max_size=6))
    pieces = [
        Piece(name=str(i), shape=(length,), start=0, local=torch.arange(length).to(dtype))
        for i, (length, dtype) in enumerate(zip(lengths, dtypes, strict=False))
    ]
    shares = [share(pieces, index, count) for index in range(count)]
    for piece in pieces:
        parts = sorted((p.start, p.stop) for mine in shares for p in mine if p.name == piece.name)
        assert [i for start, stop in parts for i in range(start, stop)] == list(range(piece.local.numel()))
    sizes = [sum(p.num_bytes for p in mine) for mine in shares]
    assert max(sizes) - min(sizes) <= 8


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_a_tensor_is_written_as_a_file_of_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    file = io.BytesIO()
    begin, crcs, length = write_tensor(file, 77, tensor.reshape(-1), shape)
    assert (77 + begin) % 64 == 0 and file.getvalue()[begin:].startswith(raw)
    assert crcs == (zlib.crc32(raw),) and length == len(file.getvalue())
    assert zipfile.ZipFile(file).testzip() is None
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert found.dtype == dtype and found.shape == shape and torch.equal(found.double(), tensor.double())


def test_the_copy_is_taken_at_once_and_its_memory_is_kept(tmp_path: Path) -> None:
    staging = Staging()
    source = torch.arange(1000.0)
    first = staging.copy([whole("a", source)])
    source.zero_()
    assert torch.equal(first[0], torch.arange(1000.0))
    address = first[0].data_ptr()
    assert staging.copy([whole("a", source)])[0].data_ptr() == address
    assert staging.num_bytes == 4000
    other, same = torch.arange(7), torch.full((900,), 2.5)
    copies = staging.copy([whole("b", other), whole("a", same)])
    assert torch.equal(copies[0], other) and torch.equal(copies[1], same) and staging.num_bytes == 7 * 8 + 3600
    assert staging.copy([]) == []


def test_no_copy_lies_in_two_chunks_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "CHUNK_BYTES", 64)
    parts: list[Tensor] = []
    copy = torch._foreach_copy_

    def watched(to: list[Tensor], of: list[Tensor], **options: Any) -> None:
        parts.extend(to)
        copy(to, of, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    sources = [torch.arange(7), torch.randn(50), torch.randn(0), torch.randn(33).bfloat16(), torch.arange(3.0).double()]
    copies = Staging().copy([whole(str(index), source) for index, source in enumerate(sources)])
    assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))
    begin = copies[0].data_ptr()
    ranges = [(part.data_ptr() - begin, part.nbytes) for part in parts if part.numel()]
    assert len(ranges) > 6 and all(at // 64 == (at + count - 1) // 64 for at, count in ranges)


# ---- damage


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.unlink() if how == "remove" else path.write_bytes(data[: len(data) // 3] if how == "truncate" else data)


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_damage_is_named_and_the_checkpoint_before_is_taken(tmp_path: Path, file: str, how: str) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / file, how)
    before = seen(tmp_path)
    with pytest.warns(UserWarning, match=f"step-00000002/{file} (is|cannot)"):
        loaded, found = load(tmp_path)
    assert loaded is not None and loaded.manifest.step == 1
    require_step(found, 1)
    assert seen(tmp_path) == before
    damage(tmp_path / "step-00000001" / "__0_0.distcp", "truncate")
    none = r"none that can be loaded:(.|\n)*too short(.|\n)*in a new directory, or give the path"
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match=none):
        load(tmp_path)


def test_no_flipped_bit_of_a_first_line_goes_unseen(tmp_path: Path) -> None:
    """A serial of its own choice would make another checkpoint the newest."""
    save(tmp_path, 1, 2)
    storage = LocalStorage(tmp_path)
    sound = list_checkpoints(storage)
    for found in sound.complete[:1]:
        path = tmp_path / found.name / "manifest.json"
        good = path.read_bytes()
        for bit in range(8 * (good.index(b"\n") + 1)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            listing = list_checkpoints(storage)
            named = [problem for problem in listing.refused if found.name in problem]
            assert named or listing == sound, bytes(bad[:200])
        path.write_bytes(good)


def test_a_first_line_without_a_checksum_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of version 2. A manifest that would not be read is not written."""
    assert load(tmp_path / "none") == (None, {})
    with pytest.raises(CheckpointError, match=r"is no checkpoint .* and no directory of checkpoints"):
        load_path(tmp_path / "none", Peers(), restore)
    with monkeypatch.context() as patched:
        patched.setattr("zeromesh.checkpoint.manifest.MAX_BYTES", 4200)
        with pytest.raises(CheckpointError, match=r"step 1 was not saved.*a manifest has at most 4200 bytes; that of"):
            save(tmp_path, 1)
        assert names(tmp_path) == []
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    line, body = path.read_bytes().split(b"\n", 1)
    head = json.loads(line) | {"version": 2}
    del head["crc32"]
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)
    loaded, found = load(tmp_path)
    assert loaded is not None and loaded.manifest.step == 1
    require_step(found, 1)


def test_every_byte_of_the_tensors_is_covered_by_a_checksum(tmp_path: Path) -> None:
    """A part of a tensor is verified with the blocks that it lies in, not with all of it."""
    save(tmp_path, 1)
    expected = tensors(1)["model.big"].reshape(-1)
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    position = data.index(expected[-50:].numpy().tobytes())
    data[position] ^= 1
    path.write_bytes(data)

    def parts(reader: Reader) -> None:
        first = Piece(name="model.big", shape=(2, BIG // 2), start=10, local=torch.empty(BLOCK_BYTES // 4 + 5))
        reader.fill([first])
        assert torch.equal(first.local, expected[10 : 10 + first.local.numel()])
        last = Piece(name="model.big", shape=(2, BIG // 2), start=expected.numel() - 900, local=torch.empty(5))
        with pytest.raises(CheckpointError, match=r"model\.big at \d+ must have CRC-32 0x"):
            reader.fill([last])

    load_path(tmp_path / "step-00000001", Peers(), parts)


# ---- the disk


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    saver.save(snapshot(1))
    saver.wait()
    full = r"checkpoint of step 2 was not saved: cannot write .*distcp: File too large"
    with file_size_limit(100_000):
        saver.save(snapshot(2))
        with pytest.raises(CheckpointError, match=full):
            saver.wait()
    assert names(tmp_path) == ["step-00000001"]
    saver.save(snapshot(3))
    saver.close()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_an_error_that_is_none_of_the_disks_is_told_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for the one that has it."""

    def fails(*_: object) -> None:
        raise ValueError("as nobody had thought of")

    small = [whole("model.a", torch.ones(3))]
    on_disk = ("storage.LocalStorage.make", "storage.LocalStorage.settle", "storage.LocalStorage.publish")
    for target in (*on_disk, "saver.write_file", "saver.write_metadata"):
        root = tmp_path / target
        saver = saver_of(root)
        with monkeypatch.context() as patched:
            patched.setattr(f"zeromesh.checkpoint.{target}", fails)
            saver.save(Snapshot(step=1, pieces=small))
            with pytest.raises(CheckpointError, match=r"1 was not saved: cannot write .*: ValueError: as nobody had"):
                saver.wait()
        saver.save(Snapshot(step=2, pieces=small))
        saver.close()
        assert names(root) == ["step-00000002"]
    with pytest.raises(ValueError, match="as nobody had"):
        load_newest(LocalStorage(root), Peers(), fails)


def test_a_wait_that_is_interrupted_leaves_the_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, goes_on = threading.Event(), threading.Event()
    main = threading.get_ident()
    interrupted: list[bool] = []  # an Event's lock could be held when the next signal comes

    def interrupts(_: int, frame: Any) -> None:  # as Ctrl-C, once; not in a callback of weakref, where it would be lost
        if not interrupted and frame.f_code.co_name != "remove":
            interrupted.append(True)
            raise KeyboardInterrupt

    def write_later(*args: Any) -> Any:
        waits.wait(100)
        # A signal that comes just before the main thread sleeps does not wake it.
        while not interrupted:
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.05)
        goes_on.wait(100)
        return write_file(*args)

    monkeypatch.setattr("zeromesh.checkpoint.saver.write_file", write_later)
    saver = saver_of(tmp_path)
    saver.save(snapshot(1))
    before = signal.signal(signal.SIGUSR1, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            saver.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saver._pending is not None and not saver._pending.done()
    goes_on.set()
    assert saver.wait() == str(tmp_path / "step-00000001")
    saver.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="root sheds its rights for this")
def test_a_read_only_directory_is_refused_before_training(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*: Permission denied"):
            saver_of(root)
    finally:
        os.seteuid(0)
    assert list(root.iterdir()) == []


def test_two_jobs_cannot_save_to_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be cleared is not locked."""
    with monkeypatch.context() as patched:
        patched.setattr("zeromesh.checkpoint.saver.clear_leftovers", lambda storage: os.listdir(tmp_path / "none"))
        with pytest.raises(CheckpointError, match=r"cannot write .*: No such file"):
            saver_of(tmp_path)
    first = saver_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"written by zm.Checkpoints of this process, still open; two"):
        saver_of(tmp_path)
    first.close()
    saver_of(tmp_path).close()


FORKED = """
import os, signal, sys
from pathlib import Path
from zeromesh.checkpoint.storage import LocalStorage
LocalStorage(Path(sys.argv[1])).lock(0.0)
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print("forked", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A data loader's worker may outlive its job, or be there still when the job has closed its checkpoints."""
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"forked\n"
        assert process.wait() == -9
        storage = LocalStorage(tmp_path)
        storage.lock(0.0)
    assert storage._lock is not None
    child = os.dup(storage._lock)
    storage.unlock()
    storage.lock(0.0)
    storage.unlock()
    os.close(child)


def killed_while_saving(root: Path, dying: tuple[Any, str]) -> int:
    """The exit code of a process that saves one step, and dies in the second one's save as it comes to `dying`."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # those of the pool are not here
            save(root, 1)
            setattr(*dying, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            save(root, 2, keep=1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("dying", "expected"),
    [((saver_module, "write_metadata"), 1), ((LocalStorage, "publish"), 1), ((Saver, "_retire"), 2)],
    ids=["data", "manifest", "published"],
)
def test_killed_at_any_moment_what_is_visible_is_complete(
    tmp_path: Path, dying: tuple[Any, str], expected: int
) -> None:
    assert killed_while_saving(tmp_path, dying) == -signal.SIGKILL
    assert list_checkpoints(LocalStorage(tmp_path)).refused == ()
    loaded, found = load(tmp_path)
    assert loaded is not None and loaded.manifest.step == expected
    require_step(found, expected)
    save(tmp_path, 3)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


# ---- beside tensors


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.just("__tuple__")
STATES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=12
)


@settings(max_examples=40)
@given(STATES)
def test_states_come_back_exactly(value: object) -> None:
    assert from_plain(to_plain(value, "state")) == value


def test_numbers_that_are_tensors_come_back_as_tensors() -> None:
    values = [torch.tensor(1e-3), torch.tensor(3), torch.tensor(0.1, dtype=torch.bfloat16)]
    for value, found in zip(values, from_plain(to_plain(values, "state")), strict=True):
        assert torch.equal(found, value) and found.dtype == value.dtype
    with pytest.raises(CheckpointError, match=r"state\.scheduler\.fn must be made of numbers.*got builtins\.function"):
        to_plain({"scheduler": {"fn": lambda: 0}}, "state")


def test_random_states_come_back() -> None:
    random.gauss(0, 1)  # leaves the second of a pair behind
    np.random.standard_normal()
    states = random_states()

    def drawn() -> list[Any]:
        return [torch.rand(2).tolist(), random.gauss(0, 1), random.random(), np.random.randn(3).tolist()]

    expected = drawn()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(9)
    set_random_states(states)
    assert drawn() == expected


def test_no_exchange_follows_one_that_was_interrupted() -> None:
    """Its answer may still be on the way, and would be taken for that of the next, or of the group's next user."""
    progress = Progress(store=dist.HashStore(), key="test", rank=0, size=1)
    peers = Peers(progress=progress)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        peers._exchange("a first word", interrupted)
    with pytest.raises(CommunicationError, match=r"cannot come to another: a first word was interrupted \(Keyb"):
        peers._exchange("another", lambda: None)
