"""Documents to token numbers, and which are held out. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zeromesh.errors import ConfigError
from zeromesh.files import read_text
from zeromesh.train.records import Document, Render, Spans

END_OF_TEXT = "<|endoftext|>"
AT_ONCE = 256
"""Documents that are tokenised together: by all cores, and not all of the corpus in memory."""

Tokens = npt.NDArray[np.int32]
Marks = npt.NDArray[np.bool_]


def is_held_out(name: str, fraction: float) -> bool:
    """By a hash of the document's name, so that the choice does not depend on the machine."""
    share = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64
    return share < fraction


def digest(data: bytes | memoryview) -> str:
    """A short name of these bytes, which no others have."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document's tokens.

    Args:
        tokens: shape [tokens].
        learned: which of them are learned, of the same shape; None for all.
    """

    tokens: Tokens
    learned: Marks | None = None


class Tokenizer(Protocol):
    """Turns text into numbers below `vocab_size`, and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def definition(self) -> str | None:
        """The text of its tokenizer.json, if it has one."""
        ...

    @property
    def end(self) -> int | None:
        """What ends a text."""
        ...

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Each document with a token at its end, unless it is complete."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...

    def start(self, text: str, *, complete: bool = False) -> list[int]:
        """The tokens of a text that is to be gone on with; `complete` as a document is."""
        ...


class ByteTokenizer:
    """Each byte is its own token; 256 ends a text."""

    vocab_size = 257
    definition = None
    end = 256

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        for document in documents:
            text = document.text if isinstance(document.text, bytes) else document.text.encode()
            end = [] if document.complete else [self.end]
            tokens = np.concatenate([np.frombuffer(text, dtype=np.uint8).astype(np.int32), np.array(end, np.int32)])
            yield Encoded(tokens=tokens, learned=self._learned(document, len(tokens)))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.end).decode(errors="replace")

    def start(self, text: str, *, complete: bool = False) -> list[int]:
        return list(text.encode())

    def _learned(self, document: Document, count: int) -> Marks | None:
        if document.learned is None:
            return None
        assert isinstance(document.text, str)  # bytes have no ranges
        learned = np.zeros(count, dtype=np.bool_)
        for first, last in document.learned:
            learned[len(document.text[:first].encode()) : len(document.text[:last].encode())] = True
        return _with_end(learned, document)


class TrainedTokenizer:
    """A tokenizer of the Hugging Face tokenizers library.

    Args:
        definition: the text of its tokenizer.json.
        end: the token that ends a text; one that the tokenizer does not have ends none.
    """

    def __init__(self, definition: str, *, end: str = END_OF_TEXT) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self.definition = definition
        self.library = HuggingFaceTokenizer.from_str(definition)
        self.library.no_padding()
        self.library.no_truncation()
        self.end: int | None = self.library.token_to_id(end)

    @classmethod
    def train(cls, documents: Iterable[Document], vocab_size: int) -> TrainedTokenizer:
        """A byte-level BPE tokenizer of `vocab_size` tokens learnt from `documents`."""
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
        tokenizer.train_from_iterator((_decoded(document) for document in documents), trainer)
        return cls(tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        return int(self.library.get_vocab_size())

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        for some in _together(documents):
            yield from self._encode(some)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library.decode(list(tokens), skip_special_tokens=True))

    def start(self, text: str, *, complete: bool = False) -> list[int]:
        tokens = list(self.library.encode(text, add_special_tokens=not complete).ids)
        return tokens[:-1] if tokens and tokens[-1] == self.end else tokens

    def _encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        complete = documents[0].complete
        ranges = any(document.learned is not None for document in documents)
        encode = self.library.encode_batch if ranges else self.library.encode_batch_fast  # without offsets
        texts = [_decoded(document) for document in documents]
        for document, found in zip(documents, encode(texts, add_special_tokens=not complete), strict=True):
            ended = complete or self.end is None or (bool(found.ids) and found.ids[-1] == self.end)
            tokens = np.array([*found.ids, *([] if ended else [self.end])], dtype=np.int32)
            learned = None
            if document.learned is not None:
                learned = _with_end(_inside(found.offsets, document.learned, len(tokens)), document)
            yield Encoded(tokens=tokens, learned=learned)


def _together(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """At most `AT_ONCE` neighbours that are alike."""
    some: list[Document] = []
    for document in documents:
        if some and (len(some) == AT_ONCE or document.complete != some[0].complete):
            yield some
            some = []
        some.append(document)
    if some:
        yield some


def _decoded(document: Document) -> str:
    return document.text if isinstance(document.text, str) else document.text.decode(errors="replace")


def _inside(offsets: Sequence[tuple[int, int]], spans: Spans, count: int) -> Marks:
    """Which tokens have characters of a range. One that begins before it is learned too: it is how the model would have
    to write the first of them."""
    learned = np.zeros(count, dtype=np.bool_)
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    for first, last in spans:
        learned[: len(begins)] |= (begins < last) & (ends > first) & (ends > begins)
    return learned


def _with_end(learned: Marks, document: Document) -> Marks:
    """That a text ends is learned where its last characters are."""
    if not document.complete and document.learned and document.learned[-1][1] == len(document.text):
        learned[-1] = True
    return learned


def make_tokenizer(
    name: str, training: Callable[[Render | None], Iterable[Document]], template: str = ""
) -> tuple[Tokenizer, Render | None]:
    """The tokenizer that `data.tokenizer` names, and what writes messages as text, where there is a chat template.

    Args:
        name: "bytes"; "bpe:SIZE", trained on the documents; a tokenizer.json; a Hugging Face tokenizer's directory.
        training: the documents with messages written so; called where it is trained.
        template: of messages, in Jinja; "" takes the tokenizer's own.

    Raises:
        ConfigError: tokenizers is not installed, the file is not a tokenizer, or SIZE is below 257.
    """
    if name == "bytes":
        return ByteTokenizer(), _renderer(template)
    try:
        if name.startswith("bpe:"):
            size = int(name.removeprefix("bpe:"))
            if size < ByteTokenizer.vocab_size:
                raise ConfigError(f"data.tokenizer: bpe needs at least 257 tokens, one for each byte; got {size}")
            # Without special tokens, of which it is to make no words.
            made = TrainedTokenizer.train(training(_renderer(template)), size)
        elif name.endswith(".json"):
            made = TrainedTokenizer(read_text(name, kind="data.tokenizer (a tokenizer.json)", error=ConfigError))
        else:
            return _pretrained(name, template)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'data.tokenizer = "{name}" needs the tokenizers library: pip install "zeromesh[hf]"'
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise ConfigError(f"data.tokenizer: {name} is not a tokenizer.json: {error}") from error
    return made, _renderer(template, {} if made.end is None else {"eos_token": END_OF_TEXT})


def _renderer(template: str, special: Mapping[str, Any] = MappingProxyType({})) -> Render | None:
    return partial(_render, template, dict(special)) if template else None


def _pretrained(name: str, template: str) -> tuple[TrainedTokenizer, Render | None]:
    found = load_pretrained_tokenizer(name)
    made = TrainedTokenizer(found.backend_tokenizer.to_str(), end=found.eos_token or END_OF_TEXT)
    return made, _renderer(template or found.chat_template or "", found.special_tokens_map)


def load_pretrained_tokenizer(directory: str | Path) -> Any:
    """transformers' own of a directory; no code in it is run.

    Raises:
        ConfigError: there is no directory, or its tokenizer is none of the tokenizers library's.
    """
    if not Path(directory).is_dir():
        raise ConfigError(f"data.tokenizer: {directory} is no directory with a Hugging Face tokenizer")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of transformers, tokenizers and what they read with
        there = "its tokenizer.json" if (Path(directory) / "tokenizer.json").exists() else "no tokenizer.json"
        raise ConfigError(
            f"data.tokenizer: {directory} must hold a tokenizer that transformers can read; it has {there}: copy the "
            f"model's own there, or set data.tokenizer to another directory. {' '.join(str(error).split())}"
        ) from error
    if not found.is_fast:
        raise ConfigError(
            f"data.tokenizer: {directory} has a tokenizer of Python's, not of the tokenizers library: save it with its "
            f"tokenizer.json"
        )
    return found


def _render(template: str, special: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=template,
        add_generation_prompt=answering,
        **special,
    )
    return str(rendered[0])
