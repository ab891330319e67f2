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
    STRATEGIES,
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
    """TRL and PEFT call what transformers and torch deprecate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@quiet()
def supervised(
    directory: Path, kind: str, how: zm.Sharding | None = None, *, resume: str | None = None, **options: Any
) -> Any:
    import datasets
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    class Sharded(TrainerMixin, trl.SFTTrainer):
        pass

    data = datasets.Dataset.from_dict({"prompt": words(48, 1), "completion": words(48, 2)})
    args = arguments(directory, kind=trl.SFTConfig, max_length=32, bf16=False, dataset_num_proc=None, **options)
    return trained(trl.SFTTrainer if how is None else Sharded, how, build(kind), args, data, resume)


@quiet()
def preferred(
    directory: Path, kind: str, how: zm.Sharding | None = None, *, resume: str | None = None, **options: Any
) -> Any:
    import datasets
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    class Sharded(TrainerMixin, trl.DPOTrainer):
        pass

    columns = {"prompt": words(48, 1), "chosen": words(48, 2), "rejected": words(48, 3)}
    options |= {"max_length": 32, "bf16": False, "max_grad_norm": PREFERRED_CLIP}
    args = arguments(directory, kind=trl.DPOConfig, **options)
    model = build("llama" if kind == "lora" else kind)
    more: dict[str, Any] = {"ref_model": copy.deepcopy(model)}
    if kind == "lora":  # made by the trainer, whose reference is the model without it
        import peft

        more = {"peft_config": peft.LoraConfig(r=2, target_modules="all-linear")}
    data = datasets.Dataset.from_dict(columns)
    return trained(trl.DPOTrainer if how is None else Sharded, how, model, args, data, resume, **more)


def trained(
    kind: Any, how: zm.Sharding | None, model: Any, args: Any, data: Any, resume: str | None = None, **more: Any
) -> Any:
    """A trainer that has run."""
    if how is not None:
        more["sharding"] = how
    torch.manual_seed(0)
    made = kind(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **more)
    made.train(resume_from_checkpoint=resume)
    return made


@on_ranks(2)
def test_an_adapter_as_reference_is_refused_before_training(tmp_path):
    import trl

    from zeromesh.integrations.transformers import TrainerMixin

    @quiet()
    def make() -> None:
        import datasets

        class Sharded(TrainerMixin, trl.DPOTrainer):
            pass

        columns = {"prompt": words(8, 1), "chosen": words(8, 2), "rejected": words(8, 3)}
        args = arguments(tmp_path, kind=trl.DPOConfig, max_length=32, bf16=False)
        data = datasets.Dataset.from_dict(columns)
        how = sharding("node=3", {"node": 2})
        Sharded(model=build("lora"), args=args, train_dataset=data, processing_class=tokenizer(), sharding=how)

    with launched(), pytest.raises(ModelError, match="has given the model a second adapter, 'ref'"):
        make()


CASES = {
    "sft": (supervised, "llama"),
    "sft-lora": (supervised, "lora"),
    "dpo": (preferred, "llama"),
    "dpo-lora": (preferred, "lora"),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_plain_training(pool: Pool, case, tmp_path):
    expected = pool.run(4, compared, case, tmp_path)[0]
    pool.run(2, resumed, case, tmp_path, expected)


def compared(case: str, directory: Path) -> Curve:
    run, kind = CASES[case]
    expected: Curve = plain(lambda: curve(run(directory / "plain", kind)))
    with launched():
        saving = {"save_strategy": "steps", "save_steps": SAVED}
        trainer = run(directory, kind, sharding(STRATEGIES[0]), **saving)
        assert_same_curve(curve(trainer), expected)
        assert is_sharded(trainer.model)
        if case == "dpo":
            assert is_sharded(trainer.ref_model)
        trainer.save_model()
    dist.barrier()
    names = {path.name for path in directory.iterdir()}
    assert ("adapter_model.safetensors" in names) == (kind == "lora") != ("model.safetensors" in names)
    return expected


def resumed(case: str, directory: Path, expected: Curve) -> None:
    run, kind = CASES[case]
    with launched():
        how = sharding("node=3", {"node": 2})
        trainer = run(directory, kind, how, resume=str(directory / f"checkpoint-{SAVED}"))
    assert_same_curve(curve(trainer), expected)
