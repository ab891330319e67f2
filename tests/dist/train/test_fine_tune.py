"""A model that goes on, on two ranks, is plain training of it in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import Pool
from tests.dist.train.harness import lines, ranks_of, train_plainly
from zeromesh.checkpoint.read import read_manifest
from zeromesh.checkpoint.storage import open_storage
from zeromesh.errors import ConfigError
from zeromesh.integrations.texts import make_tokenizer
from zeromesh.train import loop
from zeromesh.train.config import CheckpointConfig, TrainConfig
from zeromesh.train.corpus import read_corpus
from zeromesh.train.loop import build_language_model

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
SEQUENCES = 5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, and records of text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("fine-tune")
    texts = [f"what is {number} and {number}? it is {2 * number}" for number in range(24)]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = make_tokenizer("bpe:280", [text.encode() for text in texts])
    tokenizer.save_pretrained("bpe:280", path / "base")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.end, "bos_token_id": None}
    config = LlamaConfig(vocab_size=tokenizer.vocab_size + 8, tie_word_embeddings=True, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(path / "base")
    return path


def config(directory: Path, name: str, strategy: str, **model: Any) -> TrainConfig:
    fp64 = dict.fromkeys(("param", "reduce", "grad", "master"), "fp64")
    tables: dict[str, Any] = {
        "strategy": strategy,
        "mesh": {"node": 2},
        "run": {"directory": str(directory / name), "steps": STEPS, "seed": 7, "export": str(directory / name / "out")},
        "model": {"pretrained": str(directory / "base")} | model,
        "data": {"files": [f"{directory}/texts.jsonl"], "seq_len": 20, "holdout": 0.0},
        "batch": {"global_sequences": SEQUENCES, "micro": 1},
        "optimizer": {"lr": 0.02},
        "samples": {"every": STEPS, "prompts": ["what is 3 and 3?"], "tokens": 4},
        "dtypes": fp64,
        "checkpoint": {"every": 1, "keep_every": 1},
    }
    return TrainConfig.model_validate(tables)


def train(*configs: TrainConfig) -> bool:
    """One rank's runs."""
    return all([loop.run_training(config, ranks_of(config)) for config in configs])


def refused(config: TrainConfig, elsewhere: Path) -> str:
    """A rank's error in a run in which the last rank's host has no such model."""
    if dist.get_rank() == 1:
        moved = config.model.model_copy(update={"pretrained": elsewhere})
        config = config.model_copy(update={"model": moved})
    with pytest.raises(ConfigError) as raised:
        train(config)
    return str(raised.value)


def plain(run: TrainConfig, learning_rates: list[float]) -> tuple[list[float], torch.nn.Module]:
    corpus = read_corpus(run)
    torch.manual_seed(run.run.seed)
    with mock.patch(
        "zeromesh.integrations.loading.from_pretrained", lambda kind, *a, **k: kind.from_pretrained(*a, **k)
    ):
        model = build_language_model(run.model, corpus.tokenizer.vocab_size).double()
    losses = [loss for loss, _ in train_plainly(model, corpus.training, SEQUENCES, learning_rates)]
    return losses, model.eval()


LORA = {"trainable": "lora:2", "activation_checkpointing": "selective"}


@pytest.mark.parametrize(
    ("strategy", "resumed", "model"),
    [
        ("host=2,node=3", "node=2", LORA),
        ("node=2", "host=3,node=3", {"trainable": ["*.mlp.*", "model.norm.weight"]}),
    ],
    ids=["lora", "patterns"],
)
def test_adapters_and_some_parameters_are_trained_as_in_one_process(
    pool: Pool, directory: Path, strategy: str, resumed: str, model: dict[str, Any]
) -> None:
    first = config(directory, strategy, strategy, **model)
    saved = first.run.directory / "checkpoints/step-00000001"
    run = config(directory, f"{strategy} again", resumed, **model)
    run = run.model_copy(update={"checkpoint": CheckpointConfig(resume=str(saved))})
    assert all(pool.run(2, train, first, run))
    losses, expected = plain(run, [step["lr"] for step in lines(first)])
    assert [step["loss"] for step in lines(first)] == pytest.approx(losses, rel=1e-6)  # the loop's loss is fp32
    assert [step["loss"] for step in lines(run)] == pytest.approx(losses[1:], rel=1e-6)
    # Frozen parameters stay where they came from.
    manifest = read_manifest(open_storage(str(saved.parent)), saved.name)
    trained = [name for name, parameter in expected.named_parameters() if parameter.requires_grad]
    assert {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")} == set(trained)

    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(
            _exported(directory, run)(input_ids=ids).logits, expected(input_ids=ids).logits, atol=1e-6
        )
    (sample,) = map(json.loads, (run.run.directory / "samples.jsonl").read_text().splitlines())
    assert sample.keys() == {"step", "prompt", "text"} and sample["step"] == STEPS
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(run.run.export)) == len(AutoTokenizer.from_pretrained(directory / "base"))


def test_a_model_that_one_host_does_not_have_is_said_by_all_ranks(pool: Pool, directory: Path) -> None:
    run = config(directory, "refused", "node=3")
    said = pool.run(2, refused, run, directory / "nowhere")
    assert len(set(said)) == 1 and said[0].startswith("rank 1: model.pretrained must be the directory of")
    assert not run.run.directory.exists()


def _exported(directory: Path, run: TrainConfig) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if not isinstance(run.model.trainable, str):
        return AutoModelForCausalLM.from_pretrained(run.run.export, dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(directory / "base").double()
    return PeftModel.from_pretrained(base, str(run.run.export)).double()
