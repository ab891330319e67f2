"""The training loop on several ranks: the mesh and the strategy decide where things lie, and nothing of the result."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from tests.dist.pool import Pool
from tests.dist.train.harness import Mesh, lines, ranks_of, train_plainly, write_text
from tests.dist.train.harness import config as base_config
from zeromesh.integrations.language_models import seed_of_rank
from zeromesh.report.run import KINDS
from zeromesh.sharding import shard
from zeromesh.train import loop
from zeromesh.train.config import TrainConfig, load_config
from zeromesh.train.corpus import read_corpus
from zeromesh.train.loop import build_language_model
from zeromesh.train.sampler import Sampler

ONE: Mesh = (("cluster", 1), ("node", 1))
TWO: Mesh = (("node", 2),)
TWO_BY_TWO: Mesh = (("cluster", 2), ("node", 2))


def config(directory: Path, mesh: Mesh, strategy: str, **changes: Any) -> TrainConfig:
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    own = {
        "run": {"directory": str(directory), "steps": 4, "seed": 7},
        "model": {"config": llama | {"num_attention_heads": 2}},
        "data__holdout": 0.2,
        "batch__global_sequences": 7,
        "eval": {"every": 2, "sequences": 5},
        "dtypes": dict.fromkeys(("param", "reduce", "grad", "master"), "fp64"),
        "checkpoint": {},
    }
    return base_config(directory, mesh, strategy, **own | changes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_text(tmp_path, 20, 5)


def train(config: TrainConfig) -> bool:
    """One rank's run."""
    return loop.run_training(config, ranks_of(config))


def steps_of(pool: Pool, config: TrainConfig) -> list[dict[str, float]]:
    assert all(pool.run(config.world, train, config))
    return lines(config)


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The same run on one rank."""
    return steps_of(pool, config(write_text(tmp_path_factory.mktemp("plain"), 20, 5), ONE, "node=0,cluster=0"))


def test_steps_are_recorded_and_evaluated_when_asked(plain: list[dict[str, float]]) -> None:
    assert [step["step"] for step in plain] == [1, 2, 3, 4]
    assert ["eval_loss" in step for step in plain] == [False, True, False, True]
    assert plain[-1]["loss"] < plain[0]["loss"]


def test_steps_are_ordinary_torch_training(plain: list[dict[str, float]], directory: Path) -> None:
    """The whole global batch at once, with torch's own optimizer, clipping and nothing of the engine."""
    run = config(directory, ONE, "node=0,cluster=0")
    torch.manual_seed(run.run.seed)
    model = build_language_model(run.model, 257).double()
    corpus = read_corpus(run)
    found = train_plainly(model, corpus.training, 7, [step["lr"] for step in plain])
    for own, step in zip(found, plain, strict=True):
        assert own == pytest.approx((step["loss"], step["grad_norm"]), rel=1e-5), step
    held_out = Sampler(num_samples=len(corpus.held_out), global_sequences=5, micro=5, world=1, seed=0)
    inputs, targets = corpus.held_out.batch(next(held_out.rank_batches(0, 0)))
    loss = functional.cross_entropy(model(input_ids=inputs).logits.float().flatten(0, 1), targets.flatten())
    assert len(inputs) == 5 and loss.item() == pytest.approx(plain[-1]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (TWO_BY_TWO, "node=0,cluster=2 | *.mlp: node=3,cluster=1 | lm_head: node=1,cluster=0"),
        ((("cluster", 1), ("node", 3)), "node=3,cluster=0"),
    ],
)
def test_every_mesh_and_strategy_learns_the_same(
    pool: Pool, directory: Path, plain: list[dict[str, float]], mesh: Mesh, strategy: str
) -> None:
    """7 sequences in micro-batches of 2: on 4 ranks the last has 1, on 3 ranks two have an empty second micro-batch."""
    for step, expected in zip(steps_of(pool, config(directory, mesh, strategy)), plain, strict=True):
        assert step.keys() == expected.keys()
        for key in step.keys() - {"step_s", "tokens_per_s"}:
            # The loss itself is computed in fp32 by the loop.
            assert step[key] == pytest.approx(expected[key], rel=1e-6), key


def test_the_demo(pool: Pool, tmp_path: Path) -> None:
    """`make demo`, but for its processes and with fewer steps and blocks: from Python's sources to table and page."""
    changes = [f'run.directory="{tmp_path}"', "run.steps=2", "eval.sequences=4", "model.config.num_hidden_layers=2"]
    demo = load_config(Path(__file__).parents[3] / "examples/demo.toml", changes)
    printed, *_ = pool.run(4, table_of, demo)
    assert [(line["step"], line["tokens"]) for line in lines(demo)] == [(1, 16 * 128), (2, 16 * 128)]
    assert lines(demo)[-1]["eval_loss"] > 0
    for name in (*KINDS.values(), "total", "node: 2 ranks, stage 3", "cluster: 2 ranks, stage 1"):
        row = re.search(rf"^{re.escape(name)} +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
        assert row and row[1] == row[2] != "0", (name, printed)
    assert "step 2/2" in printed and "predicted and measured agree on all 4 devices" in printed
    page = (tmp_path / "run.html").read_text()
    assert "<b>2 of 2</b>" in page and "Predicted and allocated agree on all ranks" in page


def test_only_the_first_rank_holds_a_whole_model_and_each_draws_its_own(pool: Pool, directory: Path) -> None:
    """A whole model on every rank would need its memory before it is sharded; equal masks would be one rank's."""
    made = config(directory, TWO, "node=3", run__steps=1)
    homes, seeds = zip(*pool.run(2, starting, made), strict=True)
    assert homes == ("cpu", "meta")
    assert len({made.run.seed, *seeds}) == 3
    assert [seed for _, seed in pool.run(2, starting, made)] == list(seeds)


def test_ranks_skip_the_same_layers() -> None:
    """Else they would gather different ones at once."""
    for name, value, alike in (("layerdrop", 0.1, True), ("decoder_layerdrop", 0.0, False), ("dropout", 0.1, False)):
        model = torch.nn.Module()
        model.config = SimpleNamespace(**{name: value})  # type: ignore[assignment]  # as Hugging Face's
        assert (seed_of_rank(1, 0, model) == seed_of_rank(1, 3, model)) == alike


def starting(config: TrainConfig) -> tuple[str, int]:
    """On a rank: where the model lies that is sharded, and the seed of randomness in the end."""
    homes: set[str] = set()

    def watched(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        homes.update(tensor.device.type for tensor in (*model.parameters(), *model.buffers()))
        return shard(model, *args, **kwargs)

    with mock.patch.object(loop, "shard", watched):
        train(config)
    (home,) = homes
    return home, torch.initial_seed()


def table_of(config: TrainConfig) -> str:
    """The output of one rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(config)
    return printed.getvalue()
