"""What a run leaves for others to read: samples on the way, and the model at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.launch.ranks import from_first
from zeromesh.train.config import SamplesConfig, TrainConfig
from zeromesh.train.corpus import Corpus
from zeromesh.train.text import END_OF_TEXT, ByteTokenizer, Tokenizer, TrainedTokenizer, load_pretrained_tokenizer

SAMPLES = "samples.jsonl"


def prepare(model: nn.Module, config: TrainConfig) -> None:
    """Gives a sharded model what samples and the export call, where the run has such.

    Raises:
        ConfigError: the model cannot do it.
    """
    if not config.samples.every and config.run.export is None:
        return
    from zeromesh.integrations.pretrained import adapt  # imports transformers

    adapt(model, None)
    for needed, method in ((config.samples.every, "generate"), (config.run.export, "save_pretrained")):
        if needed and not hasattr(model, method):
            raise ConfigError(f"samples and run.export are for Hugging Face models; {type(model).__name__} is none")


@torch.no_grad()
def write_samples(
    model: Any, corpus: Corpus, config: SamplesConfig, device: torch.device, *, step: int, path: Path, quiet: bool
) -> list[str]:
    """The most likely continuation of each prompt; all ranks write the same, and call this together.

    Args:
        step: steps done.
        path: of the file that rank 0 adds them to.
        quiet: this is another rank.

    Returns:
        A line for each prompt; none on other ranks.
    """
    training = model.training
    model.eval()
    pairs = [
        (prompt, _continued(model, corpus, start, config.tokens, device))
        for prompt, start in zip(config.prompts, corpus.prompts, strict=True)
    ]
    model.train(training)
    if quiet:
        return []
    decode = _tokenizer(corpus).decode
    texts = [(prompt, decode(tokens)) for prompt, tokens in pairs]
    with path.open("a", encoding="utf-8") as file:
        for prompt, text in texts:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
    return [
        f"step {step}: {prompt!r} {f'goes on {text!r}' if text else 'is followed by an end of text'}"
        for prompt, text in texts
    ]


def _continued(model: Any, corpus: Corpus, start: Sequence[int], count: int, device: torch.device) -> list[int]:
    inputs = torch.tensor([start], device=device)
    found: Tensor = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=corpus.end,
        pad_token_id=corpus.end or 0,
    )
    return found[0, len(start) :].tolist()


def _tokenizer(corpus: Corpus) -> Tokenizer:
    return ByteTokenizer() if corpus.tokenizer is None else TrainedTokenizer(corpus.tokenizer)


def export(model: Any, corpus: Corpus, config: TrainConfig, directory: Path, *, first: bool) -> None:
    """The model, or its adapters alone, as `from_pretrained` loads it, with its tokenizer; all ranks call it.

    Raises:
        CheckpointError, ConfigError: on all ranks, where one of them could not write.
    """
    model.save_pretrained(directory, is_main_process=first)
    from_first(lambda: _export_tokenizer(corpus, config, directory), "waiting for rank 0 to write the tokenizer")


def _export_tokenizer(corpus: Corpus, config: TrainConfig, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    if corpus.tokenizer is None:
        return  # bytes
    if Path(corpus.tokenizer_name).is_dir():
        tokenizer = load_pretrained_tokenizer(corpus.tokenizer_name)
    else:
        made = TrainedTokenizer(corpus.tokenizer)
        end = None if made.end is None else END_OF_TEXT
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.library, eos_token=end)
    if config.model.chat_template is not None:
        tokenizer.chat_template = config.model.chat_template.read_text()
    tokenizer.save_pretrained(str(directory))
