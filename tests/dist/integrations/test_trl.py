"""TRL's trainers with the mixin against themselves in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.integrations.hugging import (
    STRATEGIES,
    arguments,
    assert_same_curve,
    build,
    curve,
    launched,
    plain,
    sharding,
)
from tests.dist.pool import on_ranks
from zeromesh.errors import ModelError
from zeromesh.integrations.methods import is_sharded

TOKENS = "abcdefghijklmnopqrst"


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


def supervised(directory: Path, kind: str, how: zm.Sharding | None = None) -> Any:
    import datasets
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    class Sharded(TrainerMixin, trl.SFTTrainer):
        pass

    data = datasets.Dataset.from_dict({"prompt": words(48, 1), "completion": words(48, 2)})
    args = arguments(directory, kind=trl.SFTConfig, max_steps=8, max_length=32, bf16=False, dataset_num_proc=None)
    return trained(trl.SFTTrainer if how is None else Sharded, how, build(kind), args, data)


def preferred(directory: Path, kind: str, how: zm.Sharding | None = None) -> Any:
    import datasets
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    class Sharded(TrainerMixin, trl.DPOTrainer):
        pass

    columns = {"prompt": words(48, 1), "chosen": words(48, 2), "rejected": words(48, 3)}
    args = arguments(directory, kind=trl.DPOConfig, max_steps=8, max_length=32, bf16=False)
    more: dict[str, Any] = {"ref_model": build()}
    if kind == "lora":  # made by the trainer, whose reference is the model without it
        import peft

        more = {"peft_config": peft.LoraConfig(r=2, target_modules="all-linear")}
    data = datasets.Dataset.from_dict(columns)
    return trained(trl.DPOTrainer if how is None else Sharded, how, build(), args, data, **more)


def trained(trainer: Any, how: zm.Sharding | None, model: Any, args: Any, data: Any, **more: Any) -> Any:
    if how is not None:
        more["sharding"] = how
    torch.manual_seed(0)
    made = trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **more)
    made.train()
    return made


def quietly(run: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL and PEFT call what transformers and torch deprecate
        return run(*args)


@on_ranks(2, timeout_s=60)
def test_an_adapter_as_reference_is_refused_before_training(tmp_path):
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    def make() -> None:
        import datasets

        class Sharded(TrainerMixin, trl.DPOTrainer):
            pass

        columns = {"prompt": words(8, 1), "chosen": words(8, 2), "rejected": words(8, 3)}
        args = arguments(tmp_path, kind=trl.DPOConfig, max_steps=8, max_length=32, bf16=False)
        data = datasets.Dataset.from_dict(columns)
        how = sharding("node=3", {"node": 2})
        Sharded(model=build("lora"), args=args, train_dataset=data, processing_class=tokenizer(), sharding=how)

    with launched(), pytest.raises(ModelError, match="has given the model a second adapter, 'ref'"):
        quietly(make)


CASES = {
    "sft": (supervised, "llama"),
    "sft-lora": (supervised, "lora"),
    "dpo": (preferred, "llama"),
    "dpo-lora": (preferred, "lora"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
@on_ranks(4, timeout_s=190)
def test_losses_are_those_of_plain_training(case, tmp_path):
    run, kind = CASES[case]
    expected = plain(lambda: curve(quietly(run, tmp_path / "plain", kind)))
    with launched():
        trainer = quietly(run, tmp_path, kind, sharding(STRATEGIES[0]))
        assert_same_curve(curve(trainer), expected)
        assert is_sharded(trainer.model)
        if case == "dpo":
            assert is_sharded(trainer.ref_model)
        trainer.save_model()
    dist.barrier()
    names = {path.name for path in tmp_path.iterdir()}
    assert ("adapter_model.safetensors" in names) == (kind == "lora") != ("model.safetensors" in names)
