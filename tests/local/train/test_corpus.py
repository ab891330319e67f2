"""Tokens cut into sequences; what rank 0 cannot read is an error of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeromesh.errors import ConfigError
from zeromesh.train.config import DataConfig
from zeromesh.train.corpus import Sequences, load_corpus


def test_targets_are_inputs_shifted_by_one_and_nothing_is_lost() -> None:
    sequences = Sequences(tokens=torch.arange(14, dtype=torch.int32), seq_len=4)
    assert len(sequences) == 3
    inputs, targets = sequences.batch([2, 0])
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert inputs.dtype == torch.int64


def test_a_last_token_without_a_target_starts_no_sequence() -> None:
    assert [len(Sequences(tokens=torch.zeros(count), seq_len=4)) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


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
    assert len(trained.training.tokens) < len(corpus.training.tokens) / 2
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
