"""Files to tokens: the same files are held out on every machine, and no byte is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import ConfigError
from zeromesh.train.config import DataConfig
from zeromesh.train.text import ByteTokenizer, TrainedTokenizer, find_files, make_tokenizer


def data(directory: Path, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"files": [f"{directory}/**/*.txt"], "seq_len": 8} | changes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(60):
        path = tmp_path / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}")
    return tmp_path


def test_every_file_is_used_once_and_a_fraction_is_held_out(directory: Path) -> None:
    files = find_files(data(directory, holdout=0.2))
    assert len({*files.training, *files.held_out}) == len(files.training) + len(files.held_out) == 60
    assert 4 <= len(files.held_out) <= 20
    assert list(files.training) == sorted(files.training)


def test_choice_of_held_out_files_ignores_where_they_lie(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("elsewhere") / "deep"
    directory.rename(moved)
    directory.mkdir()
    for path in moved.rglob("*.txt"):
        copy = directory / path.relative_to(moved)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    here, there = find_files(data(directory)), find_files(data(moved))
    assert [path.name for path in here.held_out] == [path.name for path in there.held_out] != []


def test_excluded_files_are_left_out(directory: Path) -> None:
    files = find_files(data(directory, exclude=["*/part1/*"]))
    assert {path.parent.name for path in (*files.training, *files.held_out)} == {"part0", "part2"}


def test_stdlib_is_found_on_every_machine() -> None:
    files = find_files(DataConfig(files=("{stdlib}/*.py",), seq_len=8))
    names = {path.name for path in (*files.training, *files.held_out)}
    assert {"ast.py", "json.py", "typing.py"} - names == {"json.py"}
    assert len(files.held_out) >= 3


def test_glob_without_a_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"data.files: '{tmp_path}/**/*.txt' matches no file")):
        find_files(data(tmp_path))


def test_holdout_that_leaves_nothing_is_an_error(directory: Path) -> None:
    with pytest.raises(ConfigError, match="leaves 1 files to train on and 0 held out of 1"):
        find_files(data(directory, files=[f"{directory}/part0/00.txt"], holdout=1e-9))


def test_bytes_are_their_own_tokens() -> None:
    assert ByteTokenizer().encode([b"ab", b"\xff"]).tolist() == [97, 98, 256, 255, 256]
    assert ByteTokenizer().encode([]).tolist() == []


def test_trained_tokenizer_is_shorter_than_bytes_and_loses_nothing(tmp_path: Path) -> None:
    texts = [b"def function(argument):\n    return argument + 1\n" * 20, "naïve 数".encode()]
    tokenizer = make_tokenizer("bpe:300", texts)
    assert isinstance(tokenizer, TrainedTokenizer)
    assert 257 <= tokenizer.vocab_size <= 300
    tokens = tokenizer.encode(texts)
    assert len(tokens) < len(b"".join(texts)) / 3
    decoded = tokenizer._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    assert decoded.encode() == b"".join(texts)

    saved = tmp_path / "tokenizer.json"
    saved.write_text(tokenizer.definition)
    assert make_tokenizer(str(saved), []).encode(texts).tolist() == tokens.tolist()


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 257 tokens, one for each byte; got 100"):
        make_tokenizer("bpe:100", [])
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json"):
        make_tokenizer(str(broken), [])
