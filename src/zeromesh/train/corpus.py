"""The tokens of a run, the same on every rank: rank 0 reads and tokenises, and all ranks map its file of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeromesh.errors import ConfigError
from zeromesh.integrations.texts import Tokenizer, find_files, is_held_out, make_tokenizer, read_texts, read_tokens
from zeromesh.launch.ranks import from_first, on_every
from zeromesh.train.config import TrainConfig

TOKENIZER = "digest of the tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A stream of int32 tokens cut into sequences: the last target of one is the first input of the next."""

    tokens: Tensor
    seq_len: int

    def __len__(self) -> int:
        return max(0, (self.tokens.numel() - 1) // self.seq_len)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, each of shape [len(indices), seq_len]."""
        places = torch.tensor(indices).unsqueeze(1) * self.seq_len + torch.arange(self.seq_len + 1)
        rows = self.tokens[places].long()
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens of a run: `num_documents` texts to train on, then those that are held out."""

    training: Rows
    held_out: Rows
    num_documents: int
    tokenizer: Tokenizer

    def identity(self) -> dict[str, Any]:
        tokens, definition = self.training.tokens, self.tokenizer.definition or "bytes"
        return {  # stored in checkpoints
            TOKENIZER: hashlib.blake2b(definition.encode(), digest_size=16).hexdigest(),
            "number of training tokens": tokens.numel(),
            "digest of the training tokens": hashlib.blake2b(tokens.numpy().data, digest_size=16).hexdigest(),
        }


def load_corpus(config: TrainConfig, place: Path) -> Corpus:
    """Reads the corpus on rank 0, for all ranks, by way of a temporary file in `place`; collective. Raises ConfigError
    on every rank if rank 0 cannot make the corpus, or another rank cannot see the file."""
    with ExitStack() as stack:

        def read() -> tuple[str, list[Any]]:
            tokens, *facts = _read(config)
            directory = stack.enter_context(TemporaryDirectory(prefix=".zeromesh-tokens-", dir=place))
            tokens.tofile(f"{directory}/tokens")
            return directory, facts

        def mapped() -> Any:
            try:
                return np.memmap(f"{directory}/tokens", np.int32, "c")  # stays when the file goes
            except OSError as error:
                raise ConfigError(f"all ranks must see {place}, where run.directory lies: {error}") from error

        directory, facts = from_first(read, "waiting for rank 0 to read the corpus", at_work=True)
        return _corpus(config, on_every(mapped, "mapping the corpus"), *facts)


def read_corpus(config: TrainConfig) -> Corpus:
    """Reads and tokenises the corpus in this process; raises ConfigError if it cannot be made."""
    return _corpus(config, *_read(config))


def _read(config: TrainConfig) -> tuple[Any, int, int, Tokenizer]:
    """All tokens, how many of them are trained on, in how many documents, and the tokenizer."""
    data = config.data
    holdout = 0.0 if data.validation else data.holdout
    files = find_files(data.files, data.exclude)
    validation = find_files(data.validation, data.exclude, key="data.validation")
    training = (text for name, text in read_texts(files) if not is_held_out(name, holdout))
    tokenizer = make_tokenizer(config.tokenizer, training)
    trained, held_out = read_tokens(files, validation, holdout, tokenizer)
    if not trained or (data.holds_out and not held_out):
        raise ConfigError(
            f"data.holdout = {data.holdout} leaves {len(trained)} documents to train on and {len(held_out)} held "
            f"out; both must be at least 1: name more files or change data.holdout"
        )
    counts = [sum(map(len, documents)) for documents in (trained, held_out)]
    for part, count in zip(("training", "held-out"), counts, strict=True):
        if count <= data.seq_len and (part == "training" or data.holds_out):
            raise ConfigError(
                f"the {part} files must hold at least data.seq_len + 1 = {data.seq_len + 1} tokens; got {count}"
            )
    return np.concatenate([*trained, *held_out]), counts[0], len(trained), tokenizer


def _corpus(config: TrainConfig, tokens: Any, split: int, num_documents: int, tokenizer: Tokenizer) -> Corpus:
    parts = [Rows(tokens=part, seq_len=config.data.seq_len) for part in torch.from_numpy(tokens).tensor_split([split])]
    return Corpus(training=parts[0], held_out=parts[1], num_documents=num_documents, tokenizer=tokenizer)
