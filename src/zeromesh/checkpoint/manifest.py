"""The manifest of a checkpoint: its tensors and where they lie, as JSON with a checksum. None of it is executed.

A checkpoint is the directory::

    step-00000020/
        manifest.json       line 1: format, step, serial, bytes and SHA-256 of line 2, and a CRC-32; line 2: the rest
        __0_0.distcp        the tensors that rank 0 wrote, each as one zip of torch's
        __1_0.distcp
        .metadata           the same as the manifest for torch.distributed.checkpoint; not read here

A checkpoint is complete if and only if line 1 matches its own checksum, and line 2 the size and checksum in line 1.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, Self

from zeromesh.errors import CheckpointError, InternalError
from zeromesh.pieces.region import Region

FORMAT = "zeromesh-checkpoint"
VERSION = 4
_UNSEALED = 2
"""The oldest version that is read: its first line has no checksum of its own. Version 3 has no regions."""

_FILE = re.compile(r"\w+\.distcp")
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20
"""Each checksum covers this much, so that a reader of part of a tensor verifies little more than it needs."""

MAX_BYTES = 1 << 27
"""A longer file is no manifest, and is not read. This is enough for three million chunks: 500 units on 1,024 ranks with
AdamW's two states have half as many. It takes at most 3 GB to parse."""

HEAD_BYTES = 4096
"""The first line is shorter than this."""

MAX_DIMS = 64  # torch's own limit
_MAX_NUMBER = 1 << 63
_MAX_REGIONS = 1024
"""Limit for the different boxes of one tensor. Up to this number, all pairs are compared within a second."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, too short, or damaged. An older checkpoint may be intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Elements `start` to `stop` of a flattened tensor, or of a flattened region of one, and where they lie in a file.

    `crcs` are CRC-32 of the bytes up to the end of each block of `BLOCK_BYTES`; None in a checkpoint by another tool.
    """

    start: int
    stop: int
    file: str  # its name within the checkpoint
    offset: int  # of the first byte, in the file
    crcs: tuple[int, ...] | None
    within: Region | None = None  # [Note: Regions] of `zeromesh.pieces.region`; None for all of the tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint. `dtype` is torch's name without "torch."; `chunks` cover the tensor exactly, in order
    within each region."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a checkpoint except its data."""

    step: int  # optimizer steps done
    serial: int  # numbers a directory's checkpoints in the order in which they were made
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, int] = field(default_factory=dict)  # bytes of each data file; empty: not known
    state: Mapping[str, Any] = field(default_factory=dict)  # values other than tensors, as JSON
    about: Mapping[str, Any] = field(default_factory=dict)  # strategy, mesh, versions: for people and for messages
    index: str = MANIFEST  # the file that holds this content

    def to_bytes(self) -> bytes:
        """Returns the file's content. Raises CheckpointError if it is longer than a load accepts."""
        number = {file: index for index, file in enumerate(self.files)}
        tensors = {
            name: [
                entry.dtype,
                entry.shape,
                [[c.start, c.stop, number[c.file], c.offset, c.crcs, *_region_row(c)] for c in entry.chunks],
            ]
            for name, entry in self.tensors.items()
        }
        content = {"about": self.about, "state": self.state, "files": list(self.files.items()), "tensors": tensors}
        body = json.dumps(content, separators=(",", ":")).encode()
        head = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        if len(body) > MAX_BYTES - HEAD_BYTES:
            raise CheckpointError(f"a manifest has at most {MAX_BYTES} bytes; that of this model has {len(body)}")
        return head_line(head) + body + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """The inverse of `to_bytes`; `where` is the file's name, for messages. Raises DamagedError if the bytes have
        changed; CheckpointError for a version that this zeromesh does not read."""
        head = read_head(data, where)
        body = data[data.index(b"\n") + 1 :].removesuffix(b"\n")
        if len(body) != head["bytes"] or hashlib.sha256(body).hexdigest() != head["sha256"]:
            raise DamagedError(
                f"{where} is damaged: its content must be {head['bytes']} bytes with SHA-256 {head['sha256'][:12]}..., "
                f"got {len(body)} bytes with {hashlib.sha256(body).hexdigest()[:12]}..."
            )
        try:
            content = json.loads(body)
            if not all(isinstance(content[key], dict) for key in ("tensors", "state", "about")):
                raise ValueError("tensors, state and about must be objects")
            files = _files(content["files"])
            names = list(files)
            return cls(
                step=head["step"],
                serial=head["serial"],
                tensors={name: _entry(names, *row) for name, row in content["tensors"].items()},
                files=files,
                state=content["state"],
                about=content["about"],
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{where} does not have the structure of a manifest: {error!r}") from error


def head_line(head: Mapping[str, Any]) -> bytes:
    """Returns the first line, with a checksum of the rest of the line."""
    return json.dumps({**head, "crc32": _crc(head)}).encode() + b"\n"


def _crc(head: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(head).encode())


def read_head(data: bytes, where: str) -> dict[str, Any]:
    """Parses the first line of a manifest. Raises DamagedError if it is not one; CheckpointError for a version that
    this zeromesh cannot read."""
    try:
        head = json.loads(data[:HEAD_BYTES].partition(b"\n")[0])
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        version, crc = head["version"], head.pop("crc32", None)
        if version in (VERSION, VERSION - 1) and crc != _crc(head):
            raise ValueError(f"CRC-32 {crc}, and not {_crc(head)}")
        complete = all(is_count(head[key]) for key in ("step", "serial", "bytes"))
        if not complete or not isinstance(head["sha256"], str):
            raise ValueError("step, serial, bytes and sha256 are not all there")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged: its first line is not that of a {FORMAT} ({error!r})") from error
    if version not in range(_UNSEALED, VERSION + 1):
        raise CheckpointError(f"{where} has version {version} of the format, this zeromesh reads version {VERSION}")
    return dict(head)


def _files(rows: list[list[Any]]) -> dict[str, int]:
    files = {name: num_bytes for name, num_bytes in rows}
    if not all(_FILE.fullmatch(name) for name in files) or len(files) != len(rows):
        raise ValueError("data files must lie in the checkpoint's own directory, each once")
    if not all(map(is_count, files.values())):
        raise ValueError("sizes of files must be whole numbers")
    return files


def _entry(files: list[str], dtype: str, shape: list[int], rows: list[list[Any]]) -> TensorEntry:
    numbers = [*shape, *(number for row in rows for part in (row[:4], *row[4:]) for number in part)]
    if not all(map(is_count, numbers)):
        raise ValueError("sizes and places must be whole numbers, zero or more, below 2**63")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions; at most {MAX_DIMS} are possible")
    if not isinstance(dtype, str):
        raise ValueError("dtypes must be names")
    chunks = tuple(
        Chunk(
            start=start, stop=stop, file=files[number], offset=offset, crcs=tuple(crcs), within=_region(shape, *within)
        )
        for start, stop, number, offset, crcs, *within in rows
    )
    return TensorEntry(dtype=dtype, shape=tuple(shape), chunks=chunks)


def _region_row(chunk: Chunk) -> list[tuple[int, ...]]:
    within = chunk.within
    if within is None:
        return []
    return [within.offsets, within.sizes, *([within.fold] if within.fold[1] > 1 else [])]


def _region(
    shape: list[int], offsets: Sequence[int] = (), sizes: Sequence[int] = (), fold: Sequence[int] = (0, 1)
) -> Region | None:
    if not sizes:
        return None
    dim, parts = fold
    try:
        return Region(shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes), fold=(dim, parts))
    except InternalError as error:
        raise ValueError(str(error)) from error


def is_count(number: Any) -> bool:
    """Whether `number` can be a size or a position."""
    return type(number) is int and 0 <= number < _MAX_NUMBER


def check_cover(name: str, entry: TensorEntry, where: str) -> None:
    """Raises DamagedError unless the chunks cover the tensor, with each element once."""
    ends: dict[Region, int] = {} if entry.chunks else {Region.whole(entry.shape): 0}
    for chunk in entry.chunks:
        region = chunk.within or Region.whole(entry.shape)
        at = ends.get(region, 0)
        if chunk.start != at or chunk.stop <= chunk.start:
            raise DamagedError(f"{where}: {name} must be covered from element {at}; got {chunk.start}..{chunk.stop}")
        ends[region] = chunk.stop
    for region, end in ends.items():
        if end != region.numel:
            box = "" if region.is_whole else f" in the box of {region}"
            raise DamagedError(f"{where}: {name} has {region.numel} elements{box}; the files hold the first {end}")
    if sum(ends.values()) != entry.numel:
        raise DamagedError(f"{where}: {name} has {entry.numel} elements; the files hold {sum(ends.values())}")
    if len(ends) > _MAX_REGIONS or any(one.meets(other) for one, other in combinations(ends, 2)):
        raise DamagedError(f"{where}: {name} must lie in boxes apart from each other, {_MAX_REGIONS} at most")
