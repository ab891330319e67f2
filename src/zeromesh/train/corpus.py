"""The tokens of a run, the same on every rank: rank 0 reads and tokenises, a file on each host holds what it has read,
and the ranks of the host map that file into their memory."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.errors import ConfigError
from zeromesh.files import read_text
from zeromesh.launch.ranks import collective, from_first
from zeromesh.train.config import DataConfig, ModelConfig
from zeromesh.train.records import Document, Reader, Render, Source, find_sources
from zeromesh.train.sequences import Documents, Rows, Sequences
from zeromesh.train.text import Encoded, Tokenizer, digest, is_held_out, make_tokenizer

TOKENIZER = "digest of the tokenizer"
PARTS = ("training", "held-out")
KINDS = ("tokens", "learned", "starts")
SENT_BYTES = 64 << 20
"""Of the corpus at a time, on its way to the other hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training and held-out rows.

    Args:
        training, held_out: rows.
        vocab_size: of the tokenizer.
        num_documents: trained on.
        tokenizer: the text of its tokenizer.json; None for bytes.
        tokenizer_name: as the configuration names it.
        end: the token that ends a text.
        prompts: tokens of the texts that samples go on from.
        digest: of what is trained on.
    """

    training: Rows
    held_out: Rows
    vocab_size: int
    num_documents: int
    tokenizer: str | None
    tokenizer_name: str
    end: int | None
    prompts: Sequence[Sequence[int]]
    digest: str

    def identity(self) -> dict[str, Any]:
        """What tells it from another corpus, for a checkpoint."""
        return {
            TOKENIZER: digest((self.tokenizer or "bytes").encode()),
            "number of training tokens": self.training.tokens.numel(),
            "digest of the training tokens": self.digest,
        }


def load_corpus(config: DataConfig, model: ModelConfig | None = None, prompts: Sequence[str] = ()) -> Corpus:
    """Read, tokenise and share the corpus; collective over all ranks. Leaves no file behind.

    Args:
        config: what to read.
        model: whose tokenizer and chat template are the defaults.
        prompts: of samples.

    Raises:
        ConfigError: on every rank, where rank 0 cannot make the corpus.
    """
    with _host_directory() as (directory, writes):

        def read() -> dict[str, Any]:
            return _read(config, model, prompts, directory)

        facts = from_first(read, "waiting for rank 0 to read the corpus", at_work=True)
        with collective("sharing the corpus"):
            _share(directory, writes)
            dist.barrier()  # what is mapped from now on is whole
        corpus = _corpus(config, directory, facts)
        with collective("sharing the corpus"):
            dist.barrier()  # before the directory goes; its memory stays
    return corpus


def read_corpus(config: DataConfig, model: ModelConfig | None = None) -> Corpus:
    """Read and tokenise the corpus for this process alone.

    Raises:
        ConfigError: the corpus cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="zeromesh-tokens-") as directory:
        facts = _read(config, model, (), Path(directory))
        return _corpus(config, Path(directory), facts)


def _corpus(config: DataConfig, directory: Path, facts: dict[str, Any]) -> Corpus:
    apart = facts.pop("apart")
    training, held_out = (_rows(config, directory / part, apart=apart) for part in PARTS)
    for part, rows in zip(PARTS, (training, held_out), strict=True):
        if (part == "training" or config.holds_out) and not len(rows):
            raise ConfigError(_too_little(config, part, rows, apart=apart))
    return Corpus(training=training, held_out=held_out, **facts)


def _too_little(config: DataConfig, part: str, rows: Rows, *, apart: bool) -> str:
    if apart:
        return (
            f"the {part} documents must hold a token to learn within their first data.seq_len = {config.seq_len}; "
            f"none does"
        )
    return (
        f"the {part} files must hold at least data.seq_len + 1 = {config.seq_len + 1} tokens; got {rows.tokens.numel()}"
    )


def _rows(config: DataConfig, path: Path, *, apart: bool) -> Rows:
    tokens, marks, starts = (_mapped(path / kind, dtype) for kind, dtype in zip(KINDS, _DTYPES, strict=True))
    learned = marks if marks.numel() else None
    if apart:
        return Documents(tokens=tokens, seq_len=config.seq_len, starts=starts.numpy(), learned=learned)
    return Sequences(tokens=tokens, seq_len=config.seq_len, learned=learned)


_DTYPES = (torch.int32, torch.uint8, torch.int64)


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    count = path.stat().st_size // dtype.itemsize
    # torch maps no empty file.
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)


# ---- a file on each host


@contextmanager
def _host_directory() -> Iterator[tuple[Path, bool]]:
    """A directory that the ranks of this host share, and whether this rank writes there.

    Ranks share one where they have the same temporary directory (`TMPDIR`), by host, device and inode: processes on one
    machine may each have their own.
    """
    base = tempfile.gettempdir()
    status = os.stat(base)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), base, status.st_dev, status.st_ino))
    rank = dist.get_rank()
    leader = places.index(places[rank])
    made = tempfile.TemporaryDirectory(prefix="zeromesh-tokens-") if leader == rank else nullcontext("")
    with made as own:
        dist.all_gather_object(places, own)
        yield Path(places[leader]), leader == rank


def _share(directory: Path, writes: bool) -> None:
    """Rank 0's files, in the directory of every rank that writes."""
    writers = torch.tensor(int(writes))
    dist.all_reduce(writers)
    if writers == 1:
        return  # all ranks see what rank 0 has written
    first = dist.get_rank() == 0
    for path in (directory / part / kind for part in PARTS for kind in KINDS):
        left = torch.tensor(path.stat().st_size if first else 0)
        dist.broadcast(left, src=0)
        if writes:
            path.parent.mkdir(exist_ok=True)
        with path.open("rb" if first else "wb") if writes else nullcontext() as stream:
            for start in range(0, int(left), SENT_BYTES):
                some = torch.empty(min(SENT_BYTES, int(left) - start), dtype=torch.uint8)
                if stream and first:
                    stream.readinto(some.numpy())  # type: ignore[attr-defined]  # open says BinaryIO
                dist.broadcast(some, src=0)
                if stream and not first:
                    stream.write(some.numpy().data)


# ---- rank 0 reads


def _read(config: DataConfig, model: ModelConfig | None, prompts: Sequence[str], directory: Path) -> dict[str, Any]:
    """Writes the tokens of both parts, and says what else a `Corpus` is made of."""
    sources = find_sources(config.files, config.exclude)
    validation = find_sources(config.validation, config.exclude, key="data.validation")
    name = config.tokenizer or (str(model.pretrained) if model and model.pretrained else "bytes")

    def training(render: Render | None) -> Iterator[Document]:
        documents = Reader(render=render).documents(sources)
        return (document for document in documents if not is_held_out(document.name, _holdout(config)))

    tokenizer, render = make_tokenizer(name, training, _template(model))
    reader = Reader(render=render, answers_only=config.answers_only)
    parts = [_Part.made(directory / part) for part in PARTS]
    apart = _write(config, tokenizer, reader, sources, validation, parts)
    for part in parts:
        part.close()
    reader.require_usable()
    if not sum(part.documents for part in parts):
        raise ConfigError("data.files hold no document: all are empty")
    if not parts[0].documents or (config.holds_out and not parts[1].documents):
        raise ConfigError(
            f"data.holdout = {config.holdout} leaves {parts[0].documents} documents to train on and "
            f"{parts[1].documents} held out; both must be at least 1: name more files or change data.holdout"
        )
    return {
        "vocab_size": tokenizer.vocab_size,
        "num_documents": parts[0].documents,
        "tokenizer": tokenizer.definition,
        "tokenizer_name": name,
        "end": tokenizer.end,
        "prompts": [tokenizer.start(_asked(text, render), complete=render is not None) for text in prompts],
        "digest": parts[0].digest,
        "apart": apart if config.documents is None else config.documents == "apart",
    }


def _asked(text: str, render: Render | None) -> str:
    return text if render is None else render([{"role": "user", "content": text}], True)


def _holdout(config: DataConfig) -> float:
    return 0.0 if config.validation else config.holdout


def _template(model: ModelConfig | None) -> str:
    path = model and model.chat_template
    return read_text(path, kind="model.chat_template", error=ConfigError) if path else ""


def _write(
    config: DataConfig,
    tokenizer: Tokenizer,
    reader: Reader,
    sources: Iterable[Source],
    validation: Iterable[Source],
    parts: list[_Part],
) -> bool:
    """Writes all documents; whether any is a question with its answer."""
    apart = False
    places: list[int] = []

    def noted() -> Iterator[Document]:
        nonlocal apart
        fraction = _holdout(config)
        given = ((d, int(is_held_out(d.name, fraction))) for d in reader.documents(sources))
        for document, place in chain(given, ((d, 1) for d in reader.documents(validation))):
            apart = apart or document.apart
            places.append(place)
            yield document

    for encoded in tokenizer.encode(noted()):
        parts[places.pop(0)].append(encoded)
    return apart


@dataclass(slots=True, kw_only=True)
class _Part:
    """The files of one part, while they are written. `learned` stays empty while all is."""

    tokens: BinaryIO
    learned: BinaryIO
    starts: BinaryIO
    count: int = 0
    documents: int = 0
    marked: bool = False
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    @classmethod
    def made(cls, directory: Path) -> _Part:
        directory.mkdir()
        tokens, learned, starts = ((directory / kind).open("wb") for kind in KINDS)
        return cls(tokens=tokens, learned=learned, starts=starts)

    def append(self, encoded: Encoded) -> None:
        if encoded.learned is not None and not self.marked:
            self.marked = True
            self._mark_all(self.count)
        self.starts.write(np.int64(self.count).tobytes())
        self.tokens.write(encoded.tokens.data)
        self._digest.update(encoded.tokens.data)
        self.count += len(encoded.tokens)
        self.documents += 1
        if self.marked and encoded.learned is not None:
            self.learned.write(encoded.learned.data)
            self._digest.update(encoded.learned.data)
        elif self.marked:
            self._mark_all(len(encoded.tokens))

    def _mark_all(self, count: int) -> None:
        self.learned.write(np.ones(count, dtype=np.uint8).data)

    @property
    def digest(self) -> str:
        return str(self._digest.hexdigest())

    def close(self) -> None:
        self.starts.write(np.int64(self.count).tobytes())
        for stream in (self.tokens, self.learned, self.starts):
            stream.close()
