"""Reads files of users, within bounds, for every command. Writes files that are never seen incomplete."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeromesh.errors import InputError

MAX_BYTES = 64 << 20
"""Limit for descriptive files, such as clusters and configurations: thousands of times their usual size."""

MAX_DEPTH = 64
"""Limit on nested tables and arrays."""

_TOO_LARGE = "whole numbers have at most 64 bits"


def read_text(path: str | Path, *, kind: str, error: type[InputError] = InputError) -> str:
    """The text of a user's file; `kind` is for messages: "a cluster file". Raises `error` if it cannot be read, is no
    regular file, is larger than `MAX_BYTES`, or not UTF-8."""
    try:
        # A pipe without a writer would be waited for, and a device may never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise error(f"{path}: {kind} must be a regular file; this is {_name(status.st_mode)}")
        with open(descriptor, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as why:
        if isinstance(why, InputError):
            raise
        raise error(f"{path}: cannot be read as {kind}: {getattr(why, 'strerror', None) or why}") from why
    if len(data) > MAX_BYTES:
        raise error(f"{path}: {kind} has at most {MAX_BYTES >> 20} MiB; this file has {status.st_size} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as why:
        raise error(f"{path}: cannot be read as {kind}: not UTF-8 text: {why}") from why


def parse_toml(text: str, *, where: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """The tables in the text of a TOML file; `where` opens messages. Raises `error` if it is not TOML, is nested deeper
    than `MAX_DEPTH`, or has whole numbers beyond the 64 bits that TOML gives them."""
    tables: dict[str, Any] = _parsed(tomllib.loads, text, f"{where}: not valid TOML", "", error)
    return tables


def parse_json(text: str, *, where: str, hint: str = "", error: type[InputError] = InputError) -> Any:
    """Parses JSON within the same limits; `hint` describes the expected text."""
    return _parsed(json.loads, text, f"{where}: not JSON", hint, error)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that nobody ever sees incomplete, also if this process is killed meanwhile."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def require_writable(directory: Path, *, key: str, error: type[InputError] = InputError) -> Path:
    """The directory, or the nearest one above it that exists; changes nothing. `key` names it, for messages. Raises
    `error` if it is no directory, or this user cannot write there."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "a directory of this user's to write to" if there.is_dir() else "a directory"
        raise error(f"{key}: cannot write {directory}: {there} is not {reason}")
    return there


def _parsed(loads: Callable[[str], Any], text: str, otherwise: str, hint: str, error: type[InputError]) -> Any:
    try:
        found = loads(text)
        _require_bounds(found)
    except (ValueError, RecursionError) as why:
        raise error(f"{otherwise}: {_reason(why)}{hint}") from why
    return found


def _require_bounds(value: Any) -> None:
    """Raises ValueError or RecursionError for numbers and nesting that would stall or crash whoever reads them."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for one in level:
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise ValueError(f"{_TOO_LARGE}, got one of {one.bit_length()}")
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise RecursionError


def _reason(why: Exception) -> str:
    if isinstance(why, RecursionError):
        return f"tables and arrays are nested more than {MAX_DEPTH} deep"
    # Python's own bound, of some thousand digits.
    return f"{_TOO_LARGE}" if "integer string conversion" in str(why) else str(why)


def _name(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
