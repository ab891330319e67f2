"""Worker processes that live as long as the test session, so that a test on several ranks costs milliseconds.

A test is a plain function that every rank runs, with torch's default process group (gloo) of the asked size::

    from tests.dist.pool import on_ranks

    @on_ranks(4)
    def test_sum():
        tensor = torch.tensor([dist.get_rank()])
        dist.all_reduce(tensor)
        assert tensor.item() == 6

Fixtures and parameters of the test are pickled and handed to every rank. `@given(...)` goes above `@on_ranks`: the
examples are drawn once, here. Where the world varies or results are wanted here, use the fixture `pool`::

    def body(scale):                                 # at module level: workers import it by name
        return dist.get_rank() * scale

    @pytest.mark.parametrize("world", [2, 3])
    def test_ranks(pool, world):
        assert pool.run(world, body, 10) == [0, 10, 20][:world]

A process group costs 10 to 100 ms to set up, so calls in a row of one world share it, and a test gets meshes and
further groups through `kept` (hashable arguments only), which makes each once per process group::

    mesh = kept(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("cluster", "node"))

Processes outnumber cores, so work that one rank can do for all, such as plain training, the first does alone
(`told_by_first`).

A test that leaves a group unusable (a collective that timed out on purpose) says `spoils=True`. Ranks rendezvous
through a FileStore: no port to guess. Warnings are errors on the ranks too, unless ZEROMESH_TEST_WARNINGS=default. If a
rank fails or the time is over, every rank's traceback (of those that hang: the stacks of all threads) is in the
message, and the pool is built anew.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

MAX_WORLD = 16
PRELOAD = ["torch._dynamo", "hypothesis", "pytest", "zeromesh.train.loop", "zeromesh.cli.app", __name__]
LIBRARIES = ["transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "lightning.pytorch"]
"""Preloaded too where their tests were collected: each takes seconds, and many ranks need it."""
TIMEOUT_S = 600.0
"""When a test counts as hung: the slowest takes 70 s on two idle cores, and CI may have a busy machine."""
CALLS = 50
"""Calls that share a process group: meshes that tests make leave groups in it, with threads and connections."""
GRACE_S = 10.0
"""How long the other ranks may take to notice that one has failed."""

set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
"""Sets the timeout of a process group; torch has a public name for it from 2.15 on."""

P = ParamSpec("P")
T = TypeVar("T")
Body = Callable[..., Any]
_bodies: dict[tuple[str, str], Body] = {}


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds the report of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    module: str
    name: str
    payload: bytes
    world: int
    store: str
    timeout_s: float
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    value: Any = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: ForkServerProcess
    pipe: connection.Connection
    stacks: Path


class Pool:
    """Up to `MAX_WORLD` workers, started when first needed. A call uses the first `world` of them."""

    def __init__(self) -> None:
        self._context = fork_context()
        self._workers: list[_Worker] = []
        self._directory = Path(tempfile.mkdtemp(prefix="zeromesh-pool-"))
        self._numbers = itertools.count()
        self._group: tuple[tuple[int, float, str], str] | None = None
        self._calls = 0

    def run(
        self,
        world: int,
        fn: Body,
        /,
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        spoils: bool = False,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `fn(*args, **kwargs)` on ranks 0 to world - 1.

        Args:
            world: number of ranks, 1 to 16.
            fn: a function at the top level of an importable module.
            timeout_s: for the whole call, and for each collective of the default group.
            spoils: the process group cannot be used by later calls.
            backend: of the default group.

        Returns:
            The results, by rank.

        Raises:
            RanksFailed: with the traceback of every rank that failed.
        """
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close()
        job = _Job(
            module=fn.__module__,
            name=fn.__qualname__,
            payload=pickle.dumps((args, kwargs)),
            world=world,
            store=self._store(world, timeout_s, backend),
            timeout_s=timeout_s,
            backend=backend,
        )
        try:
            outcomes = self._exchange(self._first(world), pickle.dumps(job), timeout_s)
        except BaseException:  # a test's own timeout or Ctrl-C leaves the workers in an unknown state
            self.close()
            raise
        self._calls += 1
        if spoils or self._calls % CALLS == 0:
            self._group = None
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
            raise RanksFailed(_report(fn, outcomes))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Ends all workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()
        self._group = None

    def remove(self) -> None:
        """Ends all workers and deletes the pool's directory; the pool cannot be used afterwards."""
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _store(self, world: int, timeout_s: float, backend: str) -> str:
        group = world, timeout_s, backend
        if self._group is None or self._group[0] != group:
            self._group = group, str(self._directory / f"store-{next(self._numbers)}")
        return self._group[1]

    def _first(self, world: int) -> list[_Worker]:
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world must be 1 to {MAX_WORLD}; got {world}")
        while len(self._workers) < world:
            self._workers.append(self._start(len(self._workers)))
        return self._workers[:world]

    def _start(self, rank: int) -> _Worker:
        here, there = self._context.Pipe()
        stacks = self._directory / f"stacks-{next(self._numbers)}"
        process = self._context.Process(target=_serve, args=(rank, there, str(stacks)), daemon=True)
        process.start()
        there.close()
        return _Worker(process=process, pipe=here, stacks=stacks)

    def _exchange(self, workers: Sequence[_Worker], job: bytes, timeout_s: float) -> list[_Outcome]:
        for worker in workers:
            worker.pipe.send_bytes(job)
        outcomes: dict[int, _Outcome] = {}
        ranks = {worker.pipe: rank for rank, worker in enumerate(workers)}
        end = time.monotonic() + timeout_s
        while len(outcomes) < len(workers) and time.monotonic() < end:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in outcomes]
            for pipe in connection.wait(waiting, timeout=max(0.0, end - time.monotonic())):
                assert isinstance(pipe, connection.Connection)
                outcome = outcomes[ranks[pipe]] = _receive(pipe)
                if outcome.error is not None:
                    end = min(end, time.monotonic() + GRACE_S)
        for rank, worker in enumerate(workers):
            if rank not in outcomes:
                outcomes[rank] = _Outcome(error=f"did not end in time; its threads are at\n{_stacks_of(worker)}")
        return [outcomes[rank] for rank in range(len(workers))]


def on_ranks(
    world: int, *, timeout_s: float = TIMEOUT_S, spoils: bool = False, backend: str = "gloo"
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test that runs on every rank of a world of this size."""

    def decorate(fn: Callable[P, None]) -> Callable[P, None]:
        _bodies[fn.__module__, fn.__qualname__] = fn

        @functools.wraps(fn)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            shared().run(world, fn, *args, timeout_s=timeout_s, spoils=spoils, backend=backend, **kwargs)

        return test

    return decorate


@functools.cache
def fork_context() -> ForkServerContext:
    """Forks from one server for each session, which makes slow imports once. The first optimizer imports
    torch._dynamo."""
    context = get_context("forkserver")
    collected = [name for name in sys.modules if name.startswith(("tests.dist.", "tests.simdev."))]
    needed = LIBRARIES if any(".integrations." in name for name in collected) else []
    context.set_forkserver_preload([*PRELOAD, *needed, *collected])
    return context


@functools.cache
def shared() -> Pool:
    """The pool of this session."""
    pool = Pool()
    atexit.register(pool.remove)
    return pool


def _report(fn: Body, outcomes: Sequence[_Outcome]) -> str:
    parts = [f"{fn.__qualname__} failed on {sum(o.error is not None for o in outcomes)} of {len(outcomes)} ranks"]
    parts += [f"--- rank {rank}: {o.error or 'ended without error'}" for rank, o in enumerate(outcomes)]
    return "\n".join(parts)


def _receive(pipe: connection.Connection) -> _Outcome:
    try:
        outcome = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return _Outcome(error="the process died")
    assert isinstance(outcome, _Outcome)
    return outcome


def _stacks_of(worker: _Worker) -> str:
    """Asks a hanging worker where its threads are."""
    if worker.process.pid is None or not worker.process.is_alive():
        return "the process died"
    os.kill(worker.process.pid, signal.SIGUSR1)
    end = time.monotonic() + 1.0
    text = ""
    while time.monotonic() < end and not text.endswith("\n"):
        connection.wait([worker.process.sentinel], timeout=0.05)  # returns early if it dies instead of answering
        text = worker.stacks.read_text() if worker.stacks.exists() else ""
    return text


# The rest runs in the workers.


def _serve(rank: int, pipe: connection.Connection, stacks: str) -> None:
    # The server dies with the test session however that ends, and a worker in a stuck collective dies with the server.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    _share_gloos_thread()
    torch.set_num_threads(1)
    gc.freeze()  # else each collection walks, and so copies, all that was imported before the fork
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(_answer(rank, job))


def _share_gloos_thread() -> None:
    """One device for all groups of this process: each has a thread of its own else, which wakes up 100 times a second,
    and tests make dozens of groups."""
    made = ProcessGroupGloo.__init__
    options = ProcessGroupGloo._Options
    devices = [ProcessGroupGloo.create_device(interface="lo")]

    def make(self: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
        chosen = options()
        chosen._devices, chosen._timeout = devices, timeout
        made(self, store, rank, size, chosen)

    ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]


def _answer(rank: int, job: _Job) -> bytes:
    try:
        return pickle.dumps(_Outcome(value=_perform(rank, job)))
    except BaseException:
        # Leaving the group closes its sockets: ranks that wait for this one hear of it at once.
        outcome = pickle.dumps(_Outcome(error=traceback.format_exc()))
        if dist.is_initialized():
            dist.destroy_process_group()
            _joined.clear()
        return outcome


def _perform(rank: int, job: _Job) -> Any:
    module = importlib.import_module(job.module)
    fn = _bodies.get((job.module, job.name)) or getattr(module, job.name)
    args, kwargs = pickle.loads(job.payload)
    _join(rank, job)
    torch.manual_seed(0)  # a test before may have drawn numbers on some ranks alone
    with warnings.catch_warnings():
        warnings.simplefilter(os.environ.get("ZEROMESH_TEST_WARNINGS", "error"))  # type: ignore[arg-type]  # "default"
        return fn(*args, **kwargs)


def _join(rank: int, job: _Job) -> None:
    if _joined == [job.store]:
        return
    _leave()  # not at the end of the last call: a rank that is done must not leave while others still join
    store = dist.FileStore(job.store, job.world)  # type: ignore[attr-defined]  # torch does not list it in __all__
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world, timeout=timeout)
    _joined[:] = [job.store]


def _leave() -> None:
    _kept.clear()
    _forget_meshes()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _joined.clear()
    gc.freeze()  # or each later collection would walk everything that tests have imported


def _forget_meshes() -> None:
    """DTensor's operations remember their results, with meshes whose groups are gone and which are equal to
    those of the next process group."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


_joined: list[str] = []
_kept: dict[Any, Any] = {}


def kept(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """On a rank: `make(*args, **kwargs)`, made once for as long as this process group lives; all ranks must call it."""
    key = (make, args, tuple(sorted(kwargs.items())))
    if key not in _kept:
        _kept[key] = make(*args, **kwargs)
    value: T = _kept[key]
    return value


def told_by_first(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """On a rank: `make(*args, **kwargs)` of rank 0; all ranks must call it."""
    told: list[Any] = [make(*args, **kwargs) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    value: T = told[0]
    return value
