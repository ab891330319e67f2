"""The callback of a Trainer over a sharded model: SIGTERM, gradients that are not finite, replicas that drift apart."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.integrations.hugging import (
    arguments,
    assert_same_curve,
    build,
    curve,
    launched,
    plain,
    samples,
    sharding,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import MismatchError, NonFiniteError

MESH = {"node": 2}


def trainer(directory: Path, strategy: str = "node=3", *, at: int = -1, does: str = "", **faults: Any) -> Any:
    """A Trainer with the callback, in whose step `at`, counted from 0, something happens on the last rank."""
    from zeromesh.integrations.callback import Faults
    from zeromesh.integrations.transformers import Trainer

    class Meddled(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            here = self.state.global_step == at and dist.get_rank() == 1
            if here and does == "asked":
                os.kill(os.getpid(), signal.SIGTERM)
            if here and does == "drifts":
                with torch.no_grad():
                    next(iter(engine_of(self.model).optimizer_params())).local.add_(1)
            return super().training_step(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            here = self.state.global_step == at and dist.get_rank() == 1
            return loss * float("nan") if here and does == "nan" else loss

    own = {"args": arguments(directory, max_steps=6), "train_dataset": samples(), "callbacks": [Faults(**faults)]}
    return Meddled(model=build(), sharding=sharding(strategy, MESH), **own)


def alone(directory: Path) -> Any:
    import transformers as hf

    found = hf.Trainer(model=build(), args=arguments(directory, max_steps=6), train_dataset=samples())
    found.train()
    return curve(found)


@on_ranks(2)
def test_sigterm_saves_and_ends_with_75_and_the_run_goes_on(tmp_path):
    expected = plain(lambda: alone(tmp_path / "plain"))
    before = signal.getsignal(signal.SIGTERM)
    with launched():
        with pytest.raises(SystemExit) as ended:
            trainer(tmp_path / "run", at=2, does="asked").train()
        assert ended.value.code == 75 and signal.getsignal(signal.SIGTERM) is before
        again = trainer(tmp_path / "run")
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        assert_same_curve(curve(again), expected)


@on_ranks(2)
def test_a_step_that_is_not_finite_is_skipped_or_ends_the_run(tmp_path):
    with launched():
        skipping = trainer(tmp_path, at=2, does="nan", nonfinite="skip")
        skipping.train()
        (counts,) = (found.counts for found in skipping.callback_handler.callbacks if hasattr(found, "counts"))
        assert skipping.state.global_step == 6 and counts.skipped == 1
        params = list(engine_of(skipping.model).optimizer_params())
        assert all(param.local.isfinite().all() for param in params)
        with pytest.raises(
            NonFiniteError, match=r"step 3: the norm of the gradient is nan\. The optimizer has not stepped"
        ):
            trainer(tmp_path, at=2, does="nan").train()


@on_ranks(2)
def test_replicas_that_drift_apart_end_the_run(tmp_path):
    with launched(), pytest.raises(MismatchError, match="have drifted apart: over axis node"):
        trainer(tmp_path, "node=0", at=2, does="drifts", digest_every=2).train()
