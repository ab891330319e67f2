"""A loss that is NaN on one rank, a gradient that is infinite: all ranks stop, skip or roll back alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.train.harness import (
    Meddling,
    Mesh,
    Outcome,
    checkpoints,
    config,
    equal,
    global_batch,
    lines,
    train,
    write_text,
)
from zeromesh.train.config import TrainConfig

TWO: Mesh = (("cluster", 1), ("node", 2))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_text(tmp_path)


SAMPLES = 152
"""Sequences in the text that `write_text` writes; checked where a run rolls back."""


def bad_in(batch: int, position: int = 3) -> int:
    """A sample of that batch, of rank 1's where `position` is 2 or 3, and of no batch near it."""
    return global_batch(SAMPLES, 4, batch)[position]


def run(pool: Pool, made: TrainConfig, **meddling: Any) -> list[Outcome]:
    return pool.run(made.world, train, made, Meddling(**meddling))


def test_stop_names_step_and_rank_and_leaves_the_good_checkpoint(pool: Pool, directory: Path) -> None:
    made = config(directory, TWO, "node=3,cluster=0")
    for outcome in run(pool, made, poisoned=[bad_in(4)]):
        assert outcome.error.startswith("NonFiniteError: step 5: the loss is nan on rank 1. The optimizer has not")
        assert not any(value.isnan().any() for value in outcome.params.values())
    assert checkpoints(made) == ["step-00000003"]
    assert [line["step"] for line in lines(made)] == [1, 2, 3, 4]


def test_skip_is_a_step_that_was_not(pool: Pool, directory: Path) -> None:
    """To the bit the run in which the step did not happen; the learning rate goes by the step all the same."""
    expected = run(pool, config(directory, TWO, "node=2,cluster=0"), left_out=[4])
    what = {
        "poisoned": "step 5: the loss is nan on rank 1: skipped",
        "exploding": "step 5: the norm of the gradient is ",
    }
    for kind, said in what.items():
        made = config(
            directory, TWO, "node=2,cluster=0", faults__nonfinite="skip", run__directory=str(directory / kind)
        )
        skipped = run(pool, made, **{kind: [bad_in(4)]})
        assert all(equal(one.params, two.params) for one, two in zip(skipped, expected, strict=True))
        recorded = lines(made)
        assert [line["step"] for line in recorded] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [line.get("skipped") for line in recorded] == [None] * 4 + [1] * 4
        assert (recorded[4]["loss"] is None) == (kind == "poisoned")
        assert recorded[4]["grad_norm"] is None
        assert said in skipped[0].printed and "skipped 1" in skipped[0].printed
        assert "1 steps were skipped: their loss or gradient was not finite" in skipped[0].printed


def test_a_sequence_that_counts_nothing_breaks_nothing(pool: Pool, directory: Path) -> None:
    """With 5 sequences rank 1 has an empty second micro-batch, which runs sample 0."""
    made = config(directory, TWO, "node=3,cluster=0", run__steps=6, batch={"global_sequences": 5, "micro": 2})
    outcomes = run(pool, made, poisoned=[0])
    assert not any(0 in indices for outcome in outcomes for indices in outcome.samples)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    # Nor where it is evaluated: of the held-out text 0 is none of the five.
    evaluated = {"run__steps": 1, "data__holdout": 0.5, "eval": {"every": 1, "sequences": 5}}
    made = config(directory, TWO, "node=3,cluster=0", run__directory=str(directory / "anew"), **evaluated)
    run(pool, made, poisoned=[0])
    assert lines(made)[0]["eval_loss"] > 0


def test_skipping_has_a_bound(pool: Pool, directory: Path) -> None:
    made = config(directory, TWO, "node=3,cluster=0", faults={"nonfinite": "skip", "nonfinite_in_a_row": 2})
    for outcome in run(pool, made, poisoned=[bad_in(batch) for batch in (1, 3, 4, 5)]):
        assert "step 6: the loss is nan on rank 1: number 3 in a row" in outcome.error
    assert len(lines(made)) == 5


def test_roll_back_goes_on_with_the_batches_that_follow(pool: Pool, directory: Path) -> None:
    """Batch 4 is bad and the checkpoint is of step 3, so batches 3 and 4 are left out."""
    made = config(directory, TWO, "node=3,cluster=0", faults__nonfinite="rollback")
    rolled = run(pool, made, poisoned=[bad_in(4)])
    used = [one + two for one, two in zip(*(outcome.samples for outcome in rolled), strict=True)]
    assert used == [global_batch(SAMPLES, 4, batch) for batch in range(10)]
    assert [line["step"] for line in lines(made)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line.get("rollbacks") for line in lines(made)] == [None] * 3 + [1] * 5
    assert "rolled back to step 3; the 2 batches since then are left out" in rolled[0].printed

    # As if there had never been others.
    later = {step: step + 2 for step in range(3, 8)}
    expected = run(
        pool, config(directory, TWO, "node=3,cluster=0", run__directory=str(directory / "anew")), batches=later
    )
    assert all(equal(one.params, two.params) for one, two in zip(rolled, expected, strict=True))


def test_what_was_left_out_is_in_the_checkpoint(pool: Pool, directory: Path) -> None:
    faults = {"nonfinite": "rollback"}
    run(pool, config(directory, TWO, "node=3,cluster=0", faults=faults, run__steps=7), poisoned=[bad_in(4)])
    longer = config(directory, TWO, "node=3,cluster=0", faults=faults, run__steps=9)
    outcomes = run(pool, longer)
    used = [one + two for one, two in zip(*(outcome.samples for outcome in outcomes), strict=True)]
    assert used == [global_batch(SAMPLES, 4, batch) for batch in (9, 10)]
    assert outcomes[0].counts == {"skipped": 0, "rollbacks": 1, "in_a_row": 0, "left_out": 2}


def test_rolling_back_needs_a_checkpoint_and_has_a_bound(pool: Pool, directory: Path) -> None:
    faults = {"nonfinite": "rollback", "nonfinite_in_all": 1}
    made = config(directory, TWO, "node=3,cluster=0", faults=faults)
    for outcome in run(pool, made, poisoned=[bad_in(1)]):
        assert outcome.error.endswith(
            "step 2: the loss is nan on rank 1, and no checkpoint has been made yet to go back to"
        )
    for outcome in run(pool, made, poisoned=[bad_in(4), bad_in(7)]):
        assert "number 2 of this run, and nonfinite_in_all = 1" in outcome.error
    assert not any(math.isnan(line["loss"]) for line in lines(made))
