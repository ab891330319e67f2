"""Hugging Face's safetensors files. All ranks write and read them at once, each its own slices.

A file has eight bytes (the header's length), the header (JSON: dtype, shape and byte range of each tensor) and the
tensors' bytes, one after another. Every rank knows all names and shapes, so all ranks compute the same header and each
writes its ranges at their place. No rank ever holds more than its own shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.manifest import MAX_DIMS, is_count
from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.storage import open_regular, read_at
from zeromesh.errors import CheckpointError
from zeromesh.files.users import parse_json, read_text
from zeromesh.pieces.piece import Piece
from zeromesh.progress import note

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole tensor of an export, with its dtype in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int


def write_safetensors(
    directory: Path, specs: Sequence[Spec], pieces: Iterable[Piece], peers: Peers, *, max_file_bytes: int
) -> None:
    """Writes `model.safetensors`, or several files and their index, under temporary names, then renames them.

    All ranks give all `specs`. Each gives the `pieces` that it writes; together they cover every tensor, and all ranks
    iterate over them together. A tensor is never split over files. Raises CheckpointError on all ranks if one of them
    failed.
    """
    files = _plan(specs, max_file_bytes)
    _together(peers, lambda: _create(directory, files) if peers.rank == 0 else None)
    dtypes = {spec.name: spec.dtype for spec in specs}
    _together(peers, lambda: _fill(directory, files, pieces, dtypes))
    _together(peers, lambda: _publish(directory, files) if peers.rank == 0 else None)


def _together(peers: Peers, work: Any) -> None:
    problem = ""
    try:
        work()
    except OSError as error:
        problem = f"cannot write {error.filename or 'a file'}: {error.strerror or error}"
    for found in peers.all_gather(problem, "whether all can go on with the export"):
        if found:
            raise CheckpointError(f"the export was not finished: {found}")


def _plan(specs: Sequence[Spec], max_file_bytes: int) -> list[_File]:
    groups: list[list[Spec]] = [[]]
    for spec in specs:
        if groups[-1] and sum(s.num_bytes for s in groups[-1]) + spec.num_bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(spec)
    single = len(groups) == 1
    names = [SINGLE if single else f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    return [_layout(name, group) for name, group in zip(names, groups, strict=True)]


def _layout(name: str, specs: Sequence[Spec]) -> _File:
    # Wide dtypes come first, as in safetensors itself, so that every tensor is aligned.
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in ordered:
        place = [at, at + spec.num_bytes]
        content[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": place}
        at += spec.num_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {spec.name: len(header) + content[spec.name]["data_offsets"][0] for spec in ordered}
    return _File(name=name, header=header, offsets=offsets, num_bytes=len(header) + at)


def _temporary(directory: Path, file: _File) -> Path:
    return directory / f".{file.name}.writing"


def _create(directory: Path, files: Sequence[_File]) -> None:
    for file in files:
        with open(_temporary(directory, file), "wb") as stream:
            stream.write(file.header)
            stream.truncate(file.num_bytes)


def _fill(directory: Path, files: Sequence[_File], pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype]) -> None:
    file_of, problem, opened = {name: file for file in files for name in file.offsets}, None, dict[str, FileIO]()
    with ExitStack() as stack:
        for piece in pieces:  # even after a failure: all ranks may have to compute pieces together
            if problem is not None or not piece.local.numel():
                continue
            file, dtype = file_of[piece.name], dtypes[piece.name]
            try:
                if file.name not in opened:
                    opened[file.name] = stack.enter_context(open(_temporary(directory, file), "r+b", buffering=0))
                for start in range(0, piece.local.numel(), _CHUNK):
                    part = piece.local[start : start + _CHUNK].to("cpu", dtype).contiguous()
                    place = file.offsets[piece.name] + (piece.start + start) * dtype.itemsize
                    view = memoryview(part.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs
                    while view:
                        count = os.pwrite(opened[file.name].fileno(), view, place)
                        view, place = view[count:], place + count
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem
        for stream in opened.values():
            os.fsync(stream.fileno())


def _publish(directory: Path, files: Sequence[_File]) -> None:
    """Renames the files, then the index. An older index goes first, since it would mix new files with old ones."""
    (directory / INDEX).unlink(missing_ok=True)
    for file in files:
        os.replace(_temporary(directory, file), directory / file.name)
    if len(files) > 1:
        total = sum(file.num_bytes - len(file.header) for file in files)
        weights = {name: file.name for file in files for name in file.offsets}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        temporary = directory / f".{INDEX}.writing"
        temporary.write_text(json.dumps(index, indent=2))
        os.replace(temporary, directory / INDEX)
        (directory / SINGLE).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file, whose bytes begin at `offset`."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def fill(self, target: torch.Tensor, start: int) -> None:
        note(self.path.name)
        direct = target.dtype == self.dtype and target.device.type == "cpu"
        scratch = torch.empty(0 if direct else min(_CHUNK, target.numel()), dtype=self.dtype, device="cpu")
        place = self.offset + start * self.dtype.itemsize
        try:
            with open(self.path, "rb") as stream:
                for part in torch.split(target, _CHUNK):
                    read = part if direct else scratch[: part.numel()]
                    view = memoryview(read.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs
                    if read_at(stream, place, view) < len(view):
                        raise CheckpointError(f"{self.path} is shorter than its header says")
                    place += len(view)
                    if not direct:
                        part.copy_(read)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def same_as(self, other: Stored) -> bool:
        """Whether another tensor has the same values. Compares chunk by chunk, to save memory."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        count = prod(self.shape)
        parts = [torch.empty(min(_CHUNK, count), dtype=self.dtype, device="cpu") for _ in range(2)]
        for start in range(0, count, _CHUNK):
            left, right = (part[: count - start] for part in parts)
            self.fill(left, start)
            other.fill(right, start)
            if not torch.equal(left, right):
                return False
        return True

    def whole(self) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(values.view(-1), 0)
        return values


def read_headers(location: Path) -> dict[str, Stored]:
    """Reads the headers of a safetensors file, or of all in a Hugging Face model's directory. Raises CheckpointError if
    files are missing or damaged, or a tensor has an unsupported dtype."""
    if location.is_file():
        return _read_header(location)
    index, single = location / INDEX, location / SINGLE
    if index.is_file():
        try:
            text = read_text(index, kind="an index of safetensors files", error=CheckpointError)
            files = sorted(set(parse_json(text, where=str(index), error=CheckpointError)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
        if not all(isinstance(file, str) and os.path.basename(file) == file for file in files):
            raise CheckpointError(f"{index} names a file outside of its directory")
        return {name: stored for file in files for name, stored in _read_header(location / file).items()}
    if single.is_file():
        return _read_header(single)
    raise CheckpointError(
        f"{location} has neither {SINGLE} nor {INDEX}: give a safetensors file or a model's directory"
    )


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with open(open_regular(path), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is damaged: its header has {length} bytes, the file {size}")
            content = json.loads(stream.read(length))
        content.pop("__metadata__", None)
        return {name: _stored(path, name, row, 8 + length, size) for name, row in content.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a safetensors file: {error!r}") from error


def _stored(path: Path, name: str, row: Mapping[str, Any], base: int, size: int) -> Stored:
    shape, (begin, end) = tuple(row["shape"]), row["data_offsets"]
    if row["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {row['dtype']}, which is not supported")
    dtype = _DTYPES[row["dtype"]]
    if len(shape) > MAX_DIMS or not all(map(is_count, shape)):
        raise ValueError(f"{name} has shape {str(shape)[:80]}")
    if not 0 <= begin <= end or end - begin != prod(shape) * dtype.itemsize or base + end > size:
        raise CheckpointError(
            f"{path} is damaged: {name} of shape {shape} needs bytes {base + begin} to {base + end} of {size}"
        )
    return Stored(path=path, shape=shape, dtype=dtype, offset=base + begin)
