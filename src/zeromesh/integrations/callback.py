"""A callback for every Trainer over a sharded model, which treats faults as `zeromesh train` does.

A Trainer has no way back from a step, so it cannot roll back. Start it again with `resume_from_checkpoint`.
"""

from __future__ import annotations

import math
import signal
from contextlib import ExitStack
from typing import Any, Literal

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback

from zeromesh.engine.api import engine_of
from zeromesh.engine.steps import clip_grad_norm_, zero_grad
from zeromesh.errors import NonFiniteError
from zeromesh.integrations.elastic import EXIT_PREEMPTED, NonFinite, asked_by, describe, noticing
from zeromesh.observe.replicas import check_replicas


class Faults(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Ends a run in order, and compares values that several ranks hold alike.

    SIGTERM on any rank saves a checkpoint after the current step and ends all processes with exit code 75, which asks
    for the same command again. A step whose gradient norm is NaN or infinite raises on all ranks, or is skipped.

    Args:
        nonfinite: "stop" raises, "skip" leaves the optimizer step out.
        nonfinite_in_a_row: how many steps in a row may be skipped.
        nonfinite_in_all: how many steps of the run may be skipped.
        digest_every: steps between comparisons of replicas; 0 for none. Each checkpoint is preceded by one more.

    Raises:
        NonFiniteError, MismatchError: on all ranks, from `trainer.train()`.
        SystemExit: with code 75, from `trainer.train()`, once the checkpoint is complete.
    """

    def __init__(
        self,
        *,
        nonfinite: Literal["stop", "skip"] = "stop",
        nonfinite_in_a_row: int = 3,
        nonfinite_in_all: int = 20,
        digest_every: int = 100,
    ) -> None:
        self.counts = NonFinite(remedy=nonfinite, most_in_a_row=nonfinite_in_a_row, most_in_all=nonfinite_in_all)
        self._digest_every = digest_every
        self._noticing = ExitStack()
        self._preempted = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._preempted = False
        self._noticing.enter_context(noticing(signal.SIGTERM))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        norm = float(clip_grad_norm_(model, math.inf))
        if math.isfinite(norm):
            self.counts.finite()
            return
        try:
            self.counts.judge(describe(state.global_step + 1, None, norm))
        except NonFiniteError:
            self._noticing.close()
            raise
        zero_grad(model)  # optimizers pass over parameters without a gradient

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        reduce = engine_of(model).control.reduce
        self._preempted = bool(reduce(torch.tensor([float(asked_by() > 0)], device=args.device)))
        if self._preempted:
            control.should_save = control.should_training_stop = True
        every = self._digest_every
        if every and (state.global_step % every == 0 or control.should_save):
            own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
            check_replicas(model, own)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._noticing.close()
        if self._preempted and state.global_step < state.max_steps:
            raise SystemExit(EXIT_PREEMPTED)
