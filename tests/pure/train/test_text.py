"""Texts to tokens: the same are held out on every machine, and no byte is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeromesh.errors import ConfigError
from zeromesh.integrations.texts import Tokenizer, find_files, is_held_out, make_tokenizer, read_texts


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(60):
        path = tmp_path / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}")
    return tmp_path


def names(directory: Path, *exclude: str) -> list[str]:
    return [name for name, _ in find_files([f"{directory}/**/*.txt"], exclude)]


def test_every_file_is_used_once_and_a_fraction_is_held_out(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = names(directory)
    assert len(set(found)) == len(found) == 60
    assert found == sorted(found)
    assert 4 <= sum(is_held_out(name, 0.2) for name in found) <= 20
    assert {name.split("/")[0] for name in names(directory, "*/part1/*")} == {"part0", "part2"}
    moved = tmp_path_factory.mktemp("elsewhere") / "deep"
    directory.rename(moved)
    assert names(moved) == found  # wherever they lie, the same are held out
    with pytest.raises(ConfigError, match=r"data.files: '.*/\*\*/\*.txt' matches no file"):
        names(directory)
    assert {"ast.py", "typing.py"} <= {path.name for _, path in find_files(["{stdlib}/*.py"])}


def tokens(tokenizer: Tokenizer, *texts: bytes) -> list[int]:
    return [token for found in tokenizer.encode(texts) for token in found.tolist()]


def test_tokenizers(tmp_path: Path) -> None:
    assert tokens(Tokenizer(), b"ab", b"\xff", b"") == [97, 98, 256, 255, 256, 256]
    assert Tokenizer().decode([97, 98, 256]) == "ab"
    # A trained tokenizer is shorter than bytes and loses nothing.
    given = [b"def function(argument):\n    return argument + 1\n" * 20, "naïve 数".encode()]
    tokenizer = make_tokenizer("bpe:300", given)
    assert 257 <= tokenizer.vocab_size <= 300
    found = tokens(tokenizer, *given)
    assert len(found) < len(b"".join(given)) / 3 and found.count(tokenizer.end) == 2
    assert tokenizer.decode(found).encode() == b"".join(given)

    saved = tmp_path / "tokenizer.json"
    saved.write_text(tokenizer.definition or "")
    assert tokens(make_tokenizer(str(saved)), *given) == found
    # Bad tokenizers are refused.
    with pytest.raises(ConfigError, match="at least 257 tokens, one for each byte; got 100"):
        make_tokenizer("bpe:100")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json"):
        make_tokenizer(str(broken))
    with pytest.raises(ConfigError, match="is no directory with a Hugging Face tokenizer"):
        make_tokenizer("/nowhere/")


# ---- records


def read(path: Path) -> list[bytes]:
    return [text for _, text in read_texts(find_files([str(path)]))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "cannot be read: Expecting property name"),
        ("[1]", r'record 2 must be {"text": "..."}, got \[1\]'),
        ('{"text": 3}', r"record 2 must be"),
        ('{"prompt": "a", "completion": "b"}', "use TRL's SFTTrainer"),
        ('{"text": [', "cannot be read: Expecting value"),
    ],
)
def test_the_first_record_that_cannot_be_used_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good", "other": None}) + "\n\n")
    assert read(path) == [b"good"]
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=f"a.jsonl .*{message}"):
        read(path)


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list([{"text": f"text {number}"} for number in range(3)])
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "saved"):
        assert read(tmp_path / name) == [b"text 0", b"text 1", b"text 2"], name
    (tmp_path / "b.parquet").write_text("none")
    with pytest.raises(ConfigError, match=r"b.parquet cannot be read"):
        read(tmp_path / "b.parquet")
