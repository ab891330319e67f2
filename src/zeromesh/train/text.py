"""Text files to token numbers: which files, which are held out, and how their text becomes numbers. Torch-free."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zeromesh.errors import ConfigError
from zeromesh.files import read_text
from zeromesh.train.config import DataConfig

END_OF_TEXT = "<|endoftext|>"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The files to train on and those held out, each in the order of their names."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]


def find_files(config: DataConfig) -> TextFiles:
    """The files that the globs match, divided into training and held-out ones.

    A file is held out by a hash of its name below the glob's fixed part, so the choice does not depend on the machine.

    Raises:
        ConfigError: a glob matches nothing, or one of the two parts is empty.
    """
    names: dict[Path, str] = {}
    for pattern in config.files:
        expanded = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        found = [Path(match) for match in glob.glob(expanded, recursive=True)]
        kept = [path for path in found if path.is_file() and not _excluded(path, config.exclude)]
        if not kept:
            raise ConfigError(f"data.files: {pattern!r} matches no file (looked for {expanded})")
        fixed = glob.escape(expanded).split("[")[0].rpartition("/")[0]
        names |= {path: str(path.relative_to(fixed or "/")) for path in kept}
    ordered = sorted(names, key=lambda path: (names[path], path))
    held_out = tuple(path for path in ordered if _fraction(names[path]) < config.holdout)
    training = tuple(path for path in ordered if path not in held_out)
    if not training or (config.holdout and not held_out):
        raise ConfigError(
            f"data.holdout = {config.holdout} leaves {len(training)} files to train on and {len(held_out)} held out of"
            f" {len(ordered)}; both must be at least 1: name more files or change data.holdout"
        )
    return TextFiles(training=training, held_out=held_out)


def _excluded(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(str(path), pattern) for pattern in patterns)


def _fraction(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64


def digest(data: bytes | memoryview) -> str:
    """A short name of these bytes, which no others have."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Tokenizer(Protocol):
    """Turns text into numbers below `vocab_size`."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> Tokens:
        """All texts one after another, an end-of-text token after each. Shape [tokens]."""
        ...


class ByteTokenizer:
    """Each byte is its own token; 256 ends a text."""

    vocab_size = 257

    def encode(self, texts: Sequence[bytes]) -> Tokens:
        end = np.array([256], dtype=np.int32)
        parts = [part for text in texts for part in (np.frombuffer(text, dtype=np.uint8).astype(np.int32), end)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


class TrainedTokenizer:
    """A tokenizer of the Hugging Face tokenizers library.

    Args:
        definition: the text of its tokenizer.json.
    """

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self.definition = definition
        self._tokenizer = HuggingFaceTokenizer.from_str(definition)
        self._end = self._tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> TrainedTokenizer:
        """A byte-level BPE tokenizer of `vocab_size` tokens learnt from `texts`."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = HuggingFaceTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
        return cls(tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[bytes]) -> Tokens:
        encodings = self._tokenizer.encode_batch_fast([text.decode(errors="replace") for text in texts])
        end = [] if self._end is None else [self._end]
        numbers = [number for encoding in encodings for number in (*encoding.ids, *end)]
        return np.array(numbers, dtype=np.int32)


def make_tokenizer(name: str, training_texts: Sequence[bytes]) -> ByteTokenizer | TrainedTokenizer:
    """The tokenizer that `data.tokenizer` names; "bpe:SIZE" is trained on the given texts.

    Raises:
        ConfigError: tokenizers is not installed, the file is not a tokenizer, or SIZE is below 257.
    """
    if name == "bytes":
        return ByteTokenizer()
    try:
        if not name.startswith("bpe:"):
            return TrainedTokenizer(read_text(name, kind="data.tokenizer (a tokenizer.json)", error=ConfigError))
        size = int(name.removeprefix("bpe:"))
        if size < ByteTokenizer.vocab_size:
            raise ConfigError(f"data.tokenizer: bpe needs at least 257 tokens, one for each byte; got {size}")
        return TrainedTokenizer.train(training_texts, size)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'data.tokenizer = "{name}" needs the tokenizers library: pip install "zeromesh[hf]"'
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise ConfigError(f"data.tokenizer: {name} is not a tokenizer.json: {error}") from error
