"""What a run learns from, one document after another: text files whole, records of JSON lines, Parquet files and
directories of `datasets`. Torch-free.

A record is a mapping with one of::

    {"text": "..."}
    {"prompt": "...", "completion": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
"""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError

RECORDS = (".jsonl", ".parquet")
SAVED = "state.json"
"""That `datasets` writes beside the files of a saved directory."""

SHOWN = 5
"""Kinds of records that cannot be used, named in the message."""

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text to learn from.

    Args:
        name: decides whether it is held out; does not depend on where files lie.
        text: of it; bytes of files that hold no records, which need not be UTF-8.
        learned: the ranges of characters that are learned; None for all.
        apart: it is a question with its answer, which has nothing to do with what comes before or after it.
        complete: it has all special tokens already, as a chat template writes them.
    """

    name: str
    text: str | bytes
    learned: Spans | None = None
    apart: bool = False
    complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file, or a directory of `datasets`, and its name below the fixed part of the glob that has found it."""

    path: Path
    name: str

    @property
    def has_records(self) -> bool:
        return self.path.suffix in RECORDS or self.path.is_dir()


Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Messages as text; with whether the assistant's next one is to follow."""


def find_sources(patterns: Iterable[str], exclude: Iterable[str], *, key: str = "data.files") -> list[Source]:
    """What the globs match, in the order of names.

    Raises:
        ConfigError: a glob matches nothing.
    """
    names: dict[Path, str] = {}
    excluded = tuple(exclude)
    for pattern in patterns:
        expanded = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        found = [Path(match) for match in glob.glob(expanded, recursive=True)]
        kept = [path for path in found if path.is_file() or (path / SAVED).is_file()]
        kept = [path for path in kept if not any(fnmatch(str(path), one) for one in excluded)]
        if not kept:
            raise ConfigError(f"{key}: {pattern!r} matches no file (looked for {expanded})")
        fixed = glob.escape(expanded).split("[")[0].rpartition("/")[0]
        names |= {path: str(path.relative_to(fixed or "/")) for path in kept}
    return [Source(path=path, name=names[path]) for path in sorted(names, key=lambda path: (names[path], path))]


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads sources one document at a time; keeps what is wrong with records until all have been seen.

    Args:
        render: messages as text; None where there is no chat template.
        answers_only: learn no questions.
        problems: by reason why records cannot be used, where the first is and how many there are.
        records: read so far.
    """

    render: Render | None = None
    answers_only: bool = True
    problems: dict[str, tuple[str, int]] = field(default_factory=dict)
    records: int = 0

    def documents(self, sources: Iterable[Source]) -> Iterator[Document]:
        """Every document, in order; those of records that cannot be used are left out, and noted.

        Raises:
            ConfigError: a file cannot be read, or the library that reads it is not installed.
        """
        for source in sources:
            if source.has_records:
                yield from self._of_records(source)
            else:
                yield Document(name=source.name, text=_bytes_of(source.path))

    def require_usable(self) -> None:
        """Raises ConfigError where a record was not."""
        if self.problems:
            shown = list(self.problems.items())[:SHOWN]
            lines = [f"{where}{f' and {n - 1} more' if n > 1 else ''}: {why}" for why, (where, n) in shown]
            count = sum(n for _, n in self.problems.values())
            rest = count - sum(n for _, (_, n) in shown)
            lines += [f"and {rest} more"] if rest else []
            raise ConfigError(
                f"{count} of {self.records} records cannot be used; mend them, or leave them out:\n  "
                + "\n  ".join(lines)
            )

    def _of_records(self, source: Source) -> Iterator[Document]:
        for number, (where, row) in enumerate(_rows(source)):
            self.records += 1
            found: Document | str = row if isinstance(row, str) else self._document(row, f"{source.name}:{number}")
            if isinstance(found, Document):
                yield found
            else:
                first, count = self.problems.get(found, (where, 0))
                self.problems[found] = first, count + 1

    def _document(self, row: Any, name: str) -> Document | str:
        """The document of a record, or what is wrong with it."""
        if not isinstance(row, Mapping):
            return f"a record must be an object; got {type(row).__name__}"
        row = {key: value for key, value in row.items() if value is not None}  # of columns that others have
        if "messages" in row:
            return self._of_messages(row["messages"], name)
        if "prompt" in row or "completion" in row:
            prompt, completion = row.get("prompt"), row.get("completion")
            if not isinstance(prompt, str) or not isinstance(completion, str):
                return "prompt and completion must both be texts"
            text = prompt + completion
            learned = ((len(prompt), len(text)),) if self.answers_only else None
            return Document(name=name, text=text, learned=learned, apart=True)
        if "text" in row and not isinstance(row["text"], str):
            return f"text must be a text, got {type(row['text']).__name__}"
        if "text" not in row:
            return (
                f"a record must have text, prompt and completion, or messages; this has {', '.join(row) or 'nothing'}"
            )
        return Document(name=name, text=row["text"])

    def _of_messages(self, messages: Any, name: str) -> Document | str:
        if self.render is None:
            return "messages need a chat template: set model.chat_template, or data.tokenizer to one that has it"
        given = messages if isinstance(messages, Sequence) else ()
        if not given or not all(isinstance(turn, Mapping) and "role" in turn for turn in given):
            return 'messages must be a list of objects with "role" and "content"'
        turns = [{key: value for key, value in turn.items() if value is not None} for turn in given]
        try:
            whole, answers = self.render(turns, False), []
            for index, turn in enumerate(turns):
                if turn["role"] == "assistant" and self.answers_only:
                    before, after = self.render(turns[:index], True), self.render(turns[: index + 1], False)
                    if not (after.startswith(before) and whole.startswith(after)):
                        return (
                            "the chat template writes earlier messages otherwise once others follow, so the answers "
                            "cannot be told from the rest: set data.answers_only = false to learn all of it"
                        )
                    answers.append((len(before), len(after)))
        except Exception as error:  # templates raise what they like
            return f"the chat template does not take these messages: {error}"
        if self.answers_only and not answers:
            return "messages without any of the assistant's"
        learned = tuple(answers) if self.answers_only else None
        return Document(name=name, text=whole, learned=learned, apart=True, complete=True)


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Each record with where it stands; text instead of a record is why it cannot be read."""
    if source.path.suffix == ".jsonl":
        yield from _json_lines(source.path)
        return
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'data.files: {source.path} is read by the datasets library: pip install "zeromesh[data]"'
        ) from error
    try:
        if source.path.is_dir():
            found = datasets.load_from_disk(str(source.path))
        else:
            found = datasets.Dataset.from_parquet(str(source.path))
    except Exception as error:  # pyarrow and datasets have many
        raise ConfigError(f"data.files: {source.path} cannot be read: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        raise ConfigError(
            f"data.files: {source.path} holds several data sets ({', '.join(found)}): name the directory of one"
        )
    for number, row in enumerate(found):
        yield f"{source.path}, record {number}", row


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"{path}:{number}", _json_line(line)
    except OSError as error:
        raise ConfigError(f"data.files: {path} cannot be read: {error.strerror or error}") from error


def _json_line(line: bytes) -> Any:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:  # whose line is that of the text which it was given
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"a record must be an object; got {type(row).__name__}"


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.files: {path} cannot be read: {error.strerror or error}") from error
