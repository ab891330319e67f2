"""Documents to tokens: the same are held out on every machine, no byte is lost, and answers are told from questions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import ConfigError
from zeromesh.train.packing import pack
from zeromesh.train.records import Document, Reader, find_sources
from zeromesh.train.text import ByteTokenizer, Tokenizer, TrainedTokenizer, is_held_out, make_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(60):
        path = tmp_path / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}")
    return tmp_path


def names(directory: Path, *exclude: str) -> list[str]:
    return [source.name for source in find_sources([f"{directory}/**/*.txt"], exclude)]


def test_every_file_is_used_once_and_a_fraction_is_held_out(directory: Path) -> None:
    found = names(directory)
    assert len(set(found)) == len(found) == 60
    assert found == sorted(found)
    assert 4 <= sum(is_held_out(name, 0.2) for name in found) <= 20


def test_choice_of_held_out_files_ignores_where_they_lie(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = names(directory)
    moved = tmp_path_factory.mktemp("elsewhere") / "deep"
    directory.rename(moved)
    assert names(moved) == before


def test_excluded_files_are_left_out(directory: Path) -> None:
    assert {name.split("/")[0] for name in names(directory, "*/part1/*")} == {"part0", "part2"}


def test_stdlib_is_found_on_every_machine() -> None:
    found = {source.path.name for source in find_sources(["{stdlib}/*.py"], ())}
    assert {"ast.py", "typing.py"} <= found


def test_glob_without_a_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.files: '.*/\*\*/\*.txt' matches no file"):
        names(tmp_path)


def texts(*given: bytes | str) -> list[Document]:
    return [Document(name=str(number), text=text) for number, text in enumerate(given)]


def tokens(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[int]:
    return np.concatenate([np.empty(0, np.int32), *(one.tokens for one in tokenizer.encode(documents))]).tolist()


def test_bytes_are_their_own_tokens() -> None:
    assert tokens(ByteTokenizer(), texts(b"ab", b"\xff")) == [97, 98, 256, 255, 256]
    assert tokens(ByteTokenizer(), []) == []


def test_trained_tokenizer_is_shorter_than_bytes_and_loses_nothing(tmp_path: Path) -> None:
    given = [b"def function(argument):\n    return argument + 1\n" * 20, "naïve 数".encode()]
    tokenizer, _ = make_tokenizer("bpe:300", lambda render: texts(*given))
    assert isinstance(tokenizer, TrainedTokenizer)
    assert 257 <= tokenizer.vocab_size <= 300
    found = tokens(tokenizer, texts(*given))
    assert len(found) < len(b"".join(given)) / 3
    assert tokenizer.decode(found).encode() == b"".join(given)

    saved = tmp_path / "tokenizer.json"
    saved.write_text(tokenizer.definition)
    again, _ = make_tokenizer(str(saved), lambda render: [])
    assert tokens(again, texts(*given)) == found


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 257 tokens, one for each byte; got 100"):
        make_tokenizer("bpe:100", lambda render: [])
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json"):
        make_tokenizer(str(broken), lambda render: [])
    with pytest.raises(ConfigError, match="is no directory with a Hugging Face tokenizer"):
        make_tokenizer("/nowhere/", lambda render: [])


# ---- records


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def render(messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']}\n" for m in messages) + "<a>" * answering


def read(path: Path, **options: Any) -> tuple[list[Document], Reader]:
    reader = Reader(**options)
    return list(reader.documents(find_sources([str(path)], ()))), reader


TURNS = [("user", "né?"), ("assistant", "oui"), ("user", "and"), ("assistant", "数")]
MESSAGES = {"messages": [{"role": role, "content": content, "tool_calls": None} for role, content in TURNS]}


def learned(tokenizer: Tokenizer, document: Document) -> bytes:
    """The text of the learned tokens."""
    (encoded,) = tokenizer.encode([document])
    assert encoded.learned is not None and encoded.learned.shape == encoded.tokens.shape
    marked = encoded.tokens[encoded.learned]
    return (
        bytes(marked[marked < 256].tolist())
        if isinstance(tokenizer, ByteTokenizer)
        else tokenizer.decode(marked.tolist()).encode()
    ) + b"$" * bool(marked[-1] == tokenizer.end)


def test_answers_alone_are_learned_with_the_end_of_a_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "né", "completion": " 数a"}, {"text": "all"}, MESSAGES)
    (pair, plain, chat), reader = read(path, render=render)
    reader.require_usable()
    for tokenizer in (ByteTokenizer(), TrainedTokenizer.train([pair, plain, chat], 300)):
        assert learned(tokenizer, pair) == " 数a".encode() + b"$"
        assert learned(tokenizer, chat) == "oui\n数\n".encode(), "its template ends it"
        (encoded,) = tokenizer.encode([plain])
        assert encoded.learned is None and encoded.tokens[-1] == tokenizer.end
        assert len(list(tokenizer.encode([pair, chat, plain]))) == 3
    assert (pair.apart, plain.apart, chat.apart) == (True, False, True)

    (pair, _, chat), _ = read(path, render=render, answers_only=False)
    assert pair.learned is chat.learned is None and pair.apart


def test_records_that_cannot_be_used_are_named_with_their_lines_and_counted(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "good"},
        "\n",
        "{not json\n",
        "[1]\n",
        {"prompt": "only"},
        {"txt": 1},
        {"messages": [{"content": "nobody"}]},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "user"}]},
    )
    documents, reader = read(path, render=render)
    assert [document.text for document in documents] == ["good"]
    with pytest.raises(ConfigError) as raised:
        reader.require_usable()
    text = str(raised.value)
    assert text.startswith("7 of 8 records cannot be used; mend them, or leave them out:\n")
    assert (
        f"{path}:3: not JSON: Expecting property name enclosed in double quotes at column 2" in text
        and f"{path}:4: a record must be an object; got list" in text
    )
    assert f"{path}:5: prompt and completion must both be texts" in text
    assert f"{path}:6: a record must have text, prompt and completion, or messages; this has txt" in text
    assert f"{path}:7: messages must be a list of objects" in text
    assert text.endswith("and 2 more")
    _, reader = read(lines(tmp_path / "b.jsonl", {"text": 3}, '{"text": [\n'))
    assert set(reader.problems) == {"text must be a text, got int", "not JSON: Expecting value at column 11"}
    _, reader = read(path)
    (template,) = (reason for reason in reader.problems if "messages need a chat template" in reason)
    assert reader.problems[template] == (f"{path}:7", 3)


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", MESSAGES)
    _, reader = read(path, render=lambda messages, answering: f"{len(messages)}" + render(messages, answering))
    assert "set data.answers_only = false" in next(iter(reader.problems))


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list([{"text": f"text {number}"} for number in range(3)])
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "saved"):
        documents, reader = read(tmp_path / name)
        reader.require_usable()
        assert [document.text for document in documents] == ["text 0", "text 1", "text 2"], name
    (tmp_path / "b.parquet").write_text("none")
    with pytest.raises(ConfigError, match=r"b.parquet cannot be read"):
        read(tmp_path / "b.parquet")


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 50))
def test_each_document_is_in_one_row_that_it_fits_in(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    sums = sorted(sum(lengths[document] for document in row) for row in rows)
    assert all(total <= capacity for total in sums)
    assert len(rows) < 2 or sums[0] + sums[1] > capacity, "the two shortest would be one"
