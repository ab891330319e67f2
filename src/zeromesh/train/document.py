"""A TOML file as a dictionary: read, overridden by dotted path, its file names made absolute."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError, InputError
from zeromesh.files import parse_toml, read_text

IsPath = Callable[[str, str], bool]

_NEAR = 0.9
"""Likeness, of 1.5 at the most, from which on a key may be meant by another."""


def read_document(path: Path, overrides: Sequence[str], *, is_path: IsPath) -> dict[str, Any]:
    """The file's content with overrides applied.

    Args:
        path: a TOML file.
        overrides: each `key.path=value`, the value in TOML's syntax, or plain text.
        is_path: whether (dotted key, text) names a file, to be resolved against where it was written.

    Raises:
        ConfigError: the file cannot be read or is not TOML, or an override has no key.
    """
    text = read_text(path, kind="a configuration", error=ConfigError)
    document = parse_toml(text, where=str(path), error=ConfigError)
    resolved: dict[str, Any] = _resolve(document, path.resolve().parent, is_path)
    for override in overrides:
        key, value = parse_override(override)
        assign(resolved, key, _resolve(value, Path.cwd(), is_path, key))
    return resolved


def parse_override(override: str) -> tuple[str, Any]:
    """Splits `key.path=value`; a value that is not TOML is text.

    >>> parse_override("run.steps=5"), parse_override("strategy=node=3,cluster=1")
    (('run.steps', 5), ('strategy', 'node=3,cluster=1'))
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set must be key.path=value, as in --set run.steps=100; got {override!r}")
    try:
        return key, parse_toml(f"value = {text}", where="--set")["value"]
    except InputError:
        return key, text.strip()


def assign(document: dict[str, Any], key: str, value: Any) -> None:
    """Sets `document[a][b]...` for the key `a.b...`, making tables on the way.

    Raises:
        ConfigError: a part of the key on the way is a value, not a table.
    """
    *tables, last = key.split(".")
    table = document
    for depth, name in enumerate(tables):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            where = ".".join(tables[: depth + 1])
            raise ConfigError(f"--set {key}=...: {where} is {table!r}, not a table; set {where} itself")
    table[last] = value


def nearest_key(key: str, valid: Sequence[str]) -> str:
    """A clause naming the valid dotted key nearest to `key`, if one is near, and those of its table.

    The last part of the key counts most, since a key is misplaced as often as it is misspelt.

    >>> nearest_key("optimizer.weight_decy", ["optimizer.lr", "optimizer.weight_decay", "run.steps"])
    'did you mean optimizer.weight_decay? ([optimizer] has lr, weight_decay)'
    >>> nearest_key("optimizer.name", ["optimizer.lr", "optimizer.weight_decay", "run.steps"])
    '[optimizer] has lr, weight_decay'
    """

    def likeness(candidate: str) -> float:
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return last + difflib.SequenceMatcher(None, key, candidate).ratio() / 2

    best, table = max(valid, key=likeness), key.rpartition(".")[0]
    names = [name.removeprefix(f"{table}.") for name in valid if table and name.startswith(f"{table}.")]
    has = f"[{table}] has {', '.join(names)}" if names else ""
    if likeness(best) >= _NEAR:
        return f"did you mean {best}?" + (f" ({has})" if has else "")
    return has or f"known: {', '.join(dict.fromkeys(name.partition('.')[0] for name in valid))}"


def _resolve(value: Any, base: Path, is_path: IsPath, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _resolve(inner, base, is_path, f"{key}.{name}" if key else name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, base, is_path, key) for inner in value]
    if isinstance(value, str) and is_path(key, value) and not value.startswith("{"):
        try:
            return str(base / Path(value).expanduser())
        except RuntimeError as error:
            raise ConfigError(f"{key}: {value}: there is no such user's directory: write the path out") from error
    return value
