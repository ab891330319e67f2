"""Takes steps of a sharded model on the virtual device, and reports on them.

[Note: Steps] The first step creates state that later ones find: the optimizer's states, the order of units. The second
is unobserved and timed: the host's processor seconds, since nothing here waits. The third is checked for races, early
frees and host reads. The fourth and fifth are recorded for the timeline, and the fifth is shown: it is in a steady
state from its first refreshes on. Peaks cover all of them, and `zm.shard`.
"""

from __future__ import annotations

import os
import site
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh import simdev
from zeromesh.cluster.cluster import Cluster
from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine
from zeromesh.observe.report import memory_report, traffic_report
from zeromesh.rehearsal.hardware import Hardware
from zeromesh.rehearsal.places import Places
from zeromesh.rehearsal.result import HostMemory, HostRead, Launches, Memory, Peak, Place, Rehearsal
from zeromesh.rehearsal.timeline import replay
from zeromesh.rehearsal.watch import Watch
from zeromesh.schedule.unit import Role
from zeromesh.trace import MemoryLine

_SOURCES = Path(__file__).parents[2]

_UNKNOWN_BYTES = 2 << 20
"""Tensors of this size or more never have known values on the virtual device."""

_COMMUNICATORS = 2
"""Communicators of each axis: one for gathers, one for reductions."""


class Peaks:
    """The most memory in use by place, in the order of first visit; the host's most memory; and each growth of reserved
    memory, in the order of time (`growth`)."""

    def __init__(self) -> None:
        self.host_bytes = 0
        self.by_place: dict[Place, Peak] = {}
        self.growth: list[Peak] = []
        simdev.reset_peak_memory()

    def left(self, place: Place) -> None:
        """Attributes the memory peak since the last call to the place that is left."""
        stats = simdev.memory_stats()
        now = Peak(place=place, allocated_bytes=stats.peak_allocated_bytes, reserved_bytes=stats.peak_reserved_bytes)
        before = self.by_place.get(place, now)
        self.by_place[place] = max(now, before, key=lambda peak: peak.allocated_bytes)
        if not self.growth or now.reserved_bytes > self.growth[-1].reserved_bytes:
            self.growth.append(now)
        self.host_bytes = max(self.host_bytes, simdev.memory_stats(host=True).peak_allocated_bytes)
        simdev.reset_peak_memory()


class Stage:
    """Where one rank rehearses: it watches models that are built, sharded and stepped inside. Without a cluster there
    is no timeline."""

    def __init__(self, cluster: Cluster | None) -> None:
        self.hardware = None if cluster is None else Hardware(cluster)
        self.peaks = Peaks()
        self.places = Places(self.peaks.left)

    def take(self, step: Callable[[], object], model: nn.Module, optimizer: Optimizer, *, rank: int) -> Rehearsal:
        """Rehearses steps of a sharded model; each call of `step` is a whole step, including the optimizer's: [Note:
        Steps]. Raises InputError if an axis is not the name of a level of the cluster."""
        engine, failures = engine_of(model), list[str]()
        found: dict[str, Any] = {}  # the rehearsal's fields, as far as the steps get
        if self.hardware is not None:
            self.hardware.require_levels(engine.schedule.axes)
        _forget_values(engine)
        hardware, groups = self.hardware, engine.backend.groups.values()
        communicators = _COMMUNICATORS * sum(group.lender is None for group in groups)
        room: AbstractContextManager[object] = nullcontext()
        overhead_bytes = 0.0
        if hardware is not None:
            overhead_bytes = hardware.overhead_bytes(communicators)
            room = simdev.memory_limit(int(hardware.limit_bytes - overhead_bytes))
        with room, self.places.follow(engine):
            try:
                self._take(step, model, engine, found)
            except Exception as error:  # the user's code: it would raise the same on a cluster
                failures.append(f"in {self.places.now}: {_said(error)}")
        layout, retries = engine.schedule.layout, found.pop("retries", 0)
        lines = [line for line in memory_report(model, optimizer) if line.kind not in ("total", "step")]
        host = None if engine.backend.host is None else self._host(line for line in lines if line.place == "host")
        if host is not None and host.failure:
            failures.append(host.failure)
        return Rehearsal(
            model=type(model).__name__,
            strategy=str(engine.schedule.strategy),
            mesh=layout.mesh[::-1],
            world=layout.world,
            rank=rank,
            micro_batches=self.places.micro_batches,
            cluster="" if hardware is None else hardware.cluster.name,
            memory=Memory(
                kinds=tuple(line for line in lines if line.place == "device"),
                rest_bytes=simdev.memory_stats().allocated_bytes,
                peaks=tuple(self.peaks.by_place.values()),
                growth=tuple(self.peaks.growth),
                overhead_bytes=overhead_bytes,
                limit_bytes=None if hardware is None else hardware.limit_bytes,
                retries=retries,
                host=host,
            ),
            blocks=tuple(unit.name for unit in engine.schedule.units if unit.role is Role.BLOCK),
            failures=tuple(failures),
            **found,
        )

    def _take(self, step: Callable[[], object], model: nn.Module, engine: Engine, found: dict[str, Any]) -> None:
        step()
        seen, retries, began = self.places, simdev.memory_stats().retries, time.process_time()
        with traffic_report(model, micro_batches=seen.micro_batches, recompute=seen.recomputes) as traffic:
            step()
        found["host_s"] = time.process_time() - began
        found["retries"] = simdev.memory_stats().retries - retries
        found["axes"] = tuple(traffic.lines())
        with simdev.Checker() as checker:
            step()
        found["races"] = tuple(dict.fromkeys(str(race) for race in checker.races))
        found["early_frees"] = tuple(dict.fromkeys(str(free) for free in checker.early_frees))
        found["host_reads"] = host_reads(checker)
        watch = Watch(
            places=self.places,
            hardware=self.hardware,
            axes={axis.name: axis for axis in engine.schedule.axes},
            whole=engine.schedule.layout.axes,
        )
        with simdev.Recorder(watch):
            for _ in range(2):
                watch.begin()
                step()
                watch.end()
        found["calls"] = tuple(watch.calls)
        found["launches"] = tuple(
            Launches(unit=unit, kind=kind, count=count) for (unit, kind), count in watch.launches.items()
        )
        if self.hardware is not None:
            whole_s = watch.step_s
            *_, last = replay(
                watch.issued,
                label=f"{engine.schedule.strategy} on {self.hardware.cluster.name} (rehearsed)",
                cores=self.hardware.cluster.device.cores,
                host_scale=found["host_s"] / whole_s if whole_s else 1.0,
            )
            found |= {"step_s": last.seconds, "exposed_s": last.trace.seconds(kind="wait"), "trace": last.trace}

    def _host(self, lines: Iterable[MemoryLine]) -> HostMemory:
        found = HostMemory(kinds=tuple(lines), peak_bytes=self.peaks.host_bytes)
        if self.hardware is None:
            return found
        limit = self.hardware.cluster.host_limit_bytes
        ranks = self.hardware.cluster.machine_devices
        return replace(found, ranks=ranks, limit_bytes=limit if isfinite(limit) else None)


def _forget_values(engine: Engine) -> None:
    """Makes all weights pure shapes, even those so small that the device would know their values. Only the first rank
    would draw those of a meta model, and a step that finds NaN differs from one in training."""
    for unit in engine.units:
        for tensor in (tensor for buffer in unit.buffers for tensor in buffer.persistent().values()):
            unknown = torch.empty(max(tensor.numel(), _UNKNOWN_BYTES), dtype=tensor.dtype, device=tensor.device)
            tensor.copy_(unknown[: tensor.numel()])


def host_reads(checker: simdev.Checker) -> tuple[HostRead, ...]:
    """Returns, by line of code and most frequent first, where the host reads from the device or waits for it."""
    counts = Counter((read.operation, _short(read.where)) for read in (*checker.host_reads, *checker.host_waits))
    return tuple(HostRead(what=what, where=where, count=count) for (what, where), count in counts.most_common())


def _short(where: str) -> str:
    """Shortens a path: files of packages begin with the package's name, others are relative to the working
    directory."""
    for root in (*site.getsitepackages(), str(_SOURCES)):
        if where.startswith(f"{root}{os.sep}"):
            return where.removeprefix(f"{root}{os.sep}")
    return where.removeprefix(f"{os.getcwd()}{os.sep}")


def _said(error: Exception) -> str:
    """Returns the error, with the last line of the user's own code before it."""
    passed_over = (str(Path(torch.__file__).parent), str(_SOURCES / "zeromesh"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(passed_over)]
    where = f" ({_short(f'{frames[-1].filename}:{frames[-1].lineno}')})" if frames else ""
    return f"{type(error).__name__}: {error}".rstrip() + where
