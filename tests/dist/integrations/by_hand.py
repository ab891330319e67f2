"""Too slow for each push: every integration on every model under every strategy, and resumed under another.

    python -m tests.dist.integrations.by_hand [trainer] [accelerate] [lightning] [fabric] [sft] [dpo]

A cell is an integration, a model and a strategy, on four ranks: 20 steps of two micro-batches with clipping, in fp32,
held against the library's own run in one process on the same samples, to 1e-6 in losses and norms of gradients. The run
saves after the tenth step and goes on; then two ranks, under another strategy, go on from there.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.dist.integrations import hugging, test_accelerate, test_lightning, test_transformers, test_trl
from tests.dist.integrations.hugging import (
    SAVED,
    STEPS,
    STRATEGIES,
    Curve,
    assert_same_curve,
    launched,
    plain,
    sharding,
)
from tests.dist.pool import Pool

TIMEOUT_S = 300.0

KINDS = ("llama", "tied", "lora")

ELSEWHERE = {STRATEGIES[0]: "node=3", STRATEGIES[1]: "node=3d", STRATEGIES[2]: "node=1"}
"""By the strategy that a run was saved under, the one that two ranks go on under."""


def hugging_run(run: Callable[..., Any], directory: Path, kind: str, how: Any, resume: bool) -> Curve:
    saving = {"save_strategy": "steps", "save_steps": SAVED} if how is not None else {}
    resuming = {"resume": str(directory / f"checkpoint-{SAVED}")} if resume else {}
    found = hugging.curve(run(directory, kind, how, max_steps=STEPS, **saving, **resuming))
    return found[SAVED:] if resume else found  # its log has the steps before


trainer = partial(hugging_run, test_transformers.trained)
sft, dpo = (partial(hugging_run, partial(test_trl.trained, method)) for method in ("sft", "dpo"))


def accelerate(directory: Path, kind: str, how: Any, resume: bool) -> Curve:
    loop = test_accelerate.Loop(kind, how)
    if how is None:
        return loop.run(STEPS)
    if resume:
        loop.accelerator.load_state(directory / "state")
        return loop.run(STEPS - SAVED, start=SAVED)
    found = loop.run(SAVED)
    loop.accelerator.save_state(directory / "state")
    return found + loop.run(STEPS - SAVED, start=SAVED)


def lightning(directory: Path, kind: str, how: Any, resume: bool) -> Curve:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    saving = {"callbacks": [saver], "enable_checkpointing": True} if how is not None else {}
    last = str(directory / f"step={SAVED}.ckpt") if resume else None
    return test_lightning.fitted(directory, kind, how, resume=last, **saving)[1].curve


def fabric(directory: Path, kind: str, how: Any, resume: bool) -> Curve:
    loop = test_lightning.FabricLoop(kind, how)
    if how is None:
        return loop.run(STEPS)
    found = []
    if resume:
        state = loop.state()
        loop.fabric.load(directory / "ten", state)
        loop.step = state["step"]
    else:
        found = loop.run(SAVED)
        loop.fabric.save(directory / "ten", loop.state())
    return found + loop.run(STEPS - SAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integration:
    run: Callable[[Path, str, Any, bool], Curve]
    """By directory, model, sharding (None: plain), and whether it goes on from the directory's checkpoint."""
    clip: float
    libraries: tuple[str, ...]


INTEGRATIONS = {
    "trainer": Integration(run=trainer, clip=hugging.CLIP, libraries=("transformers", "accelerate", "peft")),
    "accelerate": Integration(run=accelerate, clip=test_accelerate.CLIP, libraries=("accelerate", "peft")),
    "lightning": Integration(run=lightning, clip=test_lightning.CLIP, libraries=("lightning", "peft")),
    "fabric": Integration(run=fabric, clip=test_lightning.CLIP, libraries=("lightning", "peft")),
    "sft": Integration(run=sft, clip=hugging.CLIP, libraries=("trl", "transformers", "accelerate", "peft")),
    "dpo": Integration(run=dpo, clip=test_trl.PREFERRED_CLIP, libraries=("trl", "transformers", "accelerate", "peft")),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Some libraries print every step."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def alone(name: str, directory: Path, kind: str) -> Curve:
    with quiet():
        expected: Curve = plain(lambda: INTEGRATIONS[name].run(directory, kind, None, False))
    assert len(expected) == STEPS and max(norm for _, _, norm in expected) > INTEGRATIONS[name].clip
    return expected


def sharded(name: str, directory: Path, kind: str, strategy: str, expected: Curve, *, resume: bool = False) -> float:
    """The largest difference."""
    how = sharding(ELSEWHERE[strategy], {"node": 2}) if resume else sharding(strategy)
    with quiet(), test_lightning.started() if name in ("lightning", "fabric") else launched():
        found = INTEGRATIONS[name].run(directory, kind, how, resume)
    dist.barrier()
    return assert_same_curve(found, expected[SAVED:] if resume else expected)


def cells(pool: Pool, name: str) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """The name of each cell, and a function that runs it."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as root:
            (expected,) = pool.run(1, alone, name, Path(root, "plain"), kind, timeout_s=TIMEOUT_S)
            for strategy in STRATEGIES:
                own = (sharded, name, Path(root, strategy), kind, strategy, expected)
                yield f"{name}, {kind}, {strategy}", partial(pool.run, 4, *own, timeout_s=TIMEOUT_S)
                on = f"  on under {ELSEWHERE[strategy]}"
                yield on, partial(pool.run, 2, *own, resume=True, timeout_s=TIMEOUT_S)


def main() -> None:
    os.environ["ZEROMESH_BY_HAND"] = "1"  # ranks train for longer
    counts: Counter[str] = Counter()
    pool = Pool()
    for name in sys.argv[1:] or INTEGRATIONS:
        print(name, *(f"{library} {version(library)}" for library in INTEGRATIONS[name].libraries), flush=True)
        start = time.perf_counter()
        for what, run in cells(pool, name):
            try:
                print(f"{what}: {max(run()):.1e}", flush=True)
                counts["passed"] += 1
            except AssertionError as error:
                print(f"{what}: {error}", flush=True)
                counts["failed"] += 1
        print(f"{name}: {dict(counts)} so far, {time.perf_counter() - start:.0f} s", flush=True)
    pool.close()
    sys.exit(bool(counts["failed"]))


if __name__ == "__main__":
    from tests.dist.integrations import by_hand  # ranks import it by name

    by_hand.main()
