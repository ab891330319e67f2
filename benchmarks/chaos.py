"""Kills ranks of a training job at random moments, many times. No announced checkpoint may be lost, and no result may
change.

    python -m benchmarks.chaos --kills 100 -o benchmarks/results/chaos.json

A job of two ranks trains a small model and saves after every step, so that about every second kill comes during a save.
After each kill of a random rank the others are killed as well, as torchrun does, and the job starts again from the
newest checkpoint. These are checked:

- after each kill, from outside: the newest complete checkpoint is not older than any announced one, and every directory
  with a checkpoint's name is a complete checkpoint;
- at each start: the job went on from it, without a warning;
- at each end: parameters and optimizer states equal, to the bit, those of a job that nobody disturbed.

The output is rewritten after every kill, so results count even if the run is ended, or fails.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from benchmarks.harness import parser
from zeromesh.checkpoint.directory import list_checkpoints
from zeromesh.checkpoint.storage import LocalStorage
from zeromesh.files.users import write_whole
from zeromesh.measure.setting import read_setting

WORLD = 2
TIMEOUT_S = 50.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Counts of a soak run so far."""

    asked: int  # number of kills to make
    kills: int = 0  # ranks killed, each followed by a check of its directory
    kills_during_save: int = 0  # kills that left a half-written checkpoint behind
    kills_before_load: int = 0  # kills before the job had loaded its checkpoint
    kills_by_rank: list[int] = field(default_factory=lambda: [0] * WORLD)
    jobs: int = 0  # jobs that ran to their end, with the results of an undisturbed one
    restarts: int = 0  # starts that resumed from a checkpoint
    restarts_from: list[int] = field(default_factory=list)  # the steps that they resumed from
    seconds: float = 0.0
    failed: str = ""  # why the run ended early; "" if it did not


class ChaosError(Exception):
    """A checkpoint was lost, or a result changed."""


def rank_main(rank: int, directory: str, attempt: int, steps: int) -> None:
    """Runs one rank: resumes, trains, saves after every step, and announces each complete checkpoint."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(str(Path(directory) / f"store-{attempt}"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 64))
    zm.shard(model, init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("cluster", "node")), "node=3,cluster=0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    root = Path(directory)
    with zm.Checkpoints(root / "checkpoints", model, optimizer, keep=2) as checkpoints:
        found = checkpoints.load("auto")
        start = found.step if found else 0
        if rank == 0:
            _say(root / f"resumed-{attempt}", start)
        for step in range(start, steps):
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step * WORLD + rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints.wait() and rank == 0:
                _say(root / "announced", step)
            checkpoints.save(step + 1)
        checkpoints.wait()
        if rank == 0:
            _say(root / "announced", steps)
    (root / f"digest-{rank}").write_text(_digest(optimizer))
    dist.destroy_process_group()


def _say(path: Path, step: int) -> None:
    with path.open("a") as file:
        file.write(f"{step}\n")


def _said(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def _digest(optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for param, values in optimizer.state.items():
        for tensor in (param.local, *(values[key] for key in sorted(values))):  # type: ignore[attr-defined]
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _start(directory: Path, attempt: int, steps: int) -> list[ForkServerProcess]:
    context = get_context("forkserver")
    # Imported once. The first optimizer imports torch._dynamo, which takes seconds.
    preload = ["torch._dynamo", "torch.distributed.device_mesh", "zeromesh.checkpoint.checkpoints"]
    context.set_forkserver_preload(preload)
    ranks = []
    for rank in range(WORLD):
        ranks.append(context.Process(target=rank_main, args=(rank, str(directory), attempt, steps), daemon=True))
    for process in ranks:
        process.start()
    return ranks


def _end(ranks: Sequence[ForkServerProcess]) -> None:
    for process in ranks:
        process.kill()
        process.join()


@dataclass(slots=True, kw_only=True)
class _Job:
    """One job in one directory, through kills."""

    directory: Path
    steps: int
    generator: random.Random
    delay_s: float
    outcome: Outcome

    def run(self, kills: int, killed: Callable[[], None] = lambda: None) -> None:
        """Starts the job until it ends. The first `kills` starts are killed, unless they end before."""
        for attempt in itertools.count():
            announced = max(_said(self.directory / "announced"), default=0)
            ranks = _start(self.directory, attempt, self.steps)
            try:
                ended = self._watch(ranks, attempt, killing=attempt < kills)
                if not ended:
                    self._kill_one(ranks)
            finally:
                _end(ranks)
            self._check_resumed(attempt, announced)
            if ended:
                return
            self._check_directory()
            self.outcome.kills += 1
            self.outcome.kills_before_load += not (self.directory / f"resumed-{attempt}").exists()
            killed()

    def _kill_one(self, ranks: Sequence[ForkServerProcess]) -> None:
        running = [rank for rank, process in enumerate(ranks) if process.is_alive()] or list(range(WORLD))
        victim = self.generator.choice(running)
        ranks[victim].kill()
        self.outcome.kills_by_rank[victim] += 1

    def _watch(self, ranks: Sequence[ForkServerProcess], attempt: int, *, killing: bool) -> bool:
        """Returns False at the moment for a kill, or True when the job has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        # One start in five is killed before it has loaded its checkpoint.
        waits = killing and self.generator.random() > 0.2
        if killing and not waits:
            deadline = time.monotonic() + self.generator.uniform(0, self.delay_s)
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            if waits and (self.directory / f"resumed-{attempt}").exists():
                waits, deadline = False, time.monotonic() + self.generator.uniform(0, self.delay_s)
            time.sleep(0.001)
        codes = [process.exitcode for process in ranks]
        if any(code not in (None, 0) for code in codes) or (not killing and None in codes):
            raise ChaosError(f"ranks of {self.directory} that nobody disturbed ended with {codes}")
        return codes == [0] * WORLD

    def _check_directory(self) -> None:
        """Checks the directory while no rank runs: the next job would find it in this state."""
        checkpoints = self.directory / "checkpoints"
        listing = list_checkpoints(LocalStorage(checkpoints))
        if listing.refused:
            raise ChaosError("visible, but not complete: " + "; ".join(listing.refused))
        newest = listing.complete[0].step if listing.complete else 0
        announced = max(_said(self.directory / "announced"), default=0)
        if newest < announced:
            raise ChaosError(f"step {announced} had been announced; the newest in {checkpoints} is {newest}")
        self.outcome.kills_during_save += any(checkpoints.glob(".saving-*"))

    def _check_resumed(self, attempt: int, announced: int) -> None:
        resumed = _said(self.directory / f"resumed-{attempt}")
        if resumed and resumed[0] < announced:
            raise ChaosError(f"step {announced} had been announced, and the job went on from step {resumed[0]}")
        self.outcome.restarts += bool(attempt and resumed and resumed[0])
        self.outcome.restarts_from += resumed if attempt else []


def soak(
    kills: int,
    directory: Path,
    *,
    steps: int = 60,
    seed: int = 0,
    kills_a_job: int = 10,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Runs jobs one after another until `kills` ranks have been killed; `seed` determines the kills. After
    `kills_a_job` kills, a job may end. `report` is called after every kill and every job. Raises ChaosError if a
    checkpoint was lost, a job failed, or its result differs."""
    started = time.monotonic()
    outcome = Outcome(asked=kills)

    def tell() -> None:
        outcome.seconds = round(time.monotonic() - started, 1)
        report(outcome)

    make = partial(_Job, steps=steps, generator=random.Random(seed))
    calm = make(directory=directory / "calm", delay_s=0.0, outcome=Outcome(asked=0))
    calm.directory.mkdir()
    calm.run(0)
    expected = _digests(calm.directory)
    # From the first checkpoint's file to the last, so that a job has time for several kills on any machine.
    delay_s = ((calm.directory / "announced").stat().st_mtime - (calm.directory / "resumed-0").stat().st_mtime) / 3
    try:
        while outcome.kills < kills:
            job = make(directory=directory / f"job-{outcome.jobs}", delay_s=delay_s, outcome=outcome)
            job.directory.mkdir()
            job.run(min(kills_a_job, kills - outcome.kills), tell)
            if _digests(job.directory) != expected:
                raise ChaosError(f"{job.directory}: parameters or optimizer states differ from the undisturbed job's")
            outcome.jobs += 1
            tell()
    except ChaosError as error:
        outcome.failed = str(error)
        tell()
        raise
    return outcome


def _digests(directory: Path) -> list[str]:
    return [(directory / f"digest-{rank}").read_text() for rank in range(WORLD)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()

    def report(outcome: Outcome) -> None:
        print(f"{outcome.kills} kills, {outcome.jobs} jobs, {outcome.seconds} s", file=sys.stderr, flush=True)
        if arguments.out:
            text = json.dumps({"setting": read_setting(), **asdict(outcome)}, indent=2)
            write_whole(arguments.out, text + "\n")

    with tempfile.TemporaryDirectory() as directory:
        outcome = soak(arguments.kills, Path(directory), seed=arguments.seed, report=report)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
