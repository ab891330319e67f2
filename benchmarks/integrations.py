"""The overhead of Trainer, Accelerate and Fabric over our own loop, compared with their overhead over plain PyTorch.

    make bench-integrations ARGS="-o benchmarks/results/integrations.json"     # about six minutes

Two gloo ranks, a Llama of 3.7 M parameters in fp32, one batch of 4 x 64 tokens per rank, clipping, and torch's AdamW
(not its fused one, which is the Trainer's default). Eight sides take turns, some steps each: a loop and three
libraries, once in DistributedDataParallel and once sharded. A side's figure is the median of its steps. `adds` is a
library's step over its loop's. `beyond` is how much more the sharded one adds than the plain one: the ratio of the two
over paired rounds, with quartiles.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

import zeromesh as zm
from benchmarks.harness import in_turns, on_ranks, parser, save
from zeromesh.launch.ranks import Ranks

RANKS = 2
BATCH, LENGTH = 4, 64
LIBRARIES = ("trainer", "accelerate", "fabric")
Side = Callable[[int], list[float]]
"""Runs some steps, and returns their seconds."""


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 2048, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def loader(steps: int) -> Any:
    return torch.utils.data.DataLoader(samples(steps * BATCH), batch_size=BATCH)  # type: ignore[arg-type]


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def clocked(batches: Iterator[Any] | Any, step: Callable[[Any], None]) -> list[float]:
    """Seconds between the starts of steps, so that getting a batch counts."""
    begun = []
    for batch in batches:
        begun.append(perf_counter())
        step(batch)
    begun.append(perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(begun)]


def loop(sharding: zm.Sharding | None) -> Side:
    model: Any = DistributedDataParallel(build()) if sharding is None else sharding.on("cpu").shard(build())
    optimizer = optimizer_of(model)

    def step(batch: Any) -> None:
        model(**batch).loss.backward()
        if sharding is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            zm.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda steps: clocked(loader(steps), step)


def trainer(sharding: zm.Sharding | None) -> Side:
    from zeromesh.integrations.transformers import Trainer

    begun: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # not followed by mypy
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.append(perf_counter())

    def run(steps: int) -> list[float]:
        begun.clear()
        made.args.max_steps = steps + 1
        made.train()
        return [later - earlier for earlier, later in itertools.pairwise(begun)]

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, learning_rate=1e-4, max_grad_norm=1.0,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
        dataloader_pin_memory=False, lr_scheduler_type="constant", max_steps=1, optim="adamw_torch",
    )  # fmt: skip
    options: dict[str, Any] = {
        "model": build(), "args": arguments, "train_dataset": samples(4096), "callbacks": [Clock()],
    }  # fmt: skip
    made = transformers.Trainer(**options) if sharding is None else Trainer(sharding=sharding, **options)
    made.remove_callback(transformers.PrinterCallback)
    return run


def accelerate(sharding: zm.Sharding | None) -> Side:
    import accelerate as library

    from zeromesh.integrations.accelerate import Accelerator

    made: Any = library.Accelerator(cpu=True) if sharding is None else Accelerator(sharding=sharding, cpu=True)
    plain = build()
    model, optimizer = made.prepare(plain, optimizer_of(plain))

    def step(batch: Any) -> None:
        with made.accumulate(model):
            made.backward(model(**batch).loss)
            made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return lambda steps: clocked(made.prepare_data_loader(loader(steps * RANKS)), step)


def fabric(sharding: zm.Sharding | None) -> Side:
    import lightning

    from zeromesh.integrations.lightning import FabricStrategy

    strategy: Any = "ddp" if sharding is None else FabricStrategy(sharding=sharding)
    made = lightning.Fabric(strategy=strategy, devices=RANKS, accelerator="cpu")
    made.launch()
    plain = build()
    model, optimizer = made.setup(plain, optimizer_of(plain))

    def step(batch: Any) -> None:
        made.backward(model(**batch).loss)
        made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda steps: clocked(made.setup_dataloaders(loader(steps * RANKS)), step)


def measure(_ranks: Ranks, *, strategy: str, rounds: int, steps: int) -> dict[str, Any]:
    """A task of all ranks."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    sharding = zm.Sharding(strategy=strategy, mesh={"node": RANKS})
    makers = {"loop": loop, "trainer": trainer, "accelerate": accelerate, "fabric": fabric}
    sides = {(name, kind): make(how) for kind, how in (("plain", None), ("sharded", sharding))
             for name, make in makers.items()}  # fmt: skip

    def turn(side: Side) -> float:
        dist.barrier()
        return statistics.median(side(steps)[2:])

    medians: dict[Any, list[float]] = in_turns({key: partial(turn, side) for key, side in sides.items()}, rounds)
    found: dict[str, Any] = {"strategy": strategy, "ranks": RANKS}
    found["ms"] = {f"{kind} {name}": 1e3 * statistics.median(medians[name, kind]) for name, kind in sides}
    for name in LIBRARIES:
        adds = {
            kind: [a / b for a, b in zip(medians[name, kind], medians["loop", kind], strict=True)]
            for kind in ("plain", "sharded")
        }
        beyond = [ours / theirs for ours, theirs in zip(adds["sharded"], adds["plain"], strict=True)]
        found[name] = {
            "adds_plain": statistics.median(adds["plain"]),
            "adds_sharded": statistics.median(adds["sharded"]),
            "beyond": statistics.median(beyond),
            "beyond_quartiles": statistics.quantiles(beyond, n=4)[::2],
        }
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--strategy", default="node=3")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--steps", type=int, default=16)
    given = options.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "1"
    asked = {"strategy": given.strategy, "rounds": given.rounds, "steps": given.steps}
    save(given.out, **on_ranks("benchmarks.integrations:measure", {"node": RANKS}, **asked))


if __name__ == "__main__":
    main()
