"""Kinds of broken checkpoints, and `zeromesh train` on each of them.

    python -m tests.local.checkpoint.broken DIRECTORY

makes a whole checkpoint and a broken copy for each kind, runs the command on every one of them, in one process, and
prints what came of it as JSON. Memory is limited, so that a number in a file that decides how much is allocated shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from zeromesh.checkpoint.manifest import head_line

DATA, MANIFEST, INDEX = "__0_0.distcp", "manifest.json", ".metadata"
MEMORY_BYTES = 2 << 30
"""On top of what the process has mapped: threads' stacks take half of it."""


class Tiny(nn.Module):
    """What the training loop calls as it does a causal language model."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 4)
        self.block = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.head = nn.Linear(4, vocab_size)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.tanh(self.block(self.embed(input_ids)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way for a checkpoint to be broken.

    Args:
        breaks: does it to a directory with a whole checkpoint.
        file: that the error must name, within the checkpoint; "" for the checkpoint itself.
        reason: that it must give, a regular expression.
        foreign: the checkpoint is one of torch.distributed.checkpoint's.
    """

    breaks: Callable[[Path], None]
    reason: str
    file: str = ""
    foreign: bool = False


# ---- ways to break things


def rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def breaks(at: Path) -> None:
        (at / file).write_bytes(change((at / file).read_bytes()))

    return breaks


def replace(file: str, make: Callable[[Path], object] = lambda path: None) -> Callable[[Path], None]:
    """Something else in a file's place, or nothing."""

    def breaks(at: Path) -> None:
        (at / file).unlink()
        make(at / file)

    return breaks


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 8]) + data[position + 1 :]


def flip_in_tensor(at: Path) -> None:
    offset = manifest(at)[1]["tensors"]["model.head.weight"][2][0][3]
    (at / DATA).write_bytes(flip((at / DATA).read_bytes(), offset + 17))


def manifest(at: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    head, body = (at / MANIFEST).read_bytes().splitlines()
    return json.loads(head), json.loads(body)


def signed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The manifest's content changed, with a checksum that is right: an attack, or a bug of the one who wrote it."""

    def breaks(at: Path) -> None:
        head, body = manifest(at)
        change(body)
        sign(at, head, body)

    return breaks


def sign(at: Path, head: dict[str, Any], body: Any) -> None:
    text = json.dumps(body).encode()
    head = {key: value for key, value in head.items() if key != "crc32"}
    head |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (at / MANIFEST).write_bytes(head_line(head) + text + b"\n")


def head(**changes: Any) -> Callable[[Path], None]:
    """The manifest's first line changed; None takes a key out."""

    def breaks(at: Path) -> None:
        before, body = (at / MANIFEST).read_bytes().split(b"\n", 1)
        after = {key: value for key, value in (json.loads(before) | changes).items() if value is not None}
        after.pop("crc32")
        (at / MANIFEST).write_bytes(head_line(after) + body)

    return breaks


def tensor(name: str, change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    """A row of the manifest changed: [dtype, shape, [[start, stop, file, offset, checksums], ...]]."""
    return signed(lambda body: change(body["tensors"][name]))


def chunk(**changes: Any) -> Callable[[Path], None]:
    places = ("start", "stop", "file", "offset", "crcs")

    def change(row: list[Any]) -> None:
        for key, value in changes.items():
            row[2][0][places.index(key)] = value

    return tensor("model.head.weight", change)


def index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """torch's own index changed, through torch's own classes."""

    def breaks(at: Path) -> None:
        loaded = pickle.loads((at / INDEX).read_bytes())
        change(loaded)
        (at / INDEX).write_bytes(pickle.dumps(loaded))

    return breaks


def set_chunks(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    return index(lambda loaded: change(loaded.state_dict_metadata["model.head.weight"].chunks))


def set_places(**changes: Any) -> Callable[[Path], None]:
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


def elsewhere(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the whole checkpoint's place."""

    def breaks(at: Path) -> None:
        shutil.rmtree(at)
        make(at)

    return breaks


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/zeromesh-must-not-exist",)


EVIL = pickle.dumps(Evil())
LONG_BINPUT_BOMB = b"\x80\x02}r\xff\xff\xff\xff."
BYTEARRAY_BOMB = b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"."


def leftover(at: Path) -> None:
    at.mkdir()
    (at / ".saving-step-00000002-17").mkdir()
    (at / ".saving-step-00000002-17" / DATA).write_bytes(b"half")


def other_state(body: dict[str, Any]) -> None:
    body["tensors"]["optim.state.other.exp_avg"] = body["tensors"]["optim.state.head.bias.exp_avg"]


STRUCTURE = "does not have the structure of a manifest"
FIRST_LINE = "its first line is not that of a zeromesh-checkpoint"

KINDS: dict[str, Kind] = {
    # the data
    "data removed": Kind(file=DATA, breaks=replace(DATA), reason="No such file"),
    "data empty": Kind(file=DATA, breaks=rewrite(DATA, lambda data: b""), reason="is too short"),
    "data cut in a header": Kind(file=DATA, breaks=rewrite(DATA, lambda data: data[:40]), reason="is too short"),
    "data cut in a tensor": Kind(file=DATA, breaks=rewrite(DATA, lambda data: data[:2000]), reason="is too short"),
    "data cut at the end": Kind(file=DATA, breaks=rewrite(DATA, lambda data: data[:-1]), reason="is too short"),
    "data longer": Kind(file=DATA, breaks=rewrite(DATA, lambda data: data + b"x"), reason="is too long"),
    "data changed": Kind(file=DATA, breaks=flip_in_tensor, reason=r"model\.head\.weight at \d+ must have CRC-32"),
    "data a directory": Kind(file=DATA, breaks=replace(DATA, Path.mkdir), reason="not a regular file"),
    "data a pipe": Kind(file=DATA, breaks=replace(DATA, os.mkfifo), reason="not a regular file"),
    "data a loop": Kind(file=DATA, breaks=replace(DATA, lambda at: at.symlink_to(DATA)), reason="symbolic links"),
    "data of another tensor": Kind(file=DATA, breaks=chunk(offset=64 * 9), reason="must have CRC-32"),
    # the manifest's bytes
    "manifest removed": Kind(file=MANIFEST, breaks=replace(MANIFEST), reason="is missing"),
    "manifest empty": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda data: b""), reason=FIRST_LINE),
    "manifest cut in its head": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: d[:30]), reason=FIRST_LINE),
    "manifest cut in its body": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: d[:900]), reason="SHA-256"),
    "manifest's head changed": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: flip(d, 3)), reason=FIRST_LINE),
    "manifest's body changed": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: flip(d, 700)), reason="SHA-256"),
    "manifest not UTF-8": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: b"\xff\xc3(\n"), reason=FIRST_LINE),
    "manifest a list": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: b"[1]\n"), reason=FIRST_LINE),
    "manifest nested": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: b"[" * 10**6), reason=FIRST_LINE),
    "manifest a pickle": Kind(file=MANIFEST, breaks=rewrite(MANIFEST, lambda d: EVIL), reason=FIRST_LINE),
    "manifest a pipe": Kind(file=MANIFEST, breaks=replace(MANIFEST, os.mkfifo), reason="is missing or no file"),
    "manifest of 2 TiB": Kind(
        file=MANIFEST, breaks=lambda at: os.truncate(at / MANIFEST, 1 << 41), reason="longer than"
    ),
    # its first line
    "other version": Kind(file=MANIFEST, breaks=head(version=99), reason="has version 99 .* reads version"),
    "other format": Kind(file=MANIFEST, breaks=head(format="x"), reason=FIRST_LINE),
    "no step": Kind(file=MANIFEST, breaks=head(step=None), reason=FIRST_LINE),
    "step a text": Kind(file=MANIFEST, breaks=head(step="1"), reason=FIRST_LINE),
    "step negative": Kind(file=MANIFEST, breaks=head(step=-1), reason=FIRST_LINE),
    "step absurd": Kind(file=MANIFEST, breaks=head(step=10**400), reason=FIRST_LINE),
    "length absurd": Kind(file=MANIFEST, breaks=head(bytes=1 << 60), reason="SHA-256"),
    "manifest of another step": Kind(file=MANIFEST, breaks=head(step=2), reason="of two checkpoints are mixed"),
    # its content, with the right checksum
    "no tensors": Kind(file=MANIFEST, breaks=signed(lambda body: body.pop("tensors")), reason=STRUCTURE),
    "tensors a list": Kind(file=MANIFEST, breaks=signed(lambda body: body.update(tensors=[])), reason=STRUCTURE),
    "about a number": Kind(file=MANIFEST, breaks=signed(lambda body: body.update(about=1)), reason=STRUCTURE),
    "content a list": Kind(file=MANIFEST, breaks=lambda at: sign(at, manifest(at)[0], []), reason=STRUCTURE),
    "a tensor is missing": Kind(
        breaks=signed(lambda body: body["tensors"].pop("model.block.bias")),
        reason=r"another model(.|\n)*block\.bias: in the model, not in the checkpoint",
    ),
    "a tensor too many": Kind(
        breaks=signed(lambda body: body["tensors"].update({"model.x": body["tensors"]["model.block.bias"]})),
        reason=r"another model(.|\n)*x: in the checkpoint, not in the model",
    ),
    "another shape": Kind(
        breaks=tensor("model.block.weight", lambda row: row.__setitem__(1, [2, 8])),
        reason=r"another model(.|\n)*block\.weight: shape \(4, 4\) in the model, \(2, 8\) in the checkpoint",
    ),
    "another dtype": Kind(
        breaks=tensor("model.block.weight", lambda row: row.__setitem__(0, "int32")),
        reason=r"block\.weight: torch\.float32 in the model, int32 in the checkpoint",
    ),
    "unknown dtype": Kind(
        file=MANIFEST,
        breaks=tensor("optim.state.head.bias.exp_avg", lambda row: row.__setitem__(0, "float7")),
        reason="has dtype float7",
    ),
    "wider dtype": Kind(
        file=DATA, breaks=tensor("model.head.weight", lambda row: row.__setitem__(0, "float64")), reason="CRC-32"
    ),
    "absurd shape": Kind(
        breaks=tensor("rng.0.torch", lambda row: row.__setitem__(1, [1 << 60])), reason="cannot be a generator's state"
    ),
    "too many dimensions": Kind(
        file=MANIFEST, breaks=tensor("rng.0.torch", lambda row: row.__setitem__(1, [1] * 99)), reason=STRUCTURE
    ),
    "generator's state of another shape": Kind(
        file=MANIFEST, breaks=tensor("rng.0.torch", lambda row: row.__setitem__(1, [7])), reason="must|has 7 elements"
    ),
    "state of another shape": Kind(
        breaks=tensor("optim.state.block.weight.exp_avg", lambda row: row.__setitem__(1, [16])),
        reason=r"must have shape \(4, 4\)",
    ),
    "state of an unknown parameter": Kind(breaks=signed(other_state), reason="of 1 parameters that the optimizer does"),
    "offset negative": Kind(file=MANIFEST, breaks=chunk(offset=-4), reason=STRUCTURE),
    "offset too far": Kind(file=DATA, breaks=chunk(offset=1 << 40), reason="is too short"),
    "offset absurd": Kind(file=MANIFEST, breaks=chunk(offset=1 << 63), reason=STRUCTURE),
    "offset a fraction": Kind(file=MANIFEST, breaks=chunk(offset=0.5), reason=STRUCTURE),
    "file number negative": Kind(file=MANIFEST, breaks=chunk(file=-1), reason=STRUCTURE),
    "file number too high": Kind(file=MANIFEST, breaks=chunk(file=7), reason=STRUCTURE),
    "no checksums": Kind(file=DATA, breaks=chunk(crcs=[]), reason="no checksum for block 0"),
    "checksums null": Kind(file=MANIFEST, breaks=chunk(crcs=None), reason=STRUCTURE),
    "checksum wrong": Kind(file=DATA, breaks=chunk(crcs=[1]), reason="must have CRC-32 0x00000001"),
    "hole at the start": Kind(file=MANIFEST, breaks=chunk(start=1), reason="covered from element 0; got 1"),
    "hole at the end": Kind(file=MANIFEST, breaks=chunk(stop=3), reason="the files hold the first 3"),
    "box reversed": Kind(file=MANIFEST, breaks=chunk(start=5, stop=5), reason="covered from element 0"),
    "box twice": Kind(
        file=MANIFEST,
        breaks=tensor("model.head.weight", lambda row: row[2].append(row[2][0])),
        reason="must be covered from element",
    ),
    "boxes overlap": Kind(
        file=MANIFEST,
        breaks=tensor("model.head.weight", lambda row: row[2].append([1, 9, *row[2][0][2:]])),
        reason="must be covered from element",
    ),
    "file outside": Kind(
        file=MANIFEST, breaks=signed(lambda body: body.update(files=[["../x.distcp", 9]])), reason="own directory"
    ),
    "file absolute": Kind(
        file=MANIFEST, breaks=signed(lambda body: body.update(files=[["/etc/x.distcp", 9]])), reason="own directory"
    ),
    "file unknown": Kind(
        file="x.distcp", breaks=signed(lambda body: body.update(files=[["x.distcp", 9]])), reason="No such file"
    ),
    "files without sizes": Kind(file=MANIFEST, breaks=signed(lambda body: body.update(files=[DATA])), reason=STRUCTURE),
    "file's size wrong": Kind(
        file=DATA, breaks=signed(lambda body: body.update(files=[[DATA, 9]])), reason="is too long"
    ),
    "state a list": Kind(file=MANIFEST, breaks=signed(lambda body: body.update(state=[])), reason=STRUCTURE),
    "user's state a text": Kind(breaks=signed(lambda body: body["state"].update(user="x")), reason="must be a dict"),
    "user's state malformed": Kind(
        breaks=signed(lambda body: body["state"].update(user={"__items__": [[[], 1]]})),
        reason="not what a checkpoint holds",
    ),
    "options a number": Kind(
        breaks=signed(lambda body: body["state"].update(groups=5)), reason="options cannot be read"
    ),
    # the directory
    "a file": Kind(breaks=elsewhere(lambda at: at.write_text("x")), reason="Not a directory"),
    "nothing": Kind(breaks=elsewhere(lambda at: None), reason="is no checkpoint"),
    "empty": Kind(breaks=elsewhere(Path.mkdir), reason="is no checkpoint"),
    "a loop": Kind(breaks=elsewhere(lambda at: at.symlink_to(at.name)), reason="symbolic links"),
    "half written": Kind(breaks=elsewhere(leftover), reason="is no checkpoint"),
    # of torch.distributed.checkpoint
    "index empty": Kind(file=INDEX, foreign=True, breaks=rewrite(INDEX, lambda d: b""), reason="is not an index"),
    "index cut": Kind(file=INDEX, foreign=True, breaks=rewrite(INDEX, lambda d: d[:400]), reason="is not an index"),
    "index that calls": Kind(file=INDEX, foreign=True, breaks=rewrite(INDEX, lambda d: EVIL), reason=r"posix\.system"),
    # Not for want of memory, which would be the end of the process where there is enough to begin with.
    "index of huge places": Kind(
        file=INDEX,
        foreign=True,
        breaks=rewrite(INDEX, lambda d: LONG_BINPUT_BOMB),
        reason="is not an index.*has no attribute 'state'",
    ),
    "index of huge bytes": Kind(
        file=INDEX,
        foreign=True,
        breaks=rewrite(INDEX, lambda d: BYTEARRAY_BOMB),
        reason=r"is not an index.*KeyError\(150\)",
    ),
    "index of 2 TiB": Kind(
        file=INDEX, foreign=True, breaks=lambda at: os.truncate(at / INDEX, 1 << 41), reason="longer than"
    ),
    "index of an absurd box": Kind(
        file=INDEX, foreign=True, breaks=index(absurd_index), reason="does not lie row by row"
    ),
    "index of a box twice": Kind(
        file=INDEX,
        foreign=True,
        breaks=set_chunks(lambda chunks: chunks.append(chunks[0])),
        reason="must be covered from element",
    ),
    "index with a hole": Kind(
        file=INDEX, foreign=True, breaks=set_chunks(lambda chunks: chunks.clear()), reason="the files hold the first 0"
    ),
    "index of a file outside": Kind(
        file=INDEX, foreign=True, breaks=set_places(relative_path="../x"), reason="not in the checkpoint's own"
    ),
    "index of a place too far": Kind(
        file=INDEX, foreign=True, breaks=set_places(offset=1 << 50), reason="is not an index|too short"
    ),
    "index of an absurd length": Kind(
        file=INDEX, foreign=True, breaks=set_places(length=1 << 60), reason="is not an index|too short|cannot be read"
    ),
    "torch's data removed": Kind(file=INDEX, foreign=True, breaks=replace(DATA), reason="No such file"),
    "torch's data cut": Kind(
        file=INDEX, foreign=True, breaks=rewrite(DATA, lambda d: d[:1000]), reason="is not an index|too short"
    ),
    "torch's data a pipe": Kind(file=INDEX, foreign=True, breaks=replace(DATA, os.mkfifo), reason="not a regular file"),
}


# ---- the command


CONFIG = """
strategy = "node=3"
mesh = { node = 1 }
run = { directory = "run", steps = 1, device = "cpu" }
model = { config = { model_type = "tiny" } }
data = { files = ["text/*.txt"], seq_len = 8, holdout = 0.0 }
batch = { global_sequences = 1, micro = 1 }
optimizer = { lr = 1e-2 }
"""


def command(root: Path, *settings: str) -> tuple[int, str]:
    """`zeromesh train`: its exit code, and what it printed as an error."""
    from zeromesh.cli.app import main

    errors = io.StringIO()
    overrides = [part for setting in settings for part in ("--set", setting)]
    sys.argv = ["zeromesh", "train", str(root / "config.toml"), *overrides]
    code = 0
    os._exit = sys.exit  # type: ignore[assignment]  # how the command ends where threads of a broken group may hang
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        code, text = 1, f"{type(error).__name__}: {error}"
        errors.write(text)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code, errors.getvalue()


def prepare(root: Path) -> None:
    """A whole checkpoint of each format, and a broken copy for each kind."""
    (root / "text").mkdir(parents=True)
    (root / "text" / "a.txt").write_text("a text that repeats itself. " * 20)
    (root / "config.toml").write_text(CONFIG)
    code, errors = command(root, "checkpoint.every=1")
    assert code == 0, errors
    whole = root / "run" / "checkpoints" / "step-00000001"
    vocab_size = manifest(whole)[1]["tensors"]["model.head.bias"][1][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"model": Tiny(vocab_size).state_dict()}, checkpoint_id=root / "theirs")
    for number, kind in enumerate(KINDS.values()):
        directory = root / f"kind-{number}"
        directory.mkdir()
        shutil.copytree(root / "theirs" if kind.foreign else whole, directory / "step-00000001")
        kind.breaks(directory / "step-00000001")


def seen(directory: Path) -> dict[str, str]:
    """Everything below a directory, without following links or opening pipes or what is very long."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        is_file = path.is_file() and not path.is_symlink() and status.st_size < 1 << 30
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        found[str(path.relative_to(directory))] = f"{status.st_mode} {status.st_size} {status.st_mtime_ns} {content}"
    return found


def run_all(root: Path) -> dict[str, dict[str, Any]]:
    """What came of each kind: exit code, error, whether something was changed."""
    from zeromesh.train import loop

    loop.build_language_model = lambda config, vocab_size, values: Tiny(vocab_size)  # type: ignore[assignment]
    prepare(root)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))
    outcomes = {"whole": _outcome(root, root / "run" / "checkpoints"), "whole of torch's": _outcome(root, root)}
    for number, name in enumerate(KINDS):
        outcomes[name] = _outcome(root, root / f"kind-{number}")
    return outcomes


def _outcome(root: Path, directory: Path) -> dict[str, Any]:
    checkpoint = directory / ("theirs" if directory == root else "step-00000001")
    before = seen(directory) if directory != root else {}
    code, error = command(root, f'checkpoint.resume="{checkpoint}"', f'run.directory="{root}/out/{directory.name}"')
    changed = directory != root and seen(directory) != before
    return {"checkpoint": str(checkpoint), "code": code, "error": error, "changed": changed}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_all(Path(sys.argv[1]))))
