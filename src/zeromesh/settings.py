"""Settings in a TOML file, overridden on the command line, as a pydantic model. One message lists all faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from zeromesh.errors import ConfigError, InputError
from zeromesh.files.users import parse_toml, read_text

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_settings(
    path: Path, overrides: Sequence[str], kind: type[ModelT], *, is_path: Callable[[str, str], bool]
) -> tuple[ModelT, dict[str, Any]]:
    """The settings of a file, and the tables that they come from.

    Args:
        path: of the file.
        overrides: each `key.path=value`, the value in TOML's syntax, or plain text.
        kind: of settings; tables are its fields.
        is_path: whether (dotted key, text) names a file. A relative path is made absolute: in the file from the file's
            directory, in an override from the current one.

    Raises:
        ConfigError: the file cannot be read or is not TOML, a key is unknown (names the nearest valid one), or a value
            is invalid.
    """
    text = read_text(path, kind="a configuration", error=ConfigError)
    tables = parse_toml(text, where=str(path), error=ConfigError)
    tables = _resolved(tables, path.resolve().parent, is_path)
    for override in overrides:
        _override(tables, override, is_path)
    try:
        return kind.model_validate(tables), tables
    except ValidationError as error:
        raise ConfigError(_explain(path, error, kind)) from None


def valid_keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every key that a file may have."""
    for name, field in kind.model_fields.items():
        if _is_table(field.annotation):
            yield from valid_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest_key(key: str, kind: type[BaseModel]) -> str:
    """A clause that names the valid key nearest to `key`, or all tables.

    The last part of the key counts most, since a key is misplaced as often as it is misspelt.
    """

    def likeness(candidate: str) -> float:
        last = SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return last + SequenceMatcher(None, key, candidate).ratio() / 2

    best = max(valid_keys(kind), key=likeness)
    return f"did you mean {best}?" if likeness(best) >= 0.9 else f"known: {', '.join(kind.model_fields)}"


def _is_table(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _override(tables: dict[str, Any], override: str, is_path: Callable[[str, str], bool]) -> None:
    key, equals, text = (part.strip() for part in override.partition("="))
    *names, last = key.split(".")
    if not equals or not all((*names, last)):
        raise ConfigError(f"--set must be key.path=value, as in --set run.steps=100; got {override!r}")
    try:
        value = parse_toml(f"value = {text}", where="--set")["value"]
    except InputError:
        value = text
    table = tables
    for depth, name in enumerate(names):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            where = ".".join(names[: depth + 1])
            raise ConfigError(f"--set {key}=...: {where} is {table!r}, not a table; set {where} itself")
    table[last] = _resolved(value, Path.cwd(), is_path, key)


def _resolved(value: Any, base: Path, is_path: Callable[[str, str], bool], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _resolved(own, base, is_path, f"{key}.{name}" if key else name) for name, own in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, base, is_path, key) for inner in value]
    if isinstance(value, str) and is_path(key, value) and not value.startswith("{"):
        try:
            return str(base / Path(value).expanduser())
        except RuntimeError as error:
            raise ConfigError(f"{key}: {value}: there is no such user's directory: write the path out") from error
    return value


def _explain(path: Path, error: ValidationError, kind: type[BaseModel]) -> str:
    """One message for all faults, each with its key and a remedy."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        table = kind.model_fields[key].annotation if key in kind.model_fields else None
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}; {nearest_key(key, kind)}")
        elif item["type"] == "missing" and _is_table(table):
            required = [name for name, inner in table.model_fields.items() if inner.is_required()]
            lines.append(f"{key} is missing; add a table [{key}] with at least {', '.join(required)}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing; set it in the file or with --set")
        elif not key:
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}; got {item['input']!r}")
    return f"{path}: " + "\n  ".join(dict.fromkeys(lines))
