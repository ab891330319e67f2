"""The tokens of a run, the same on every rank: rank 0 reads and tokenises, the others receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.errors import ConfigError
from zeromesh.launch.ranks import collective, from_first
from zeromesh.train.config import DataConfig
from zeromesh.train.text import TrainedTokenizer, digest, find_files, make_tokenizer

TOKENIZER = "digest of the tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A stream of tokens cut into sequences: the last target of one is the first input of the next.

    Args:
        tokens: int32, shape [tokens].
        seq_len: inputs a sequence.
    """

    tokens: Tensor
    seq_len: int

    def __len__(self) -> int:
        return max(0, (self.tokens.numel() - 1) // self.seq_len)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some sequences, int64, each of shape [len(indices), seq_len]."""
        starts = torch.tensor(indices).unsqueeze(1) * self.seq_len
        rows = self.tokens[starts + torch.arange(self.seq_len + 1)].long()
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training and held-out sequences.

    Args:
        training, held_out: tokens.
        vocab_size: of the tokenizer.
        num_files: trained on.
        tokenizer: the text of its tokenizer.json; None for bytes.
        digest: of the training tokens.
    """

    training: Sequences
    held_out: Sequences
    vocab_size: int
    num_files: int
    tokenizer: str | None
    digest: str

    def identity(self) -> dict[str, Any]:
        """What tells it from another corpus, for a checkpoint."""
        return {
            TOKENIZER: digest((self.tokenizer or "bytes").encode()),
            "number of training tokens": self.training.tokens.numel(),
            "digest of the training tokens": self.digest,
        }


def load_corpus(config: DataConfig) -> Corpus:
    """Read, tokenise and share the corpus; collective over all ranks. Writes nothing.

    Raises:
        ConfigError: on every rank, where rank 0 cannot make the corpus.
    """
    tokens: list[Tensor] = []

    def read() -> tuple[list[int], dict[str, Any]]:
        tokens[:], facts = _read(config)
        return [stream.numel() for stream in tokens], facts

    lengths, facts = from_first(read, "waiting for rank 0 to read the corpus", at_work=True)
    if dist.get_rank() != 0:
        tokens = [torch.empty(length, dtype=torch.int32) for length in lengths]
    for stream in tokens:
        if stream.numel():
            with collective("sharing the corpus"):
                dist.broadcast(stream, src=0)
    return _corpus(config, tokens, facts)


def read_corpus(config: DataConfig) -> Corpus:
    """Read and tokenise the corpus for this process alone.

    Raises:
        ConfigError: the corpus cannot be made.
    """
    return _corpus(config, *_read(config))


def _corpus(config: DataConfig, tokens: Sequence[Tensor], facts: dict[str, Any]) -> Corpus:
    training, held_out = (Sequences(tokens=stream, seq_len=config.seq_len) for stream in tokens)
    return Corpus(training=training, held_out=held_out, **facts)


def _read(config: DataConfig) -> tuple[list[Tensor], dict[str, Any]]:
    """Training and held-out tokens, and what else a `Corpus` is made of."""
    files = find_files(config)
    texts = [path.read_bytes() for path in files.training]
    tokenizer = make_tokenizer(config.tokenizer, texts)
    definition = tokenizer.definition if isinstance(tokenizer, TrainedTokenizer) else None
    held_out_texts = [path.read_bytes() for path in files.held_out]
    tokens = [torch.from_numpy(tokenizer.encode(part)) for part in (texts, held_out_texts)]
    for key, stream in zip(("training", "held-out"), tokens, strict=True):
        wanted = key == "training" or config.holdout > 0
        if wanted and stream.numel() <= config.seq_len:
            raise ConfigError(
                f"the {key} files must hold at least data.seq_len + 1 = {config.seq_len + 1} tokens;"
                f" got {stream.numel()}"
            )
    return tokens, {
        "vocab_size": tokenizer.vocab_size,
        "num_files": len(files.training),
        "tokenizer": definition,
        "digest": digest(tokens[0].numpy().data),
    }
