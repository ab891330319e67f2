"""The steps of a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from zeromesh.engine.api import accumulate, clip_grad_norm_, shard
from zeromesh.engine.report import memory_report, traffic_report
from zeromesh.train.checkpointing import Checkpointer, make_checkpointer
from zeromesh.train.config import OptimizerConfig, TrainConfig
from zeromesh.train.corpus import Corpus, Sequences, load_corpus
from zeromesh.train.language_model import build_language_model
from zeromesh.train.learning_rate import learning_rate
from zeromesh.train.metrics import MetricsFile, StepMetrics
from zeromesh.train.progress import show_progress
from zeromesh.train.ranks import Ranks
from zeromesh.train.sampler import Sampler
from zeromesh.train.summary import Row, gather_rows, header, table

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step, agreed by all ranks.

    Args:
        loss: mean over the tokens of the global batch.
        grad_norm: global, before clipping.
        tokens: targets of the global batch.
        stop: whether any rank was asked to end.
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: bool


def run_training(config: TrainConfig, ranks: Ranks) -> bool:
    """Train to the last step; False where the run was preempted and has saved.

    Collective: every rank of the mesh calls it.

    Raises:
        InputError: something in the configuration is wrong.
    """
    if ranks.rank == 0:
        config.run.directory.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config.data, config.run.directory)
    model = _sharded_model(config, ranks, corpus.vocab_size)
    optimizer = make_optimizer(model, config.optimizer)
    trainer = Trainer(config, ranks, corpus, model, optimizer)
    checkpointer = make_checkpointer(config, ranks, model, optimizer)
    return trainer.run(checkpointer)


def _sharded_model(config: TrainConfig, ranks: Ranks, vocab_size: int) -> nn.Module:
    torch.manual_seed(config.run.seed)
    model = build_language_model(config.model, vocab_size).to(ranks.device)
    dtypes = config.dtypes
    return shard(
        model,
        ranks.mesh,
        config.strategy,
        param_dtype=TORCH_DTYPES[dtypes.param],
        reduce_dtype=TORCH_DTYPES[dtypes.reduce] if dtypes.reduce else None,
        grad_dtype=TORCH_DTYPES[dtypes.grad],
        master_dtype=TORCH_DTYPES[dtypes.master],
    )


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: vectors are norms' scales and biases, which weight decay only shrinks."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class Trainer:
    """Runs steps of one model on one rank.

    Args:
        config: the whole configuration.
        ranks: this rank among the others.
        corpus: the same on every rank.
        model: sharded.
        optimizer: of the model's sharded parameters.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, corpus: Corpus, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.corpus = corpus
        self.model = model
        self.optimizer = optimizer
        self.sampler = self._deal(corpus.training, config.batch.global_sequences, config.run.seed)
        self.traffic = traffic_report(
            model, micro_batches=self.sampler.micro_batches, recompute=config.model.activation_checkpointing
        )
        self._stop_asked = False

    def run(self, checkpointer: Checkpointer | None) -> bool:
        """All steps that are left; False where a signal ended the run after saving."""
        done = checkpointer.resume() if checkpointer else 0
        quiet = self.ranks.rank != 0
        steps = self.config.run.steps
        if not quiet:
            print(header(self.config, self.corpus, self.model, self.sampler, done), flush=True)
        with (
            self._notice_sigterm(enabled=checkpointer is not None),
            _metrics_file(self.config, done, quiet=quiet) as metrics_file,
            show_progress(steps, steps_done=done, quiet=quiet) as progress,
        ):
            for step in range(done, steps):
                metrics, stop = self._timed_step(step)
                if metrics_file:
                    metrics_file.append(metrics)
                progress.show(metrics)
                if checkpointer and stop and step + 1 < steps:
                    checkpointer.save_now(step + 1)
                    checkpointer.close()
                    return False
                if checkpointer:
                    checkpointer.step_done(step + 1)
        if checkpointer:
            checkpointer.close()
        if done < steps:
            self._print_comparison(quiet=quiet)
        return True

    def step(self, step: int) -> StepOutcome:
        """One optimizer step over the step's global batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, step, self.config.run.steps)
        self.model.train()
        loss_sum, tokens = self._forward_backward(step)
        clip_norm = self.config.optimizer.clip_norm or float("inf")
        grad_norm = clip_grad_norm_(self.model, clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss_total, token_total, stops = self._sum_over_ranks(float(loss_sum), tokens, int(self._stop_asked))
        return StepOutcome(
            loss=loss_total / token_total, grad_norm=float(grad_norm), tokens=int(token_total), stop=stops > 0
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the tokens of the held-out sequences, the same ones at each call and for each world size."""
        available = len(self.corpus.held_out)
        sampler = self._deal(self.corpus.held_out, min(self.config.eval.sequences, available), seed=0)
        self.model.eval()
        loss_sum, tokens = 0.0, 0
        for indices in sampler.rank_batches(0, self.ranks.rank):
            loss, weight = self._loss(self.corpus.held_out, indices)
            loss_sum += float(loss) * weight
            tokens += weight
        loss_total, token_total, _ = self._sum_over_ranks(loss_sum, tokens, 0)
        return loss_total / token_total

    def _timed_step(self, step: int) -> tuple[StepMetrics, bool]:
        every, done = self.config.eval.every, step + 1
        start = perf_counter()
        # The last step is counted alone: in steady state, and without evaluations.
        with self.traffic if done == self.config.run.steps else nullcontext():
            outcome = self.step(step)
        step_s = perf_counter() - start
        evaluated = every > 0 and (done % every == 0 or done == self.config.run.steps)
        metrics = StepMetrics(
            step=done,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=self.optimizer.param_groups[0]["lr"],
            tokens=outcome.tokens,
            tokens_per_s=outcome.tokens / step_s,
            step_s=step_s,
            eval_loss=self.evaluate() if evaluated else None,
        )
        return metrics, outcome.stop

    def _print_comparison(self, *, quiet: bool) -> None:
        memory = gather_rows([Row.of_memory(line) for line in memory_report(self.model, self.optimizer)])
        traffic = gather_rows([Row.of_traffic(line) for line in self.traffic.lines()])
        if not quiet:
            print(f"\n{table(memory, traffic)}", flush=True)

    def _forward_backward(self, step: int) -> tuple[Tensor, int]:
        """Gradient of the mean over the global batch's tokens; this rank's sum of losses, and its tokens."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        tokens = 0
        batches = list(self.sampler.rank_batches(step, self.ranks.rank))
        for position, indices in enumerate(batches):
            with accumulate(self.model, last=position == len(batches) - 1, weight=self._weight(indices)):
                loss, weight = self._loss(self.corpus.training, indices)
                loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach().double() * weight
            tokens += weight
        return loss_sum, tokens

    def _weight(self, indices: list[int]) -> float:
        """Targets in a micro-batch: what it counts in the mean over the global batch's tokens."""
        return float(len(indices) * self.config.data.seq_len)

    def _loss(self, sequences: Sequences, indices: list[int]) -> tuple[Tensor, int]:
        """Mean loss of a micro-batch, and its targets.

        An empty one runs a sequence that counts nothing, since every rank must make the same collectives.
        """
        inputs, targets = (rows.to(self.ranks.device) for rows in sequences.batch(indices or [0]))
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss, targets.numel() if indices else 0

    def _sum_over_ranks(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(number) for number in total]

    def _deal(self, sequences: Sequences, global_sequences: int, seed: int) -> Sampler:
        return Sampler(
            num_samples=len(sequences),
            global_sequences=global_sequences,
            micro=self.config.batch.micro,
            world=self.ranks.world,
            seed=seed,
        )

    @contextmanager
    def _notice_sigterm(self, *, enabled: bool) -> Iterator[None]:
        """Where the run can save, SIGTERM ends it after the current step; elsewhere it ends it at once, as always."""
        if not enabled:
            yield
            return

        def notice(_number: int, _frame: FrameType | None) -> None:
            self._stop_asked = True

        before: Any = signal.signal(signal.SIGTERM, notice)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _metrics_file(config: TrainConfig, steps_done: int, *, quiet: bool) -> Iterator[MetricsFile | None]:
    if quiet:
        yield None
        return
    with MetricsFile(config.run.directory / "metrics.jsonl", steps_done=steps_done) as file:
        yield file
