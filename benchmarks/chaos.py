"""Kills ranks of a training job at random moments, again and again: no announced checkpoint is lost, nothing changes.

    python benchmarks/chaos.py --kills 100 -o benchmarks/results/chaos.json

A job of two ranks trains a small model and saves after every step, so that about every second kill comes during a save.
After each kill of a random rank the others are killed too, as torchrun does, and the job starts again from the newest
checkpoint. Checked at each start: a checkpoint was found where one had been announced, not older than that, without a
warning. Checked at each end: parameters and optimizer states equal those of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm

WORLD = 2
TIMEOUT_S = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a soak run saw.

    Args:
        kills: ranks killed.
        kills_during_save: of those, how many left a half-written checkpoint behind.
        jobs: that ran to their end.
        restarts_from: steps that restarted jobs went on from.
        seconds: of the whole run.
    """

    kills: int
    kills_during_save: int
    jobs: int
    restarts_from: tuple[int, ...]
    seconds: float


class ChaosError(Exception):
    """A checkpoint was lost, or a result changed."""


def rank_main(rank: int, directory: str, attempt: int, steps: int) -> None:
    """One rank: resumes, trains, saves after every step, and says so once a checkpoint is complete."""
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
    context.set_forkserver_preload(["torch", "torch.distributed.device_mesh", "zeromesh.engine.checkpoint"])
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
    kills: int = 0
    during_save: int = 0
    resumed: list[int] = field(default_factory=list)

    def run(self, kills: int) -> None:
        """Starts the job until it ends; the first `kills` starts are killed, unless they end before."""
        for attempt in itertools.count():
            announced = max(_said(self.directory / "announced"), default=0)
            ranks = _start(self.directory, attempt, self.steps)
            try:
                ended = self._watch(ranks, attempt, killing=self.kills < kills)
                self._check_resumed(attempt, announced)
                if ended:
                    return
                self.generator.choice([process for process in ranks if process.is_alive()] or list(ranks)).kill()
            finally:
                _end(ranks)
            self.kills += 1
            self.during_save += any((self.directory / "checkpoints").glob(".saving-*"))

    def _watch(self, ranks: Sequence[ForkServerProcess], attempt: int, *, killing: bool) -> bool:
        """Returns at the moment for a kill (False), or when the job has ended (True)."""
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

    def _check_resumed(self, attempt: int, announced: int) -> None:
        resumed = _said(self.directory / f"resumed-{attempt}")
        if resumed and resumed[0] < announced:
            raise ChaosError(f"step {announced} had been announced, and the job went on from step {resumed[0]}")
        self.resumed += resumed


def soak(kills: int, directory: Path, *, steps: int = 60, seed: int = 0, kills_a_job: int = 10) -> Outcome:
    """Jobs one after another until `kills` ranks have been killed.

    Raises:
        ChaosError: a checkpoint was lost, a job failed, or its result differs.
    """
    started = time.monotonic()
    calm = _Job(directory=directory / "calm", steps=steps, generator=random.Random(seed), delay_s=0.0)
    calm.directory.mkdir()
    calm.run(0)
    expected = _digests(calm.directory)
    # From the first checkpoint's file to the last: so that a job has time for several kills, on any machine.
    delay_s = ((calm.directory / "announced").stat().st_mtime - (calm.directory / "resumed-0").stat().st_mtime) / 3
    jobs: list[_Job] = []
    while sum(job.kills for job in jobs) < kills:
        left = kills - sum(job.kills for job in jobs)
        jobs.append(
            _Job(directory=directory / f"job-{len(jobs)}", steps=steps, generator=calm.generator, delay_s=delay_s)
        )
        jobs[-1].directory.mkdir()
        jobs[-1].run(min(kills_a_job, left))
        if _digests(jobs[-1].directory) != expected:
            raise ChaosError(f"{jobs[-1].directory}: parameters or optimizer states differ from the undisturbed job's")
        print(f"{sum(job.kills for job in jobs)} kills, {len(jobs)} jobs", file=sys.stderr, flush=True)
    return Outcome(
        kills=sum(job.kills for job in jobs),
        kills_during_save=sum(job.during_save for job in jobs),
        jobs=len(jobs),
        restarts_from=tuple(step for job in jobs for step in job.resumed),
        seconds=round(time.monotonic() - started, 1),
    )


def _digests(directory: Path) -> list[str]:
    return [(directory / f"digest-{rank}").read_text() for rank in range(WORLD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asdict(soak(arguments.kills, Path(directory), seed=arguments.seed))
    text = json.dumps(outcome)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
