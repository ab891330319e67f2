"""The steps of a run."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._dynamo  # parameters on the meta device import it, for seconds: too long inside of a collective
from torch import Tensor, nn
from torch.nn import functional

from zeromesh.api import plan
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.run import RunCheckpoints
from zeromesh.engine.api import engine_of
from zeromesh.engine.steps import accumulate, clip_grad_norm_, zero_grad
from zeromesh.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from zeromesh.files.users import require_writable, write_whole
from zeromesh.integrations.elastic import NonFinite, asked_by, describe, mesh_text
from zeromesh.integrations.language_models import causal_language_model, continuation, require_pretrained, seed_of_rank
from zeromesh.launch.device import device_name
from zeromesh.launch.ranks import Ranks, collective, from_first, on_every
from zeromesh.model.spec import Recomputation
from zeromesh.observe.replicas import check_replicas
from zeromesh.observe.report import gathered, memory_report, traffic_report
from zeromesh.planner.workload import Workload
from zeromesh.progress import progress
from zeromesh.report.run import RunReport, StepMetrics, comparison, places
from zeromesh.sharding import shard
from zeromesh.strategy.plan import Plan
from zeromesh.trace import MemoryLine
from zeromesh.train.config import AUTO, ModelConfig, OptimizerConfig, TrainConfig
from zeromesh.train.corpus import TOKENIZER, Corpus, Rows, load_corpus
from zeromesh.train.sampler import Sampler
from zeromesh.units import format_bytes, format_seconds


def run_training(config: TrainConfig, ranks: Ranks) -> bool:
    """Trains to the last step; False if the run was preempted and has saved. Every rank of the mesh calls it. Raises
    InputError if something in the configuration is wrong."""
    place = from_first(lambda: _require_possible(config), "waiting for rank 0 to look at the configuration")
    with progress("reading the corpus"):
        corpus = load_corpus(config, place)
    taken = config.batch.global_sequences
    if len(corpus.training) < taken:
        raise ConfigError(
            f"a step takes batch.global_sequences = {taken} sequences of data.seq_len = {config.data.seq_len} tokens, "
            f"and the training data have {len(corpus.training)} in all: name more files in data.files, or make the "
            f"batch or the sequences smaller"
        )
    with progress("making the model"):
        model = _build(config, ranks, corpus)
    if config.strategy == AUTO:
        chosen = from_first(lambda: plan_run(config, model), "waiting for rank 0 to plan")
        config = config.model_copy(update={"strategy": str(chosen.strategy)})
        if ranks.rank == 0:
            found: Any = chosen.predicted
            print(
                f"strategy auto: {config.strategy} for {mesh_text(config.mesh)} of {config.cluster}, predicted "
                f"{format_seconds(found['step_s'])} a step, {format_bytes(found['memory_bytes']['total'])} a device",
                flush=True,
            )
    return make_trainer(config, ranks, corpus, model).run()


def make_trainer(config: TrainConfig, ranks: Ranks, corpus: Corpus, model: nn.Module) -> Trainer:
    """Shards `model` as the configuration says, and makes its optimizer; collective. A rehearsal calls it too, so it
    has a run's model, optimizer and batches. Raises ConfigError if the model cannot write samples, or be exported."""
    shard(model, ranks.mesh, config.strategy, **config.dtypes.options())
    if config.samples.every or config.run.export:
        from zeromesh.integrations.pretrained import adapt  # imports transformers

        adapt(model, None)
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(f"samples and run.export are for Hugging Face models; {type(model).__name__} is none")
    torch.manual_seed(seed_of_rank(config.run.seed, ranks.rank, model))
    return Trainer(config, ranks, corpus, model, make_optimizer(model, config.optimizer))


def build_language_model(config: ModelConfig, vocab_size: int, *, values: bool = True) -> nn.Module:
    return causal_language_model(vocab_size, values=values, **dict(config))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: vectors are norms' scales and biases, which weight decay only shrinks."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 0 <= `step` < `steps`: it rises linearly over the warm-up, whose last step has the full
    rate, then stays, or falls along half a cosine to `final_lr_ratio * lr` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    ratio = config.final_lr_ratio
    return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def plan_run(config: TrainConfig, model: nn.Module) -> Plan:
    """The plan for the loop's step. Beyond the end of the global batch, ranks run sequences that count nothing but take
    as long as any other: the planner's batch includes them."""
    seq_len, micro = config.data.seq_len, config.batch.micro
    workload = Workload(
        seq_len=seq_len,
        global_batch_tokens=config.micro_batches * micro * config.world * seq_len,
        micro_batch=micro,
        recomputation=Recomputation(config.model.activation_checkpointing),
        **config.dtypes.options(),
    )
    return plan(model, config.hardware(), workload)


def _require_possible(config: TrainConfig) -> Path:
    """An existing directory at or above the run's. Raises ConfigError for faults that can be found before data."""
    if config.run.export is not None:
        require_writable(config.run.export, key="run.export", error=ConfigError)
    require_pretrained(config.model.pretrained)
    return require_writable(config.run.directory, key="run.directory", error=ConfigError)


def _build(config: TrainConfig, ranks: Ranks, corpus: Corpus) -> nn.Module:
    """The model. Random values are in rank 0's host memory only, from which `shard` takes them; of a pretrained model
    each rank reads its slices later. Raises ConfigError on every rank if one of them cannot make it."""
    torch.manual_seed(config.run.seed)
    made: list[nn.Module] = []
    values = ranks.rank == 0 or config.model.pretrained is not None

    def build() -> None:
        with nullcontext() if values else torch.device("meta"):
            made.append(build_language_model(config.model, corpus.tokenizer.vocab_size, values=values))

    from_first(build, "waiting for rank 0 to draw the model", at_work=True)
    on_every(lambda: None if made else build(), "making the model")
    return made[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step, agreed by all ranks: mean loss over the tokens of the global batch, gradient norm before clipping,
    whether any rank was asked to end, and the ranks whose own part of the loss is not finite."""

    loss: float
    grad_norm: float
    stop: bool = False
    broken: tuple[int, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the optimizer has stepped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Trainer:
    """Runs steps of one sharded model on one rank, with the optimizer of its parameters."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, corpus: Corpus, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config, self.ranks, self.corpus, self.model, self.optimizer = config, ranks, corpus, model, optimizer
        self.sampler = self._deal(corpus.training, config.batch.global_sequences, config.run.seed)
        self.traffic = traffic_report(
            model, micro_batches=config.micro_batches, recompute=config.model.activation_checkpointing != "none"
        )
        rules = config.faults
        self.counts = NonFinite(
            remedy=rules.nonfinite, most_in_a_row=rules.nonfinite_in_a_row, most_in_all=rules.nonfinite_in_all
        )
        self.memory: list[list[MemoryLine]] = []
        self._report: RunReport | None = None  # rank 0's, while steps run

    def run(self) -> bool:
        """Runs the remaining steps. Returns False if a signal ended the run, after saving the steps done. Raises
        NonFiniteError or MismatchError on all ranks, after a save under way is complete."""
        run = self.config.run
        begun = self._resume()
        # Made only now that nothing can be wrong with the input any more.
        from_first(self._make_directory, "waiting for rank 0 to make run.directory")
        lines = self._header(begun)
        self._note("\n".join(lines))
        asked = torch.full((), float(asked_by() > 0), device=self.ranks.device)
        if self._summed("agreeing to start", asked) > 0:
            self.checkpoints.close()
            self._note("stopped before a step")
            return False
        if self.ranks.rank == 0:
            self._report = RunReport(
                run.directory,
                steps=run.steps,
                done=begun,
                lines=lines,
                strategy=self.config.strategy,
                page=run.page,
                memory=lambda: self.memory,
            )
        try:
            done = self._run_steps(begun)
            if begun < done == run.steps:
                self.memory = gathered(memory_report(self.model, self.optimizer))
        finally:
            if self._report:
                self._report.close()
        if done < run.steps:
            self._note(f"stopped and saved after step {done} of {run.steps}")
        elif begun < done:
            self._note(f"\n{comparison(self.memory, gathered(self.traffic.lines()))}{self.counts.summary()}")
        if run.export is not None and done >= run.steps:
            self._export(run.export)
        self._note(places(run.directory))
        return done >= run.steps

    def step(self, step: int) -> StepOutcome:
        """One optimizer step over the step's global batch; without the optimizer if loss or norm is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, step, self.config.run.steps)
        self.model.train()
        loss_sum = self._forward_backward(self.counts.batch(step))
        norm = clip_grad_norm_(self.model, self.config.optimizer.clip_norm or float("inf"))
        # By a kernel: a copy waits for the device.
        asked = torch.full_like(loss_sum, asked_by() > 0)
        totals = self._summed("adding up the loss", torch.stack([loss_sum, asked]))
        # Before the optimizer's step: all ranks must decide alike whether there is one.
        loss, stops, grad_norm = torch.stack([*totals, norm.to(totals)]).tolist()
        outcome = StepOutcome(loss=loss / self.tokens, grad_norm=grad_norm, stop=stops > 0)
        if outcome.finite:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return outcome
        zero_grad(self.model)
        broken = torch.zeros(self.ranks.world, dtype=torch.float64, device=self.ranks.device)
        broken[self.ranks.rank] = not math.isfinite(loss_sum)
        ranks = self._summed("finding the rank", broken).nonzero().flatten().tolist()
        return replace(outcome, broken=tuple(ranks))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the tokens of the held-out sequences, the same ones at each call and for each world size."""
        held_out = self.corpus.held_out
        sequences = min(self.config.eval.sequences, len(held_out))
        self.model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for indices in self._deal(held_out, sequences, seed=0).rank_batches(0, self.ranks.rank):
            loss = self._loss(held_out, indices)
            if indices:  # 0 times a loss that is not finite would not be 0
                loss_sum += loss.double() * (len(indices) * held_out.seq_len)
        return float(self._summed("adding up the held-out loss", loss_sum)) / (sequences * held_out.seq_len)

    @property
    def tokens(self) -> int:
        """Targets of a global batch."""
        return self.config.batch.global_sequences * self.config.data.seq_len

    def _run_steps(self, done: int) -> int:
        """Runs steps from `done` on, until the last or until a signal asks to end. Returns the steps done."""
        steps, every, digests = self.config.run.steps, self.config.checkpoint.every, self.config.faults.digest_every
        try:
            while done < steps:
                metrics, outcome = self._timed_step(done)
                if outcome.finite:
                    self.counts.finite()
                elif (back := self._after_nonfinite(done, outcome)) is not None:
                    done = back
                    continue
                done += 1
                if self._report:
                    skipped, rollbacks = self.counts.skipped or None, self.counts.rollbacks or None
                    self._report.append(replace(metrics, skipped=skipped, rollbacks=rollbacks))
                if outcome.finite and not self.memory:
                    self.memory = gathered(memory_report(self.model, self.optimizer))
                    if every:
                        self.checkpoints.prepare()
                self._write_samples(done)
                stops = outcome.stop and done < steps
                saves = stops or (every > 0 and (done % every == 0 or done == steps))
                if digests and (done % digests == 0 or saves):
                    check_replicas(self.model, self.optimizer)
                if saves:
                    with collective(f"saving the checkpoint of step {done}"):
                        self.checkpoints.save(done, self.counts.state())
                if stops:
                    break
        except (NonFiniteError, MismatchError):
            with suppress(CheckpointError):  # the checkpoint being written is of a good step, and all ranks are here
                self._close()
            raise
        self._close()
        return done

    def _timed_step(self, step: int) -> tuple[StepMetrics, StepOutcome]:
        every, done, steps = self.config.eval.every, step + 1, self.config.run.steps
        self.traffic.calls.clear()  # of a last step that was rolled back
        start = perf_counter()
        # Only the last step is counted: in steady state, and without evaluations.
        with self.traffic if done == steps else nullcontext():
            outcome = self.step(step)
        step_s = perf_counter() - start
        evaluated = outcome.finite and every > 0 and (done % every == 0 or done == steps)
        metrics = StepMetrics(
            step=done,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=self.optimizer.param_groups[0]["lr"],
            tokens=self.tokens,
            positions=self.tokens,
            tokens_per_s=self.tokens / step_s,
            step_s=step_s,
            eval_loss=self.evaluate() if evaluated else None,
        )
        return metrics, outcome

    def _forward_backward(self, batch: int) -> Tensor:
        """Gradient of the mean over the global batch's tokens; this rank's sum of losses."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        batches, rows = list(self.sampler.rank_batches(batch, self.ranks.rank)), self.corpus.training
        for position, indices in enumerate(batches):
            last, weight = position == len(batches) - 1, len(indices) * rows.seq_len
            with accumulate(self.model, last=last, weight=float(weight), total=float(self.tokens)):
                loss = self._loss(rows, indices)
                loss.backward()  # type: ignore[no-untyped-call]
            if weight:  # as in `evaluate`
                loss_sum += loss.detach().double() * weight
        return loss_sum

    def _loss(self, rows: Rows, indices: list[int]) -> Tensor:
        """Mean loss of a micro-batch. An empty one runs a row, since every rank must make the same collectives; it
        counts nothing."""
        inputs, targets = map(self._moved, rows.batch(indices or [0]))
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _moved(self, rows: Tensor) -> Tensor:
        """Moves rows to this rank's device, from pinned memory, so that the host does not wait. Copies of views would
        not be pinned."""
        device = self.ranks.device
        return rows if device.type == "cpu" else rows.contiguous().pin_memory().to(device, non_blocking=True)

    def _summed(self, operation: str, values: Tensor) -> Tensor:
        """Sums `values` over all ranks, on the device and by its backend: the host waits only when it looks."""
        with collective(operation):
            return engine_of(self.model).control.reduce(values)

    def _deal(self, rows: Rows, global_sequences: int, seed: int) -> Sampler:
        micro, world = self.config.batch.micro, self.ranks.world
        return Sampler(num_samples=len(rows), global_sequences=global_sequences, micro=micro, world=world, seed=seed)

    # ---- faults and checkpoints

    def _after_nonfinite(self, step: int, outcome: StepOutcome) -> int | None:
        """Handles a bad step as configured. Returns the step to go back to, if any."""
        what = describe(step + 1, outcome.loss, outcome.grad_norm, outcome.broken)
        if self.counts.judge(what) == "skip":
            self._note(f"{what}: skipped, without an optimizer step")
            return None
        with collective("loading the newest checkpoint"):
            found = self.checkpoints.roll_back()
        if found is None:
            raise NonFiniteError(f"{what}, and no checkpoint has been made yet to go back to")
        if self._report:
            self._report.rewind(found.step)
        self._note(f"{what}: {self.counts.rolled_back(step, found.step)}")
        return found.step

    def _resume(self) -> int:
        """Loads the checkpoint that the run goes on from. Returns the steps done."""
        config, rules, directory = self.config, self.config.checkpoint, self.config.run.directory / "checkpoints"
        frozen = config.model.pretrained is None  # else a resume takes frozen parameters from there
        keep = {"keep": rules.keep, "keep_every": rules.keep_every}
        self.checkpoints = RunCheckpoints(
            Checkpoints(directory, self.model, self.optimizer, **keep, frozen=frozen),
            identity={
                "run.seed": config.run.seed,
                "data.seq_len": config.data.seq_len,
                "batch.global_sequences": config.batch.global_sequences,
                **self.corpus.identity(),
            },
            required={  # a bpe tokenizer is trained anew at each start, and is another if the files have changed
                TOKENIZER: "Its tokens mean other text: set data.tokenizer to the tokenizer.json in that run's "
                "directory, or start anew in another run.directory"
            },
            layout={"strategy": config.strategy, "mesh": mesh_text(config.mesh)},
            first=self.ranks.rank == 0,
        )
        with collective("opening and loading checkpoints"):
            found = self.checkpoints.resume(rules.resume, saves=rules.every > 0)
        self.counts.restore(found.state.get("faults", {}) if found else {})
        return found.step if found else 0

    def _close(self) -> None:
        with collective("saving the last checkpoint"):
            self.checkpoints.close()

    def _note(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def _header(self, done: int) -> list[str]:
        """Model, layout, data, batch and rank 0's device, in a few lines."""
        config, corpus, micro = self.config, self.corpus, f"up to {self.config.batch.micro} sequences of"
        parameters = sum(parameter.shape.numel() for parameter in self.model.parameters())
        tokens, vocabulary = corpus.training.tokens.numel(), corpus.tokenizer.vocab_size
        return [
            f"{type(self.model).__name__}, {parameters:,} parameters; mesh {mesh_text(config.mesh)}, strategy "
            f"{config.strategy}",
            f"{corpus.num_documents:,} documents, {tokens:,} tokens; vocabulary {vocabulary:,}",
            f"{self.tokens:,} tokens a step: {config.micro_batches} micro-batch{'es' * (config.micro_batches != 1)} of "
            f"{micro} {config.data.seq_len}",
            f"on each of {config.world} ranks ({device_name(self.ranks.device)})",
            *[f"all {config.run.steps} steps are done: nothing is left to do"] * (done >= config.run.steps),
        ]

    def _make_directory(self) -> None:
        directory, definition = self.config.run.directory, self.corpus.tokenizer.definition
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if definition is not None:
                write_whole(directory / "tokenizer.json", definition)
        except OSError as error:
            raise ConfigError(f"run.directory: cannot write {directory}: {error.strerror or error}") from error

    def _write_samples(self, done: int) -> None:
        samples = self.config.samples
        if samples.every and (done % samples.every == 0 or done == self.config.run.steps):
            self.model.eval()
            for prompt in samples.prompts:
                text = continuation(self.model, self.corpus.tokenizer, prompt, samples.tokens)
                if self._report:
                    self._report.sample(done, prompt, text)

    def _export(self, directory: Path) -> None:
        """Writes the model, or only its adapters, with its tokenizer, as `from_pretrained` loads them."""
        model: Any = self.model
        model.save_pretrained(directory, is_main_process=self.ranks.rank == 0)
        tokenizer, name = self.corpus.tokenizer, self.config.tokenizer
        from_first(lambda: tokenizer.save_pretrained(name, directory), "waiting for rank 0 to write the tokenizer")
        self._note(f"exported to {directory}")
