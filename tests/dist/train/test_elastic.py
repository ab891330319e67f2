"""One run on 4, 3, 2 and 1 ranks in turn: the same samples at each step, the same losses, nothing lost between."""

from __future__ import annotations

import errno
import shutil
import warnings
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.dist.pool import Pool
from tests.dist.train.harness import Meddling, Mesh, Outcome, config, equal, global_batch, lines, train, write_text
from zeromesh.checkpoint import saver
from zeromesh.train.config import TrainConfig

FOUR: Mesh = (("cluster", 2), ("node", 2))
ONE: Mesh = (("cluster", 1), ("node", 1))
FP64 = {"param": "fp64", "reduce": "fp64", "grad": "fp64", "master": "fp64"}
STRATEGY = "node=3,cluster=1"


def test_four_three_two_one(pool: Pool, tmp_path: Path) -> None:
    """5 sequences in micro-batches of 2 divide on no world: some ranks run empty micro-batches."""
    alone, shrinking = (write_text(tmp_path / name) for name in make(tmp_path, "alone", "shrinking"))
    changes = {"dtypes": FP64, "batch": {"global_sequences": 5, "micro": 2}, "checkpoint__every": 100, "run__steps": 4}
    whole = config(alone, ONE, "node=0,cluster=0", **changes)
    (expected,) = pool.run(1, train, whole)

    run = config(shrinking, FOUR, STRATEGY, faults={"resize": True, "digest_every": 1}, **changes)
    samples: list[list[int]] = []
    ends: list[Outcome] = []
    for world, stop in ((4, 1), (3, 2), (2, 3), (1, None)):
        resized = run.on_world(world)
        outcomes = pool.run(world, train, resized, Meddling(stop_after=stop))
        assert {outcome.finished for outcome in outcomes} == {stop is None}, outcomes[0].error
        samples += [sorted(chain(*parts)) for parts in zip(*(outcome.samples for outcome in outcomes), strict=True)]
        if ends:
            assert equal(outcomes[0].at_start, ends[0].at_end)
            assert f"mesh cluster={resized.mesh['cluster']} x node={resized.mesh['node']}" in outcomes[0].printed
        ends = outcomes
    real = [sorted(indices) for indices in expected.samples]
    assert samples == real
    assert [line["step"] for line in lines(run)] == list(range(1, 5))
    losses = [line["loss"] for line in lines(run)]
    assert losses == pytest.approx([line["loss"] for line in lines(whole)], rel=1e-6)
    for name, value in ends[0].params.items():
        assert value.numpy() == pytest.approx(expected.params[name].numpy(), rel=1e-9, abs=1e-12), name


def make(directory: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (directory / name).mkdir()
    return names


ONE_RANK = ONE, "node=0,cluster=0"


def first_step(pool: Pool, made: TrainConfig, **meddling: Any) -> int:
    """The step after which a start went on."""
    outcome, *_ = pool.run(made.world, train, made, Meddling(**meddling))
    assert not outcome.error
    return made.run.steps - len(outcome.samples) if meddling.get("stop_after") is None else -1


def test_a_run_begins_with_another_and_goes_on_from_its_own(pool: Pool, tmp_path: Path) -> None:
    first, second = (write_text(tmp_path / name) for name in make(tmp_path, "first", "second"))
    pool.run(1, train, config(first, *ONE_RANK, run__steps=3), Meddling())
    path = str(first / "run" / "checkpoints")
    fine = config(second, (("cluster", 1), ("node", 2)), "node=3,cluster=0", checkpoint__resume=path)
    assert first_step(pool, fine, stop_after=5) == -1
    outcome, _ = pool.run(2, train, fine, Meddling())
    assert len(outcome.samples) == fine.run.steps - 5
    assert f"{path} is not loaded: the run has checkpoints of its own" in outcome.printed


def unlucky(made: TrainConfig, meddling: Meddling) -> Outcome:
    """One rank's run on a full disk, without its warnings."""
    fails = mock.patch.object(saver, "write_file", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with warnings.catch_warnings(), fails:
        warnings.simplefilter("ignore")
        return train(made, meddling)


def test_a_run_without_a_checkpoint_of_its_own_rolls_back_to_its_beginning(pool: Pool, tmp_path: Path) -> None:
    first, second = (write_text(tmp_path / name) for name in make(tmp_path, "first", "second"))
    assert first_step(pool, config(first, *ONE_RANK, run__steps=3)) == 0

    # Its own first save has failed when it comes to batch 7.
    meddling = Meddling(poisoned=global_batch(152, 4, 7))
    for resume, said in (
        ("auto", "no checkpoint has been made yet to go back to"),
        (str(first / "run" / "checkpoints"), "rolled back to step 3; the 5 batches since then are left out"),
    ):
        rules = {"every": 3, "keep": 9, "resume": resume}
        made = config(second, *ONE_RANK, checkpoint=rules, faults__nonfinite="rollback")
        (outcome,) = pool.run(1, unlucky, made, meddling)
        assert said in outcome.error + outcome.printed
        shutil.rmtree(second / "run" / "checkpoints", ignore_errors=True)


def test_auto_plans_anew_for_what_is_left(pool: Pool, tmp_path: Path) -> None:
    changes = {"cluster": "gloo-laptop", "faults": {"resize": True}}
    run = config(write_text(tmp_path), (("node", 2),), "auto", **changes)
    for world, stop in ((2, 4), (1, None)):
        first, *others = pool.run(world, train, run.on_world(world), Meddling(stop_after=stop))
        assert f"strategy auto: node={first.strategy[-1]} for node={world} of gloo-laptop, predicted " in first.printed
        assert all(other.strategy == first.strategy and not other.printed for other in others)
    assert "and is loaded under strategy node=" in first.printed
    assert [line["step"] for line in lines(run)] == list(range(1, 9))
