"""The texts of a run and their tokens. Torch-free.

A file is one text. JSON lines, Parquet files and directories of `datasets` hold records ``{"text": "..."}`` instead.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeromesh.errors import ConfigError
from zeromesh.files.users import read_text

END_OF_TEXT = "<|endoftext|>"
_AT_ONCE = 256  # texts tokenised together: enough for all cores, without a whole corpus in memory

Files = Sequence[tuple[str, Path]]


def find_files(patterns: Iterable[str], exclude: Sequence[str] = (), *, key: str = "data.files") -> Files:
    """Returns the files that the globs match, sorted by name; a name is the path below the glob's fixed part. Raises
    ConfigError if a glob matches nothing."""
    names: dict[Path, str] = {}
    for pattern in patterns:
        expanded = pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
        found = [Path(match) for match in glob.glob(expanded, recursive=True)]
        kept = [path for path in found if path.is_file() or (path / "state.json").is_file()]  # of `datasets`
        kept = [path for path in kept if not any(fnmatch(str(path), one) for one in exclude)]
        if not kept:
            raise ConfigError(f"{key}: {pattern!r} matches no file (looked for {expanded})")
        fixed = glob.escape(expanded).split("[")[0].rpartition("/")[0]
        names |= {path: str(path.relative_to(fixed or "/")) for path in kept}
    return sorted((name, path) for path, name in names.items())


def read_texts(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yields each text with its name, which does not depend on the location of files. Files need not be UTF-8. Raises
    ConfigError if a file cannot be read or a record has no text; the message names the first."""
    for name, path in files:
        try:
            if path.is_file() and path.suffix not in (".jsonl", ".parquet"):
                yield name, path.read_bytes()
                continue
            for number, row in enumerate(_rows(path)):
                text = row.get("text") if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise ValueError(
                        f'record {number + 1} must be {{"text": "..."}}, got {str(row)[:60]}; for answers to prompts '
                        f"and messages use TRL's SFTTrainer (docs/integrations.md)"
                    )
                yield f"{name}:{number}", text.encode()
        except ModuleNotFoundError as error:
            raise ConfigError(f'data.files: {path} needs the datasets library: pip install "zeromesh[data]"') from error
        except (OSError, ValueError, RecursionError) as error:  # json raises the last two
            raise ConfigError(f"data.files: {path} cannot be read: {error}") from error


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
        return
    import datasets

    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise ValueError(f"{error}") from error
    yield from found


def read_tokens(
    files: Files, validation: Files, holdout: float, tokenizer: Tokenizer
) -> tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]]]:
    """Returns the tokens of each text for training, and of each text that is held out. Held out are a fraction
    `holdout` of the texts in `files`, and all texts in `validation`."""
    texts = chain(
        ((is_held_out(name, holdout), text) for name, text in read_texts(files)),
        ((True, text) for _, text in read_texts(validation)),
    )
    found: tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]]] = [], []
    while some := list(islice(texts, _AT_ONCE)):
        for (held_out, _), tokens in zip(some, tokenizer.encode([text for _, text in some]), strict=True):
            found[held_out].append(tokens)
    return found


def is_held_out(name: str, fraction: float) -> bool:
    """Decides by a hash of the text's name, so that the choice is the same on every machine."""
    share = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64
    return share < fraction


class Tokenizer:
    """Turns texts into numbers below `vocab_size`, and back.

    Args:
        definition: the text of a tokenizer.json. None: each byte is a token, and 256 ends a text.
        end: the token that ends a text, if the tokenizer has it.
    """

    def __init__(self, definition: str | None = None, *, end: str = END_OF_TEXT) -> None:
        self.definition = definition
        self.vocab_size = 257
        self.end: int | None = 256
        if definition is not None:
            from tokenizers import Tokenizer as Library

            self.library = Library.from_str(definition)
            self.library.no_padding()
            self.library.no_truncation()
            self.vocab_size = int(self.library.get_vocab_size())
            self.end = self.library.token_to_id(end)

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Returns the tokens of each text, with an end token after them."""
        if self.definition is None:
            return [np.append(np.frombuffer(text, np.uint8), np.int32(256)).astype(np.int32) for text in texts]
        found = self.library.encode_batch_fast([text.decode(errors="replace") for text in texts])
        # Some tokenizers end a text themselves.
        ends = [[] if self.end is None or one.ids[-1:] == [self.end] else [self.end] for one in found]
        return [np.array(one.ids + end, dtype=np.int32) for one, end in zip(found, ends, strict=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        if self.definition is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        return str(self.library.decode(list(tokens), skip_special_tokens=True))

    def save_pretrained(self, name: str, directory: Path) -> None:
        """Saves the tokenizer for transformers. `name` is the argument of `make_tokenizer`; if it is a directory, its
        tokenizer is saved again."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if Path(name).is_dir():
            AutoTokenizer.from_pretrained(name, local_files_only=True).save_pretrained(str(directory))
        elif self.definition is not None:  # transformers has no byte tokenizer like ours
            end = None if self.end is None else END_OF_TEXT
            PreTrainedTokenizerFast(tokenizer_object=self.library, eos_token=end).save_pretrained(str(directory))


def make_tokenizer(name: str, training: Iterable[bytes] = ()) -> Tokenizer:
    """Makes the tokenizer that `data.tokenizer` names.

    Args:
        name: "bytes"; "bpe:SIZE", trained on texts; a tokenizer.json; a directory with a Hugging Face tokenizer.
        training: texts; read only to train a tokenizer.

    Raises:
        ConfigError: a library is not installed, there is no such tokenizer, or SIZE is below 257.
    """
    try:
        if name == "bytes":
            return Tokenizer()
        if name.endswith(".json"):
            return Tokenizer(read_text(name, kind="data.tokenizer (a tokenizer.json)", error=ConfigError))
        if name.startswith("bpe:"):
            return _trained(training, int(name.removeprefix("bpe:")))
        if not Path(name).is_dir():
            raise ConfigError(f"data.tokenizer: {name} is no directory with a Hugging Face tokenizer")
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        return Tokenizer(found.backend_tokenizer.to_str(), end=found.eos_token or END_OF_TEXT)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'data.tokenizer = "{name}" needs the {error.name} library: pip install "zeromesh[hf]"'
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise many kinds, also for a tokenizer that is written in Python
        why = " ".join(str(error).split())
        raise ConfigError(f"data.tokenizer: {name} is not a tokenizer.json, nor a directory with one: {why}") from error


def _trained(texts: Iterable[bytes], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on texts."""
    if vocab_size < 257:
        raise ConfigError(f"data.tokenizer: bpe needs at least 257 tokens, one for each byte; got {vocab_size}")
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    decoded = (text.decode(errors="replace") for text in texts)
    made.train_from_iterator(decoded, vocab_size, min_frequency=0, special_tokens=[END_OF_TEXT], show_progress=False)
    return Tokenizer(made.to_str())
