"""torchtitan's own Trainer, with a ZeRO stage for each of its data-parallel axes.

    torchrun --nproc-per-node 4 examples/torchtitan_llama.py

For torchtitan 0.3.0 (`make venv` installs it, from tools/torchtitan.txt). Take from here `parallelize`, as the
`parallelize_fn` of a `ModelSpec`, and `Trainer` and `Checkpoints` in the place of torchtitan's. These handle the three
places where torchtitan expects FSDP2: it sums gradients where zeromesh averages them, does not tell which micro-batch
is the last, and saves DTensors.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as machine
from torch import Tensor, nn

import zeromesh as zm

if not torch.accelerator.is_available():  # torchtitan needs an accelerator: here the CPU plays one
    machine.device_type = "cpu"
    machine.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_stats=lambda device: defaultdict(int),
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    )

if not hasattr(torch.distributed, "set_timeout"):  # which torch 2.13 has under an older name
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer as TorchtitanTrainer

STRATEGY = "fsdp=3,dp_replicate=1"
"""torchtitan's axes, innermost first. torchtitan replicates over the outer one; here it also shards the optimizer."""

VOCABULARY, SEQUENCE, ROWS, MICRO_BATCHES = 2048, 32, 4, 2


def parallelize(
    model: Any,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Any:
    """The Trainer calls this with a model on the meta device, before it allocates memory and initialises values."""
    if parallelism.spmd_backend != "partial_dtensor" or training.enable_cpu_offload:
        raise ValueError("zeromesh needs parallelism.spmd_backend='partial_dtensor', and does not offload to the CPU")
    if parallel_dims.non_data_parallel_size > 1 or parallel_dims.ep_enabled or compile_config.enable:
        raise ValueError("this example shards over dp_replicate and dp_shard alone: set other degrees to 1, no compile")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    mesh = parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"])
    axes = STRATEGY if parallel_dims.dp_replicate_enabled else STRATEGY.split(",")[0]
    zm.shard(
        model,
        mesh,
        axes,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        units=(Llama3TransformerBlock,),
        init=initialise,
    )
    # The model has memory and values now, the same on any number of ranks.
    model.to_empty = lambda device: model
    model.init_weights = lambda buffer_device: None
    return model


def initialise(module: Any) -> None:
    """torchtitan's `init_states` of one module, without its children."""
    if isinstance(module, nn.Module) and hasattr(module, "_init_self_parameters"):
        module._init_self_parameters()
        module._init_self_buffers()


def after_optimizers(optimizers: Any, model_parts: list[nn.Module], parallel_dims: ParallelDims) -> None:
    """To torch, torchtitan's container is an optimizer of all parameters, but it steps none: its optimizers do."""
    optimizers.param_groups.clear()


class Trainer(TorchtitanTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanTrainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        if isinstance(config.loss, ChunkedLossWrapper.Config):
            raise ValueError(
                "ChunkedLossWrapper calls lm_head outside the model, where it is sharded: give its loss_fn"
            )
        super().__init__(config)
        self.micro_batches = 0

    def _forward_backward_body(
        self, inputs: Tensor, labels: Tensor, global_valid_tokens: Tensor, extra_kwargs: dict[str, Any]
    ) -> Tensor:
        """Reduces with the last micro-batch of a step. torchtitan's loss is this rank's sum divided by all ranks'
        tokens, to be summed over ranks. zeromesh averages over ranks, so here it is divided by their mean number of
        tokens."""
        self.micro_batches += 1
        ranks = self.parallel_dims.get_mesh("batch").size()
        with zm.accumulate(self.model_parts[0], last=self.micro_batches % self.gradient_accumulation_steps == 0):
            loss = super()._forward_backward_body(inputs, labels, global_valid_tokens / ranks, extra_kwargs)
        return loss / ranks


class Checkpoints(BaseCheckpointManager):
    """zeromesh's checkpoints of the model and its optimizers, with torchtitan's own state of the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

    def __init__(
        self, config: Config, *, dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder
    ) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        self.interval = config.interval
        self.states = {"dataloader": dataloader, "lr_scheduler": lr_schedulers, **states}
        self.directory = Path(base_folder) / config.folder
        self.checkpoints = zm.Checkpoints(
            self.directory, model_parts[0], list(optimizers), keep=config.keep_latest_k or 10**9
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step % self.interval and not last_step:
            return False
        self.checkpoints.save(curr_step, {name: held.state_dict() for name, held in self.states.items()})
        return True

    def _load(self, step: int = -1) -> bool:
        found = self.checkpoints.load("auto" if step == -1 else self.directory / f"step-{step:08}")
        for name, held in self.states.items() if found else ():
            held.load_state_dict(found.state[name])
        return found is not None

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to do: the next save waits by itself."""

    def _wait_for_saving(self) -> None:
        self.checkpoints.wait()

    def _close(self) -> None:
        self.checkpoints.close()


# ---- a real run has its own data and configuration; the rest of this file is for the demonstration


def rows(index: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of micro-batch `index`, for all ranks. They count up from a random start; the first labels of
    each row are ignored."""
    generator = torch.Generator().manual_seed(index)
    first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    tokens = (first + torch.arange(SEQUENCE + 1)) % VOCABULARY
    unlearned = torch.randint(0, SEQUENCE // 2, (ROWS, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(SEQUENCE) < unlearned, IGNORE_INDEX)


class Counting(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.ranks, self.rank, self.done = dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens, labels = rows(self.done)
            self.done += 1
            yield {"input": tokens[self.rank :: self.ranks]}, labels[self.rank :: self.ranks]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None


class Metrics(MetricsProcessor):
    """torchtitan's metrics, which also keep the losses and norms that are logged."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logged: dict[int, tuple[float, float]] = {}

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any) -> None:
        super().log(step, global_avg_loss, global_max_loss, grad_norm, **more)
        self.logged[step] = global_avg_loss, grad_norm


def configuration(ranks: int, steps: int, folder: str) -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.parallelize_fn, spec.post_optimizer_build_fn = parallelize, after_optimizers
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # flex attention, torchtitan's choice, is compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        metrics=Metrics.Config(log_freq=1),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=8),
        training=TrainingConfig(
            local_batch_size=ROWS // ranks,
            global_batch_size=ROWS * MICRO_BATCHES,
            seq_len=SEQUENCE,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=2 if ranks >= 4 else 1, spmd_backend="partial_dtensor"
        ),
        checkpoint=Checkpoints.Config(enable=True, interval=2, last_save_model_only=False),
        debug=DebugConfig(seed=0),
    )


def plainly(config: Trainer.Config, weights: dict[str, Tensor], steps: int) -> dict[int, tuple[float, float]]:
    """Losses and norms of the same model from the same weights, trained by plain PyTorch in this process."""
    model = config.model_spec.model.build()
    model.init_states()
    model.load_state_dict(weights)
    optimizer = config.optimizer.build(model_parts=[model])
    scheduler = config.lr_scheduler.build(optimizers=optimizer, training_steps=config.training.steps)
    logged = {}
    for step in range(1, steps + 1):
        batches = [rows(MICRO_BATCHES * (step - 1) + i) for i in range(MICRO_BATCHES)]
        counted = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        total = 0.0
        for tokens, labels in batches:
            logits = model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / counted
            loss.backward()
            total += float(loss)
        # In double precision: torch's own norm of half a million numbers is off by 1e-4 on a CPU.
        norm = nn.utils.get_total_norm([param.grad.double() for param in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), config.training.max_norm, norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        logged[step] = total, float(norm)
    return logged


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default="runs/torchtitan", help="a run goes on from the checkpoint that is in it")
    parser.add_argument("--check", action="store_true", help="train plainly too, and compare losses and norms")
    options = parser.parse_args()
    init_logger()
    trainer = Trainer(configuration(int(os.environ["WORLD_SIZE"]), options.steps, options.folder))
    weights = zm.full_state_dict(trainer.model_parts[0])  # on the first rank
    trainer.train()
    logged = trainer.metrics_processor.logged
    trainer.close()
    if options.check and torch.distributed.get_rank() == 0:
        plain = plainly(trainer.config, weights, options.steps)
        for step, found in logged.items():
            print(f"step {step}  loss and norm {found}, plainly {plain[step]}")
            torch.testing.assert_close(torch.tensor(found), torch.tensor(plain[step]), rtol=3e-5, atol=0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
