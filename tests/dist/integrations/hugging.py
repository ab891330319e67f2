"""Shared by tests of Hugging Face's libraries: toy models, data, and a rank's environment as launchers make it.

The plain run that a sharded one is held against is one process's, in the first rank, with the same seeds and samples.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.hugging import SMALL, VOCABULARY

SIZES = SMALL | {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

MESH = {"cluster": 2, "node": 2}
STRATEGIES = ("node=3,cluster=1", "node=1,cluster=1", "node=3,cluster=0")

PUSHED = {"tied": STRATEGIES[:1], "lora": STRATEGIES[1:2]}
"""By model, the strategies that it is compared under on each push; `by_hand` does all."""

BOUND = 1e-6
"""Bound for losses and norms in fp32, which are of the order of 1 here."""

CLIP = 0.4
"""The norm to which `arguments` clips gradients."""

Curve = list[tuple[int, float, float]]
"""(step, loss, norm of gradients) of each step."""

STEPS, SAVED = (20, 10) if os.environ.get("ZEROMESH_BY_HAND") else (4, 2)
"""Steps of a run, three of which pass over all samples; and the step after which it is saved and resumed."""

SAMPLES = 8
"""Samples of a step, in two micro-batches, on however many ranks."""


def sharding(strategy: str = STRATEGIES[0], mesh: dict[str, int] | None = None, **options: Any) -> zm.Sharding:
    return zm.Sharding(strategy=strategy, mesh=mesh or MESH, **options)


def build(kind: str = "llama") -> Any:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "experts":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=3))
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied"))
    if kind != "lora":
        return model
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's, of functions that transformers has under new names
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"])
        )


def samples(count: int = 24, *, seed: int = 1, uneven: bool = True) -> list[dict[str, torch.Tensor]]:
    """Samples of one length with unequal numbers of tokens that count; with equal ones the Trainer evaluates to the
    same loss on any number of processes."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (10,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, 8, (), generator=generator)) if uneven else 3] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


@contextmanager
def surroundings(rank: int, world: int) -> Iterator[None]:
    """A rank as torchrun starts it; of a world of 1, a process as nobody starts it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    started = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with mock.patch.dict(
        os.environ, {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"} | (started if world > 1 else {})
    ):
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        try:
            yield
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._shared_state.clear()


@contextmanager
def launched() -> Iterator[None]:
    """This rank of the test's world."""
    with surroundings(dist.get_rank(), dist.get_world_size()):
        yield


def plain(run: Callable[[], Any]) -> Any:
    """Tells every rank the value that `run` returns on the first rank, as if that were alone."""
    found = [None]
    if dist.get_rank() == 0:
        with surroundings(0, 1):
            found = [run()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def arguments(directory: Path | str, *, kind: Any = None, **options: Any) -> Any:
    """A step of `SAMPLES` samples, in two micro-batches."""
    import transformers as hf

    world = int(os.environ.get("WORLD_SIZE", "1"))
    own: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": SAMPLES // 2 // world,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": CLIP,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return (kind or hf.TrainingArguments)(**(own | options))


def curve(trainer: Any) -> Curve:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


def assert_base_left_out(states: Path) -> None:
    """A checkpoint of "lora" has the trained parameters and none of the frozen ones."""
    (manifest,) = states.rglob("manifest*")
    named = re.findall(r'"model\.([\w.]+)"', manifest.read_text())
    assert any(name.endswith("lm_head.modules_to_save.default.weight") for name in named)
    assert not any(name.endswith("embed_tokens.weight") for name in named)


def assert_same_curve(found: Sequence[tuple[int, float, float]], expected: Sequence[tuple[int, float, float]]) -> float:
    """Returns the largest difference."""
    assert [step for step, _, _ in found] == [step for step, _, _ in expected]
    worst = max(
        abs(a - b) for left, right in zip(found, expected, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert worst <= BOUND, (worst, found, expected)
    return worst
