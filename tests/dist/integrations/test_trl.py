"""TRL's trainers with the mixin against themselves in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.integrations.hugging import (
    SAVED,
    Curve,
    arguments,
    assert_same_curve,
    build,
    curve,
    launched,
    plain,
    sharding,
)
from tests.dist.pool import Pool, on_ranks
from zeromesh.errors import ModelError
from zeromesh.integrations.methods import is_sharded

TOKENS = "abcdefghijklmnopqrst"

PREFERRED_CLIP = 0.05
"""Gradients of DPO are smaller."""


def tokenizer() -> Any:
    """A letter a token, after the three special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *TOKENS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def words(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return ["".join(TOKENS[i] for i in torch.randint(0, len(TOKENS), (6,), generator=generator)) for _ in range(count)]


@contextmanager
def quiet() -> Iterator[None]:
    """TRL and PEFT call functions that transformers and torch deprecate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@quiet()
def trained(
    method: str,
    directory: Path,
    kind: str,
    how: zm.Sharding | None = None,
    *,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """A trainer that has run, by "sft" or "dpo"; "adapted": the model has its adapter before the trainer does."""
    import datasets
    import peft
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    base, config = (trl.SFTTrainer, trl.SFTConfig) if method == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    trainer = base if how is None else type("Sharded", (TrainerMixin, base), {})
    more: dict[str, Any] = {} if how is None else {"sharding": how}
    if method == "sft":
        columns = {"prompt": words(24, 1), "completion": words(24, 2)}
        model, options = build(kind), options | {"dataset_num_proc": None}
    else:
        columns = {"prompt": words(24, 1), "chosen": words(24, 2), "rejected": words(24, 3)}
        model = build({"lora": "llama", "adapted": "lora"}.get(kind, kind))
        options |= {"max_grad_norm": PREFERRED_CLIP}
        if kind == "lora":  # made by the trainer, whose reference is the model without it
            more["peft_config"] = peft.LoraConfig(r=2, target_modules="all-linear")
        elif kind != "adapted":
            more["ref_model"] = copy.deepcopy(model)
    args = arguments(directory, kind=config, max_length=32, bf16=False, **options)
    torch.manual_seed(0)
    data = datasets.Dataset.from_dict(columns)
    made = trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **more)
    made.train(resume_from_checkpoint=resume)
    return made


@on_ranks(2)
def test_an_adapter_as_reference_is_refused_before_training(tmp_path):
    with launched(), pytest.raises(ModelError, match="has given the model a second adapter, 'ref'"):
        trained("dpo", tmp_path, "adapted", sharding("node=3", {"node": 2}))


@pytest.mark.parametrize(("method", "kind"), [("sft", "llama"), ("dpo", "llama"), ("dpo", "lora")])
def test_losses_are_those_of_plain_training(pool: Pool, method, kind, tmp_path):
    """Also where one is resumed under another strategy."""
    pool.run(2, compared, method, kind, tmp_path)


def compared(method: str, kind: str, directory: Path) -> None:
    expected: Curve = plain(lambda: curve(trained(method, directory / "plain", kind)))
    with launched():
        how = sharding("node=3", {"node": 2})
        trainer = trained(method, directory, kind, how, save_strategy="steps", save_steps=SAVED)
        assert_same_curve(curve(trainer), expected)
        assert is_sharded(trainer.model)
        if method == "dpo" and kind == "llama":
            assert is_sharded(trainer.ref_model)
        trainer.save_model()
    dist.barrier()
    names = {path.name for path in directory.iterdir()}
    assert ("adapter_model.safetensors" in names) == (kind == "lora") != ("model.safetensors" in names)
    if kind == "lora":
        with launched():
            how = sharding("node=1", {"node": 2})
            trainer = trained(method, directory, kind, how, resume=f"{directory}/checkpoint-{SAVED}")
        assert_same_curve(curve(trainer), expected)
