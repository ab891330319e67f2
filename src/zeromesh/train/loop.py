"""The steps of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeromesh.engine.api import accumulate, clip_grad_norm_, engine_of, zero_grad
from zeromesh.engine.units import DTYPES
from zeromesh.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from zeromesh.files import write_whole
from zeromesh.launch.ranks import Ranks, collective, from_first, on_any, on_every
from zeromesh.observe.replicas import check_replicas
from zeromesh.observe.report import MemoryLine, memory_report, traffic_report
from zeromesh.sharding import shard
from zeromesh.train.checkpointing import Checkpointer, make_checkpointer
from zeromesh.train.config import AUTO, OptimizerConfig, TrainConfig
from zeromesh.train.corpus import Corpus, load_corpus
from zeromesh.train.language_model import build_language_model, require_apart, require_pretrained
from zeromesh.train.learning_rate import learning_rate
from zeromesh.train.metrics import MetricsFile, StepMetrics, steps_up_to
from zeromesh.train.nonfinite import NonFinite, Remedy, describe
from zeromesh.train.page import About, RunPage
from zeromesh.train.planning import choose_strategy
from zeromesh.train.preemption import end_at_once, was_asked
from zeromesh.train.progress import Progress, show_progress
from zeromesh.train.sampler import Sampler
from zeromesh.train.sequences import NOT_LEARNED, Documents, Rows
from zeromesh.train.summary import fault_lines, gathered, header, table
from zeromesh.train.trackers import Tracker, make_tracker, require_trackers
from zeromesh.train.written import SAMPLES, export, prepare, write_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step, agreed by all ranks.

    Args:
        loss: mean over the tokens of the global batch.
        grad_norm: global, before clipping.
        tokens: targets of the global batch.
        stop: whether any rank was asked to end.
        broken: ranks whose own part of the loss is NaN or infinite.
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    broken: tuple[int, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the optimizer has stepped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def run_training(config: TrainConfig, ranks: Ranks) -> bool:
    """Train to the last step; False where the run was preempted and has saved.

    Collective: every rank of the mesh calls it.

    Raises:
        InputError: something in the configuration is wrong, or the model mixes documents that lie side by side.
    """
    from_first(lambda: _require_possible(config), "waiting for rank 0 to look at the configuration")
    corpus = load_corpus(config.data, config.model, config.samples.prompts)
    _require_a_batch(config, corpus.training)
    model = _build(config, ranks, corpus)
    if config.strategy == AUTO:
        config = choose_strategy(config, model)
    trainer = make_trainer(config, ranks, corpus, model)
    if isinstance(corpus.training, Documents):
        require_apart(trainer.model, corpus.vocab_size, ranks.device)
    checkpointer = make_checkpointer(config, ranks, corpus, trainer.model, trainer.optimizer, trainer.counts)
    return trainer.run(checkpointer)


def make_trainer(config: TrainConfig, ranks: Ranks, corpus: Corpus, model: nn.Module) -> Trainer:
    """What runs the steps, of `model` sharded as the configuration says; collective."""
    model = _sharded(config, ranks, model)
    prepare(model, config)
    torch.manual_seed(_seed_of(config.run.seed, ranks.rank, model))
    return Trainer(config, ranks, corpus, model, make_optimizer(model, config.optimizer))


def _require_possible(config: TrainConfig) -> None:
    """Raises ConfigError for what can be known before any data are read; changes nothing."""
    _require_writable(config.run.directory)
    if config.run.export is not None:
        _require_writable(config.run.export, "run.export")
    require_trackers(config.run.trackers)
    require_pretrained(config.model.pretrained)


def _require_a_batch(config: TrainConfig, rows: Rows) -> None:
    """Raises ConfigError where a step would take a sequence twice."""
    taken = config.batch.global_sequences
    if len(rows) < taken:
        raise ConfigError(
            f"a step takes batch.global_sequences = {taken} sequences of data.seq_len = {rows.seq_len} tokens, and the "
            f"training data have {len(rows)} in all: name more files in data.files, or make the batch or the sequences "
            f"smaller"
        )


def _require_writable(directory: Path, key: str = "run.directory") -> None:
    """Raise ConfigError where a directory cannot be written or made; changes nothing."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "a directory of this user's to write to" if there.is_dir() else "a directory"
        raise ConfigError(f"{key}: cannot write {directory}: {there} is not {reason}")


def _make_directory(directory: Path, corpus: Corpus, done: int) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if done == 0:  # of another run
            (directory / SAMPLES).unlink(missing_ok=True)
        if corpus.tokenizer is not None:
            _keep_text(directory / "tokenizer.json", corpus.tokenizer)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot write {directory}: {error.strerror or error}") from error


def _keep_text(path: Path, text: str) -> None:
    """Leaves a file alone that holds it, and never half of it."""
    if not path.exists() or path.read_bytes() != text.encode():
        write_whole(path, text)


def _build(config: TrainConfig, ranks: Ranks, corpus: Corpus) -> nn.Module:
    """The model, with random values in the first rank's host memory alone, from which `shard` takes them; those of a
    pretrained one are read then, by each rank its own.

    Raises:
        ConfigError: on every rank, where one of them cannot make it.
    """
    torch.manual_seed(config.run.seed)
    made: list[nn.Module] = []
    values = ranks.rank == 0 or config.model.pretrained is not None

    def build() -> None:
        with nullcontext() if values else torch.device("meta"):
            made.append(build_language_model(config.model, corpus.vocab_size, values=values))

    from_first(build, "waiting for rank 0 to draw the model", at_work=True)
    on_every(lambda: None if made else build(), "making the model")
    return made[0]


def _seed_of(seed: int, rank: int, model: nn.Module) -> int:
    """Of what a rank draws while it trains: ranks see other samples, and drop other activations.

    It is another one than the weights', also on the first rank. Models that skip layers at random are to skip the same
    ones on all ranks, since those gather a layer's parameters together.
    """
    options = vars(getattr(model, "config", None) or model)
    skips = any(name.endswith("layerdrop") and value for name, value in options.items())
    return Random(f"{seed} {0 if skips else rank}").getrandbits(63)


def _sharded(config: TrainConfig, ranks: Ranks, model: nn.Module) -> nn.Module:
    dtypes = config.dtypes
    return shard(
        model,
        ranks.mesh,
        config.strategy,
        param_dtype=DTYPES[dtypes.param],
        reduce_dtype=DTYPES[dtypes.reduce] if dtypes.reduce else None,
        grad_dtype=DTYPES[dtypes.grad],
        master_dtype=DTYPES[dtypes.master],
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
            model, micro_batches=self.sampler.micro_batches, recompute=config.model.recomputes
        )
        self.counts = NonFinite()
        self.memory: list[list[MemoryLine]] = []
        self._stop_asked = False

    def run(self, checkpointer: Checkpointer | None) -> bool:
        """All steps that are left; False where a signal ended the run after saving.

        Raises:
            NonFiniteError, MismatchError: on all ranks, after what was being saved is complete.
        """
        if checkpointer is None:
            end_at_once()
        done = checkpointer.resume() if checkpointer else 0
        directory = self.config.run.directory  # made only now that nothing can be wrong with the input any more
        from_first(lambda: _make_directory(directory, self.corpus, done), "waiting for rank 0 to make run.directory")
        quiet = self.ranks.rank != 0
        steps = self.config.run.steps
        lines = header(self.config, self.corpus, self.model, self.sampler, self.ranks.device, done)
        if not quiet:
            print("\n".join(lines), flush=True)
        if checkpointer and self._stops_before_a_step():
            checkpointer.close()
            return False
        with (
            self._trackers(lines, done, quiet=quiet) as trackers,
            show_progress(steps, steps_done=done, quiet=quiet) as progress,
        ):
            finished = self._run_steps(done, checkpointer, trackers, progress)
            if finished and done < steps:
                self._measure_memory()
        if finished and done < steps:
            self._print_comparison(quiet=quiet)
        if finished and self.config.run.export is not None:
            export(self.model, self.corpus, self.config, self.config.run.export, first=not quiet)
            if not quiet:
                print(f"exported to {self.config.run.export}", flush=True)
        return finished

    def _run_steps(
        self, done: int, checkpointer: Checkpointer | None, trackers: Sequence[Tracker], progress: Progress
    ) -> bool:
        steps = self.config.run.steps
        try:
            while done < steps:
                metrics, outcome = self._timed_step(done)
                back = self._after_nonfinite(done, outcome, checkpointer, progress)
                if back is not None:
                    done = back
                    for tracker in trackers:
                        tracker.rewind(done)
                    continue
                done += 1
                metrics = replace(metrics, skipped=self.counts.skipped or None, rollbacks=self.counts.rollbacks or None)
                for tracker in trackers:
                    tracker.append(metrics)
                progress.show(metrics)
                if outcome.finite and not self.memory:
                    self._measure_memory()
                self._write_samples(done, progress)
                stops = checkpointer is not None and outcome.stop and done < steps
                self._compare_replicas(done, saving=checkpointer is not None and (stops or checkpointer.due(done)))
                if checkpointer and stops:
                    checkpointer.save_now(done)
                    break
                if checkpointer and checkpointer.due(done):
                    checkpointer.save(done)
        except (NonFiniteError, MismatchError):
            # What is being written is of a good step, and all ranks are here.
            if checkpointer:
                with suppress(CheckpointError):
                    checkpointer.close()
            raise
        if checkpointer:
            checkpointer.close()
        return done >= steps

    def _after_nonfinite(
        self, step: int, outcome: StepOutcome, checkpointer: Checkpointer | None, progress: Progress
    ) -> int | None:
        """Does what the configuration says about a loss or norm that is not finite; the step to go back to, if any."""
        if outcome.finite:
            self.counts.finite()
            return None
        what = describe(step + 1, outcome.loss, outcome.grad_norm, list(outcome.broken))
        remedy = self.counts.judge(self.config.faults, what)
        if remedy is Remedy.SKIP:
            progress.note(f"{what}: skipped, without an optimizer step")
            return None
        back = checkpointer.roll_back() if checkpointer else None
        if back is None:
            raise NonFiniteError(f"{what}, and no checkpoint has been made yet to go back to")
        self.counts.rolled_back(step, back)
        progress.note(
            f"{what}: rolled back to step {back}; the {step + 1 - back} batches since then are left out, and the run "
            f"goes on with those that follow"
        )
        return back

    def _compare_replicas(self, done: int, *, saving: bool) -> None:
        every = self.config.faults.digest_every
        if every and (done % every == 0 or saving):
            check_replicas(self.model, self.optimizer)

    def _stops_before_a_step(self) -> bool:
        """Whether SIGTERM came during set-up, on any rank: what is on disk is what there is to save."""
        return on_any(self._asked_to_stop(), "agreeing to start")

    def _asked_to_stop(self) -> bool:
        return self._stop_asked or was_asked()

    def step(self, step: int) -> StepOutcome:
        """One optimizer step over the step's global batch; without the optimizer, where loss or norm is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, step, self.config.run.steps)
        self.model.train()
        loss_sum, tokens = self._forward_backward(self.counts.batch(step))
        clip_norm = self.config.optimizer.clip_norm or float("inf")
        norm = clip_grad_norm_(self.model, clip_norm)
        totals = self._sum_over_ranks("adding up the loss", loss_sum, self._asked_to_stop())
        # Before the optimizer's step: all ranks must decide alike whether there is one.
        loss_total, stops, grad_norm = torch.stack([*totals, norm.to(totals)]).tolist()
        outcome = StepOutcome(loss=loss_total / max(1, tokens), grad_norm=grad_norm, tokens=tokens, stop=stops > 0)
        if outcome.finite:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return outcome
        zero_grad(self.model)
        return replace(outcome, broken=self._ranks_where(not math.isfinite(loss_sum)))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the tokens of the held-out sequences, the same ones at each call and for each world size."""
        held_out = self.corpus.held_out
        sampler = self._deal(held_out, min(self.config.eval.sequences, len(held_out)), seed=0)
        self.model.eval()
        loss_sum, tokens = 0.0, 0
        for indices in sampler.rank_batches(0, self.ranks.rank):
            loss, weight = self._loss(held_out, indices)
            if weight:  # 0 times a loss that is not finite would not be 0
                loss_sum += float(loss) * weight
            tokens += weight
        loss_total, token_total = self._sum_over_ranks("adding up the held-out loss", loss_sum, tokens).tolist()
        return float(loss_total / token_total)

    def _timed_step(self, step: int) -> tuple[StepMetrics, StepOutcome]:
        every, done = self.config.eval.every, step + 1
        self.traffic.calls.clear()  # of a last step that was rolled back
        start = perf_counter()
        # The last step is counted alone: in steady state, and without evaluations.
        with self.traffic if done == self.config.run.steps else nullcontext():
            outcome = self.step(step)
        step_s = perf_counter() - start
        evaluated = outcome.finite and every > 0 and (done % every == 0 or done == self.config.run.steps)
        metrics = StepMetrics(
            step=done,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=self.optimizer.param_groups[0]["lr"],
            tokens=outcome.tokens,
            positions=self.config.batch.global_sequences * self.config.data.seq_len,
            tokens_per_s=outcome.tokens / step_s,
            step_s=step_s,
            eval_loss=self.evaluate() if evaluated else None,
        )
        return metrics, outcome

    def _write_samples(self, done: int, progress: Progress) -> None:
        samples = self.config.samples
        if samples.every and (done % samples.every == 0 or done == self.config.run.steps):
            path, quiet = self.config.run.directory / SAMPLES, self.ranks.rank != 0
            device = self.ranks.device
            for line in write_samples(self.model, self.corpus, samples, device, step=done, path=path, quiet=quiet):
                progress.note(line)

    def _measure_memory(self) -> None:
        self.memory = gathered(memory_report(self.model, self.optimizer))

    def _print_comparison(self, *, quiet: bool) -> None:
        traffic = gathered(self.traffic.lines())
        if not quiet:
            print(f"\n{table(self.memory, traffic)}", flush=True)
            for line in fault_lines(self.counts):
                print(line, flush=True)

    def _forward_backward(self, batch: int) -> tuple[Tensor, int]:
        """Gradient of the mean over the global batch's tokens; this rank's sum of losses, and the batch's learned
        tokens, which every rank can count."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        batches, training = list(self.sampler.rank_batches(batch, self.ranks.rank)), self.corpus.training
        tokens = training.targets(self.sampler.global_batch(batch))
        for position, indices in enumerate(batches):
            last, weight = position == len(batches) - 1, float(training.targets(indices))
            with accumulate(self.model, last=last, weight=weight, total=float(tokens)):
                loss, targets = self._loss(training, indices)
                loss.backward()  # type: ignore[no-untyped-call]
            if targets:  # as in `evaluate`
                loss_sum += loss.detach().double() * targets
        return loss_sum, tokens

    def _loss(self, rows: Rows, indices: list[int]) -> tuple[Tensor, int]:
        """Mean loss of a micro-batch, and its targets.

        An empty one runs a row that counts nothing, since every rank must make the same collectives.
        """
        batch = rows.batch(indices or [0])
        inputs, targets = self._moved(batch.inputs), self._moved(batch.targets)
        positions = {} if batch.positions is None else {"position_ids": self._moved(batch.positions)}
        logits: Tensor = self.model(input_ids=inputs, use_cache=False, **positions).logits
        loss_sum = functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=NOT_LEARNED, reduction="sum"
        )
        count = rows.targets(indices)
        return loss_sum / max(1, count or targets.numel()), count

    def _moved(self, rows: Tensor) -> Tensor:
        """To this rank's device; from pinned memory, in which a copy of views would not be, so that the host does not
        wait for what the device has to do."""
        device = self.ranks.device
        return rows if device.type == "cpu" else rows.contiguous().pin_memory().to(device, non_blocking=True)

    def _sum_over_ranks(self, operation: str, *numbers: float | Tensor) -> Tensor:
        """On the device and by its backend, so that the host waits for nothing before it looks at them."""
        words = [number if isinstance(number, Tensor) else self._word(number) for number in numbers]
        with collective(operation):
            return engine_of(self.model).control.reduce(torch.stack(words))

    def _word(self, number: float) -> Tensor:
        """Written by a kernel: a copy from the host would wait for the device."""
        return torch.full((), number, dtype=torch.float64, device=self.ranks.device)

    def _ranks_where(self, here: bool) -> tuple[int, ...]:
        """Ranks on which `here` is true; collective."""
        flags = [float(here and rank == self.ranks.rank) for rank in range(self.ranks.world)]
        return tuple(
            rank for rank, flag in enumerate(self._sum_over_ranks("finding the rank", *flags).tolist()) if flag
        )

    def _deal(self, rows: Rows, global_sequences: int, seed: int) -> Sampler:
        return Sampler(
            num_samples=len(rows),
            global_sequences=global_sequences,
            micro=self.config.batch.micro,
            world=self.ranks.world,
            seed=seed,
        )

    @contextmanager
    def _trackers(self, lines: Sequence[str], steps_done: int, *, quiet: bool) -> Iterator[list[Tracker]]:
        """What takes the steps' metrics: on the first rank alone there is any."""
        with ExitStack() as stack:
            found: list[Tracker] = []
            if not quiet:
                run, settings = self.config.run, self.config.model_dump(mode="json")
                metrics = run.directory / "metrics.jsonl"
                found.append(MetricsFile(metrics, steps_done=steps_done))
                found += [make_tracker(n, run.directory, settings, steps_done=steps_done) for n in run.trackers]
                if run.page:
                    about = About(name=run.directory.name, steps=run.steps, lines=lines, strategy=self.config.strategy)
                    before = steps_up_to(metrics, steps_done)
                    found.append(RunPage(run.directory / "run.html", before, about, lambda: self.memory))
            yield [stack.enter_context(tracker) for tracker in found]
