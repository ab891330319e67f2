"""Tokens as rows; what rank 0 cannot read is an error of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from zeromesh.errors import ConfigError
from zeromesh.train.config import DataConfig, ModelConfig
from zeromesh.train.corpus import load_corpus
from zeromesh.train.sequences import NOT_LEARNED, Documents, Sequences
from zeromesh.train.summary import packed


def test_targets_are_inputs_shifted_by_one_and_nothing_is_lost() -> None:
    sequences = Sequences(tokens=torch.arange(14, dtype=torch.int32), seq_len=4)
    assert len(sequences) == 3
    inputs, targets, positions = sequences.batch([2, 0])
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert positions is None and inputs.dtype == torch.int64
    assert sequences.targets([2, 0]) == 8


def test_a_last_token_without_a_target_starts_no_sequence() -> None:
    assert [len(Sequences(tokens=torch.zeros(count), seq_len=4)) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_documents_lie_side_by_side_and_each_begins_anew() -> None:
    """Four: one is cut off, two share a row, and one has nothing to learn."""
    tokens, starts = torch.arange(20, dtype=torch.int32), np.array([0, 8, 11, 14, 20])
    learned = torch.tensor([0, 1] * 4 + [0, 0, 1] + [1, 0, 0] + [0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    documents = Documents(tokens=tokens, seq_len=5, starts=starts, learned=learned)
    assert packed(documents) == (
        "in 3 rows of 5 tokens; cut off: 1; left out, since a row would hold nothing to learn of them: 1"
    )
    inputs, targets, positions = documents.batch([0, 1, 2])
    n = NOT_LEARNED
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [14, 15, 16, 17, 18], [8, 9, 0, 0, 0]]
    assert targets.tolist() == [[1, n, 3, n, 5], [n, 16, 17, n, 19], [n, 10, n, n, n]]
    assert positions is not None and positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    for rows in ([0], [1], [2], [2, 0]):
        assert documents.targets(rows) == int((documents.batch(rows).targets != n).sum())

    stream = Sequences(tokens=tokens, seq_len=5, learned=learned)
    assert stream.batch([1]).targets.tolist() == [[n, 7, n, n, 10]] and stream.targets([1, 0]) == 5


@pytest.mark.usefixtures("alone")
def test_records_are_held_out_by_themselves_or_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "completion": f" {number}!"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[0]) + "\n")
    config = DataConfig(files=(f"{tmp_path}/a.jsonl",), seq_len=16, holdout=0.2)
    corpus = load_corpus(config)
    assert isinstance(corpus.training, Documents) and isinstance(corpus.held_out, Documents)
    assert 20 < corpus.num_documents < 40
    assert len(corpus.training.starts) + len(corpus.held_out.starts) == 42
    named = load_corpus(config.model_copy(update={"validation": (f"{tmp_path}/b.jsonl",)}))
    assert named.num_documents == 40 and named.held_out.targets([0]) == len(" 0!") + 1
    assert named.digest != load_corpus(config.model_copy(update={"answers_only": False})).digest
    joined = load_corpus(config.model_copy(update={"documents": "joined"})).training
    assert isinstance(joined, Sequences) and 0 < joined.targets(range(len(joined))) < len(joined) * 16
    with pytest.raises(ConfigError, match=r"a token to learn within their first data.seq_len = 1; none does"):
        load_corpus(config.model_copy(update={"seq_len": 1}))
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ConfigError, match=r"1 of 1 records cannot be used; .*\n.*a.jsonl:1: text must be a text"):
        load_corpus(config)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"data.files hold no document: all are empty"):
        load_corpus(config)


@pytest.mark.usefixtures("alone")
def test_messages_take_the_template_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    config = DataConfig(files=(f"{tmp_path}/a.jsonl",), seq_len=16, holdout=0)
    corpus = load_corpus(config, ModelConfig(config={}, chat_template=tmp_path / "chat.jinja"), ["c"])
    assert bytes(corpus.training.tokens.tolist()) == b"[u]a[a]b"
    assert corpus.training.targets([0]) == 1
    assert bytes(corpus.prompts[0]) == b"[u]c[a]"
    # A tokenizer that is trained reads messages as the template writes them, but for special tokens.
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}Question {{ m.content }}{{ eos_token }}{% endfor %}")
    trained = config.model_copy(update={"tokenizer": "bpe:264", "answers_only": False})
    corpus = load_corpus(trained, ModelConfig(config={}, chat_template=tmp_path / "chat.jinja"))
    assert corpus.vocab_size == 264 and corpus.training.tokens.numel() == len("Q a#Q b#")
    assert corpus.training.tokens.tolist().count(corpus.end) == 2


@pytest.mark.usefixtures("alone")
def test_corpus_holds_all_text_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number} says hello\n" * 4)
    config = DataConfig(files=(f"{tmp_path}/*.txt",), seq_len=16, tokenizer="bytes", holdout=0.2)
    corpus = load_corpus(config)
    read = torch.cat([corpus.training.tokens, corpus.held_out.tokens])
    size = sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    assert len(read) == size + 40  # an end-of-text token a file
    assert corpus.vocab_size == 257
    assert corpus.tokenizer is None
    # The other ranks wait for it as they do while the model is drawn, which may take longer than a collective.
    store = dist.distributed_c10d._get_default_store()
    assert store.check(["zeromesh/first/waiting for rank 0 to read the corpus"])

    trained = load_corpus(config.model_copy(update={"tokenizer": "bpe:300"}))
    assert trained.training.tokens.numel() < corpus.training.tokens.numel() / 2
    assert trained.tokenizer is not None and json.loads(trained.tokenizer)["model"]["type"] == "BPE"


@pytest.mark.usefixtures("alone")
def test_missing_or_short_text_is_an_error(tmp_path: Path) -> None:
    config = DataConfig(files=(f"{tmp_path}/*.txt",), seq_len=64, holdout=0)
    with pytest.raises(ConfigError, match="matches no file"):
        load_corpus(config)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(
        ConfigError, match=r"the training files must hold at least data.seq_len \+ 1 = 65 tokens; got 6"
    ):
        load_corpus(config)
