"""A forward, a backward, a step or the process may end at any moment, for any reason: all that follows is right, or
refused until `zm.zero_grad(model)`; no process aborts, hangs, or ends with a code that is not its own."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.features.test_misuse import STAGES, WIDTH, inputs, sharded
from tests.dist.parity import same_params, sgd
from tests.dist.pool import on_ranks
from zeromesh.engine import beside
from zeromesh.errors import MismatchError, ModelError, OptimizerError

MOMENTS = ("forward", "loss", "backward", "between", "second forward", "second backward", "step", "after")
"""Moments of a step with two micro-batches: `between` them, in its optimizer's `step`, `after` it."""

RAISED: dict[str, type[BaseException]] = {"exception": ValueError, "interrupt": KeyboardInterrupt, "exit": SystemExit}


def nothing(moment: str) -> None:
    """Goes on."""


class Net(nn.Module):
    """Three blocks; calls `at` in the middle of its forward, and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.at: Callable[[str], None] = nothing

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1:
                self.at("forward")
                x.register_hook(lambda grad: self.at("backward"))
        return x


def train_step(
    model: Net, optimizer: torch.optim.Optimizer, seed: int, ranks: Sequence[int], at: Callable[[str], None]
) -> None:
    """One step, on the micro-batches of `ranks`: all of them for plain training."""
    whole = len(ranks) == dist.get_world_size()
    hook = optimizer.register_step_pre_hook(lambda *_: at("step"))
    try:
        for micro, prefix in enumerate(("", "second ")):
            model.at = lambda moment, prefix=prefix: at(prefix + moment)  # type: ignore[misc]
            with nullcontext() if whole else zm.accumulate(model, last=micro == 1):
                outputs = [model(inputs(100 * seed + 10 * micro + rank)) for rank in ranks]
                at(f"{prefix}loss")
                (sum(out.square().sum() for out in outputs) / len(ranks)).backward()
            at(f"{prefix}between")
        optimizer.step()
    finally:
        hook.remove()
    at("after")
    optimizer.zero_grad()


def raising(error: BaseException, when: str) -> Callable[[str], None]:
    def at(moment: str) -> None:
        if moment == when:
            raise error

    return at


@pytest.mark.parametrize("kind", RAISED)
@STAGES
@on_ranks(2)
def test_a_step_that_is_caught(strategy, kind):
    """Plain training after it: sums of whole micro-batches stay, a torn one has to be dropped.

    A third of the moments, so that any two of strategy, kind and moment come together.
    """
    base = Net().double()
    for moment in MOMENTS[("310".index(strategy[-1]) + list(RAISED).index(kind)) % 3 :: 3]:
        error = RAISED[kind](f"at {moment}")
        plain = copy.deepcopy(base)
        model = sharded(base, strategy)
        runs = ((model, sgd(model.parameters()), [dist.get_rank()]), (plain, sgd(plain.parameters()), range(2)))
        for net, optimizer, ranks in runs:
            train_step(net, optimizer, 0, ranks, nothing)
            with pytest.raises(RAISED[kind], match=moment):
                train_step(net, optimizer, 1, ranks, raising(error, moment))
            torn = moment == "second backward"
            if net is plain and "backward" in moment:
                net.zero_grad()
            if net is model and torn:
                with pytest.raises(ModelError, match=r"zm\.zero_grad\(model\)"):
                    train_step(net, optimizer, 2, ranks, nothing)
                with pytest.raises((ModelError, OptimizerError), match=r"zm\.zero_grad\(model\)"):
                    optimizer.step()
                zm.zero_grad(net)
            if moment == "forward":
                optimizer = sgd(net.parameters())  # of slices, which the units that were in use show again
            for seed in (2, 3):
                train_step(net, optimizer, seed, ranks, nothing)
        same_params(model, plain, 1e-12)


@on_ranks(2)
def test_a_model_that_is_dropped_in_a_step():
    """The next one, which takes over its communicators, is right."""
    base = Net().double()
    for at, moment in enumerate(MOMENTS):
        strategy = ("node=3", "node=1", "node=0")[at % 3]
        model = sharded(base, strategy)
        with pytest.raises(ValueError, match=moment):
            train_step(model, sgd(model.parameters()), 0, [dist.get_rank()], raising(ValueError(moment), moment))
        del model
        gc.collect()
        plain, model = copy.deepcopy(base), sharded(base, strategy)
        for net, ranks in ((model, [dist.get_rank()]), (plain, range(2))):
            optimizer = sgd(net.parameters())
            train_step(net, optimizer, 0, ranks, nothing)
        same_params(model, plain, 1e-12)
        del model, net, optimizer


# ---- a step beside the forward


@pytest.mark.parametrize("strategy", ["host=3,node=3", "host=1,node=1;step=device"])
@on_ranks(2)
def test_a_first_step_in_the_host_s_memory_fails_on_all_ranks_or_on_none(strategy):
    """One rank's machine has no room for the states."""
    model = sharded(Net().double(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(inputs()).sum().backward()
    full = dist.get_rank() == 1
    said = "2 rank" if full else "on rank 1 it did not: ModelError: 2 rank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "free_bytes", lambda device: 0 if full else None)
        with pytest.raises(ModelError if full else MismatchError, match=said):
            optimizer.step()


# ---- processes

ENDED = {"end": 0, "destroyed": 0, "exception": 1, "interrupt": -signal.SIGINT, "exit": 3, "fork": 0}
"""The code that a process ends with."""

PROCESS_STAGES = ("node=1", "node=3")
PROCESS_MOMENTS = ("backward", "between", "after")
LIMIT_S = 300.0


class Stop(Exception):
    """Ends the training, and not the process by itself."""


def script(rank: int, strategy: str, ending: str, moment: str) -> None:
    """One rank's process, which ends when this returns."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("node",))
    torch.manual_seed(0)
    model = zm.shard(Net().double(), mesh, strategy, bucket_bytes=0)
    optimizer = sgd(model.parameters())
    train_step(model, optimizer, 0, [rank], nothing)

    def at(reached: str) -> None:
        if reached != moment:
            return
        if ending == "destroyed":
            dist.destroy_process_group()
        if ending in ("end", "destroyed"):
            raise Stop
        if ending == "fork":
            fork_and_wait()
            return
        if ending == "interrupt":
            signal.raise_signal(signal.SIGINT)
        raise SystemExit(3) if ending == "exit" else ValueError("at the end of its tether")

    try:
        train_step(model, optimizer, 1, [rank], at)
    except Stop:
        return
    train_step(model, optimizer, 2, [rank], nothing)


def fork_and_wait() -> None:
    """As a data loader's worker that has inherited the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        worker = multiprocessing.get_context("fork").Process(target=gc.collect)
        worker.start()
    worker.join()
    assert worker.exitcode == 0


def exit_codes(world: int, store: Path, run: Callable[[int], None]) -> list[int] | None:
    """Exit codes of so many ranks, each in its own process; None in those processes, which go on to their end.

    Their output lies in files beside `store`.
    """
    children = []
    for rank in range(world):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            printed = os.open(f"{store}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(printed, stream)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            run(rank)
            return None
        children.append(child)
    return [wait_for(child) for child in children]


def wait_for(child: int) -> int:
    ends = time.monotonic() + LIMIT_S
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def cells() -> Iterator[tuple[str, str, str]]:
    """Strategy, ending and moment: each ending once, each moment with both strategies."""
    for at, ending in enumerate(ENDED):
        yield PROCESS_STAGES[at // 3], ending, PROCESS_MOMENTS[at % 3]


SURROUNDINGS = """
from dataclasses import dataclass
import torch

@dataclass
class Output:
    loss: torch.Tensor

class Model(torch.nn.Sequential):
    def forward(self, x):
        return Output(super().forward(x).square().mean())

model = Model(*(torch.nn.Linear(8, 8) for _ in range(4)))
data = [[{"x": torch.randn(2, 8)}] * 2] * 3
"""


def loop_of_the_readme(rank: int) -> None:
    """As a script, whose last statement is the last step's: its results are there until the interpreter ends."""
    readme = Path(__file__).parents[3].joinpath("README.md").read_text()
    loop = readme.split("```python\n")[1].split("```")[0]
    lines = loop.replace('"cuda", (16, 8)', '"cpu", (1, 2)').splitlines()
    kept = [line for line in lines if not re.search("LOCAL_RANK|set_device|device_id", line)]  # they are a group
    assert len(lines) - len(kept) == 3 and '"cpu", (1, 2)' in "".join(kept) and "optimizer.step()" in loop
    exec(SURROUNDINGS + "\n".join(kept), vars(sys.modules["__main__"]))


README = "the loop of the README"


def run_all(directory: Path) -> None:
    """Forked from one process that has imported everything; a child falls through to the end of the interpreter."""
    parameter = nn.Parameter(torch.zeros(1))
    sgd([parameter]).step()  # imports modules that torch imports late
    gc.freeze()  # else each child spends a second on inherited objects
    runs = {", ".join(cell): (2, lambda rank, cell=cell: script(rank, *cell)) for cell in cells()}
    found = {}
    for name, (world, run) in {**runs, README: (2, loop_of_the_readme)}.items():
        codes = exit_codes(world, directory / name, run)
        if codes is None:
            return
        found[name] = codes
    print(json.dumps(found))


def test_processes_end_with_their_own_code(tmp_path):
    command = [sys.executable, "-m", "tests.dist.features.test_endings", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {", ".join(cell): [ENDED[cell[1]]] * 2 for cell in cells()} | {README: [0] * 2}
    printed = [path.read_text() for path in tmp_path.glob(f"{README}-*.txt")]
    assert json.loads(done.stdout.splitlines()[-1]) == expected, printed


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
