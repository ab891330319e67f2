"""What is too slow for each push: every optimizer on all of one model's tensors, ten steps, under every strategy.

    python -m tests.dist.owners.by_hand [parity] [bytes] [resume]

parity: of `test_parity`'s model (odd, tied, frozen and unused tensors, a number, and fewer tensors than ranks), with
parameters and states held against one process that has all data, after each step. bytes: on each axis, of the first and
of another step, exactly those of `elements_that_move`. resume: saved under each strategy, and continued under the next.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.features.parity import same_params, same_state
from tests.dist.owners.optimizers import SOAP
from tests.dist.owners.test_checkpoint import SAVED, owned, resume_all, save_all
from tests.dist.owners.test_parity import (
    KINDS,
    MICRO_BATCHES,
    STEPS,
    STRATEGIES,
    backward,
    in_one_process,
    net,
    optimizers_of,
    same_states,
    shard,
)
from tests.dist.owners.test_use import elements_that_move
from tests.dist.pool import Pool, kept, told_by_first
from zeromesh.engine.api import engine_of

TIMEOUT_S = 300.0


def every() -> Iterator[tuple[int, tuple[int, ...], str]]:
    """World, mesh and strategy."""
    for sizes, strategies in STRATEGIES.items():
        for strategy in strategies:
            yield torch.Size(sizes).numel(), sizes, strategy


def parity(kind: str, sizes: tuple[int, ...], strategy: str) -> None:
    """The steps of one process."""
    expected = kept(told_by_first, in_one_process, kind, dist.get_world_size(), STEPS)
    model = shard(net(), sizes, strategy)
    optimizers = optimizers_of(kind, model, owned(kind))
    for step in range(STEPS):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_params(model, expected.params[step])
    same_states(model, optimizers[0], expected.model, expected.optimizer)
    same_state(model, expected.model)


def moved(sizes: tuple[int, ...], strategy: str) -> None:
    """Gradients there and values back, in the first step values there too, of what lies elsewhere than its owner."""
    model = shard(net(), sizes, strategy)
    trained = [param for name, param in model.named_parameters() if param.requires_grad and "unused" not in name]
    before = zm.traffic_report(model, micro_batches=MICRO_BATCHES).lines()
    optimizer = zm.by_owner(SOAP, trained, bucket_bytes=400)
    layout = engine_of(model).schedule.layout
    elements, copies = elements_that_move(model, optimizer), layout.degree(layout.replica_axes)
    for step in range(2):
        engine_of(model).at_rest(follow=True)
        with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        lines = traffic.lines()
        assert step == 0 or all(line.sent_bytes == line.predicted_bytes for line in lines)
        more = torch.tensor([line.sent_bytes - old.predicted_bytes for line, old in zip(lines, before, strict=True)])
        dist.all_reduce(more)
        assert more.tolist() == [copies * (16 if step else 24) * elements[line.axis] for line in lines]


def run_parity(pool: Pool) -> Iterator[str]:
    for kind in KINDS:
        for world, sizes, strategy in every():
            pool.run(world, parity, kind, sizes, strategy, timeout_s=TIMEOUT_S)
            yield f"{kind} under {strategy} on {sizes}"


def run_bytes(pool: Pool) -> Iterator[str]:
    for world, sizes, strategy in every():
        pool.run(world, moved, sizes, strategy, timeout_s=TIMEOUT_S)
        yield f"bytes under {strategy} on {sizes}"


def run_resume(pool: Pool) -> Iterator[str]:
    """The data are those of four ranks, whatever the world."""
    found = [(world, sizes, strategy) for world, sizes, strategy in every() if world == 4]
    for (_, saved, old), (world, sizes, new) in zip(found, [*found[1:], (2, (2,), "node=3")], strict=True):
        with tempfile.TemporaryDirectory() as directory:
            pool.run(4, save_all, Path(directory), saved, old, timeout_s=TIMEOUT_S)
            pool.run(world, resume_all, Path(directory), sizes, new, timeout_s=TIMEOUT_S)
        yield f"saved under {old} on {saved}, continued after step {SAVED} under {new} on {sizes}"


PARTS: dict[str, Callable[[Pool], Iterator[str]]] = {"parity": run_parity, "bytes": run_bytes, "resume": run_resume}


def main() -> None:
    counts: Counter[str] = Counter()
    pool = Pool()
    for part in sys.argv[1:] or PARTS:
        start = time.perf_counter()
        for line in PARTS[part](pool):
            counts[part] += 1
            print(line, flush=True)
        print(f"{part}: {counts[part]} passed in {time.perf_counter() - start:.0f} s", flush=True)
    pool.close()


if __name__ == "__main__":
    from tests.dist.owners import by_hand  # ranks import it by name

    by_hand.main()
