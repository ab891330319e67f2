"""Files of users, read within bounds, and files that are whole if they are there. Every command reads through here."""

from __future__ import annotations

import json
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

from zeromesh.errors import InputError

MAX_BYTES = 64 << 20
"""Of a file that a person or a tool has written to describe something: thousands of times what any of them takes."""


def read_text(path: str | Path, *, kind: str, error: type[InputError] = InputError) -> str:
    """The text of a user's file.

    Args:
        path: of the file; `~` is the user's directory.
        kind: what it should be, for messages: "a cluster file".
        error: to raise.

    Raises:
        InputError: `error`, where it cannot be read, is not a regular file, is larger than `MAX_BYTES`, or not UTF-8.
    """
    try:
        # A pipe without a writer would be waited for, and a device may never end.
        descriptor = os.open(expanded(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: {kind} must be a regular file; this is {_name(status.st_mode)}")
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


def expanded(path: str | Path) -> Path:
    """`path` with `~` for the user's directory.

    Raises:
        InputError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as why:
        raise InputError(f"{path}: there is no such user's directory: write the path out") from why


def parse_toml(text: str, *, where: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        text: of the file.
        where: opens messages.
        error: to raise.

    Raises:
        InputError: `error`, where it is not TOML, or nested or numbered beyond what can be read.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as why:
        raise error(f"{where}: not valid TOML: {_reason(why)}") from why


def parse_json(text: str, *, where: str, hint: str = "", error: type[InputError] = InputError) -> Any:
    """What a JSON text says; as `parse_toml`, with a hint at what the text should be."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as why:
        raise error(f"{where}: not JSON: {_reason(why)}{hint}") from why


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole if it is there: who reads it, or ends this process, may do so at any moment."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _reason(why: Exception) -> str:
    if isinstance(why, RecursionError):
        return "tables and arrays are nested too deeply"
    if "integer string conversion" in str(why):
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return str(why)


def _name(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
