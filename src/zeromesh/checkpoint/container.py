"""One tensor as torch's own zip file, around bytes that are written as they lie in memory.

A data file is one such zip after another, which is what torch.distributed.checkpoint reads. The zip is built here, not
by `torch.save`, for two reasons: the tensor's bytes go to the file without a copy, and where they lie is known, so that
they are read back without looking into the zip and without unpickling anything.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

ALIGNMENT = 64
"""Of a tensor's bytes in a file: what `torch.save` does."""

MAX_ITEM_BYTES = 1 << 30
"""Longer slices are cut, so that no entry needs the 64-bit form of the zip format."""

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""Later dtypes have none of their own: torch describes their tensors in its third form, over bytes."""

# "FB" is the id of the padding field that torch writes; 1980-01-01 is the zip format's day zero.
_FLAGS = 0x0808
_DAY_ZERO = 0x21


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: bytes
    position: int
    crc: int
    size: int


@dataclass(slots=True, kw_only=True)
class Container:
    """The bytes before and after a tensor's own in the file.

    Args:
        dtype: of the tensor.
        sizes: its shape.
        position: where in the file the zip begins.
        head: everything before the tensor's bytes.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    position: int
    head: bytes = field(init=False)
    _entries: list[_Entry] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        file = io.BytesIO()
        for name, content in ((b"data.pkl", _description(self.dtype, self.sizes)), (b"byteorder", b"little")):
            self._append(file, b"archive/" + name, content)
        self._local_header(file, b"archive/data/0", pad_from=self.position)
        self.head = file.getvalue()

    @property
    def data_offset(self) -> int:
        """Where in the file the tensor's bytes begin."""
        return self.position + len(self.head)

    def tail(self, crc: int, data_bytes: int) -> bytes:
        """Everything after the tensor's bytes, whose CRC-32 and number these are."""
        file = io.BytesIO()
        start = len(self.head) + data_bytes
        file.write(_descriptor(crc, data_bytes))
        entries = [*self._entries, _Entry(name=b"archive/data/0", position=self._last, crc=crc, size=data_bytes)]
        version = _Entry(name=b"archive/version", position=start + file.tell(), crc=crc32(b"3\n"), size=2)
        file.write(_header(version.name, 0) + b"3\n" + _descriptor(version.crc, version.size))
        entries.append(version)
        directory = start + file.tell()
        for entry in entries:
            file.write(_directory_entry(entry))
        length = start + file.tell() - directory
        file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, len(entries), len(entries), length, directory, 0))
        return file.getvalue()

    @property
    def _last(self) -> int:
        return self._entries[-1].position + _entry_length(self._entries[-1])

    def _append(self, file: io.BytesIO, name: bytes, content: bytes) -> None:
        entry = _Entry(name=name, position=file.tell(), crc=crc32(content), size=len(content))
        file.write(_header(name, 0) + content + _descriptor(entry.crc, entry.size))
        self._entries.append(entry)

    def _local_header(self, file: io.BytesIO, name: bytes, pad_from: int) -> None:
        plain = pad_from + file.tell() + len(_header(name, 4))
        file.write(_header(name, 4 + -plain % ALIGNMENT))


def _entry_length(entry: _Entry) -> int:
    return len(_header(entry.name, 0)) + entry.size + 16


def _header(name: bytes, extra: int) -> bytes:
    field_ = struct.pack("<2sH", b"FB", extra - 4) + b"Z" * (extra - 4) if extra else b""
    return (
        struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, _DAY_ZERO, 0, 0, 0, len(name), extra) + name + field_
    )


def _descriptor(crc: int, size: int) -> bytes:
    return struct.pack("<4s3I", b"PK\x07\x08", crc, size, size)


def _directory_entry(entry: _Entry) -> bytes:
    fixed = (0, 0, _FLAGS, 0, 0, _DAY_ZERO, entry.crc, entry.size, entry.size, len(entry.name), 0, 0, 0, 0, 0)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fixed, entry.position) + entry.name


class _Storage:
    """Stands for the storage that `torch.load` will make of entry data/0."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        kind = _STORAGES.get(dtype, torch.UntypedStorage)
        self.reference = ("storage", kind, "0", "cpu", numel if dtype in _STORAGES else numel * dtype.itemsize)


class _Tensor:
    def __init__(self, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        strides = [1] * len(sizes)
        for dim in reversed(range(len(sizes) - 1)):
            strides[dim] = strides[dim + 1] * max(1, sizes[dim + 1])
        numel = torch.Size(sizes).numel()
        hooks: OrderedDict[str, Any] = OrderedDict()
        self.arguments = (_Storage(dtype, numel), 0, tuple(sizes), tuple(strides), False, hooks)
        self.dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        if self.dtype in _STORAGES:
            return _rebuild_tensor_v2, self.arguments
        return _rebuild_tensor_v3, (*self.arguments, self.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None


def _description(dtype: torch.dtype, sizes: Sequence[int]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Tensor(dtype, sizes))
    return file.getvalue()
