"""Tokens as rows; a file that rank 0 cannot read is an error of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeromesh.errors import ConfigError
from zeromesh.train.config import TrainConfig
from zeromesh.train.corpus import Corpus, Rows, load_corpus

pytestmark = pytest.mark.usefixtures("alone")


def load(place: Path, **data: Any) -> Corpus:
    tables: dict[str, Any] = {
        "strategy": "node=3",
        "mesh": {"node": 1},
        "run": {"directory": place, "steps": 1},
        "model": {"config": {}},
        "data": data,
        "batch": {"global_sequences": 1, "micro": 1},
        "optimizer": {"lr": 1},
    }
    before = sorted(place.iterdir())
    corpus = load_corpus(TrainConfig.model_validate(tables), place)
    assert sorted(place.iterdir()) == before, "no file is left"
    return corpus


def test_targets_are_inputs_shifted_by_one_and_nothing_is_lost() -> None:
    rows = Rows(tokens=torch.arange(14, dtype=torch.int32), seq_len=4)
    assert len(rows) == 3
    inputs, targets = rows.batch([2, 0])
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]] and inputs.dtype == torch.int64
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]


def test_a_last_token_without_a_target_starts_no_sequence() -> None:
    assert [len(Rows(tokens=torch.zeros(count), seq_len=4)) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_records_are_held_out_by_themselves_or_named(tmp_path: Path) -> None:
    rows = [{"text": f"record {number} of forty"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[0]) + "\n")
    config = dict(files=[f"{tmp_path}/a.jsonl"], seq_len=16, holdout=0.2)
    corpus = load(tmp_path, **config)
    assert 20 < corpus.num_documents < 40
    named = load(tmp_path, **config, validation=[f"{tmp_path}/b.jsonl"])
    assert named.num_documents == 40 and named.held_out.tokens.numel() == len("record 0 of forty") + 1
    assert named.identity() != corpus.identity()
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"leaves 0 documents to train on and 0 held out"):
        load(tmp_path, **config)


def test_corpus_holds_all_text_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number} says hello\n" * 4)
    config = dict(files=[f"{tmp_path}/*.txt"], seq_len=16, tokenizer="bytes", holdout=0.2)
    corpus = load(tmp_path, **config)
    read = torch.cat([corpus.training.tokens, corpus.held_out.tokens])
    size = sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    assert len(read) == size + 40  # an end-of-text token a file
    assert corpus.tokenizer.vocab_size == 257 and corpus.tokenizer.definition is None
    # The other ranks wait for it as they do while the model is drawn, which may take longer than a collective.
    store = dist.distributed_c10d._get_default_store()
    assert store.check(["zeromesh/first/waiting for rank 0 to read the corpus"])

    trained = load(tmp_path, **config | {"tokenizer": "bpe:300"})
    assert trained.training.tokens.numel() < corpus.training.tokens.numel() / 2
    assert json.loads(trained.tokenizer.definition or "")["model"]["type"] == "BPE"
