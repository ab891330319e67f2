"""What a user of a new cluster runs first: does it compute the right numbers here, send and hold what is predicted, and
how fast are links and steps beside what was predicted.

Parity, bytes and memory decide the verdict. Times are reported, and marked where they are unlikely: a cluster that
others use may be slow without being wrong.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import zeromesh
from zeromesh.measure.cluster_file import cluster_toml
from zeromesh.measure.launch import Mesh, mesh_text, on_all_ranks
from zeromesh.measure.probe import Probe, from_raw
from zeromesh.measure.steps import Batch, from_json, median_step, predict

if TYPE_CHECKING:
    from zeromesh.lab import Lab
    from zeromesh.measure.ranks import Ranks

PARITY = 1e-9
"""fp64 sums in another order differ by some 1e-13 after three steps of AdamW; a wrong summand by 1e-3 and more."""

LIKELY = 0.25
"""Predicted step times further off are marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the result.

    Args:
        name: what was looked at.
        status: "ok", "failed", or "look": unlikely, and not a reason to fail.
        detail: figures, in words.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that a bug report needs.

    Args:
        environment: versions, devices, mesh.
        checks: in the order in which they were made.
        seconds: in all.
        cluster: the probed cluster file's text; empty on a single rank.
        raw: figures behind the checks.
    """

    environment: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float
    cluster: str
    raw: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return all(check.status != "failed" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The result file."""
        return {**asdict(self), "passed": self.passed}


def strategies(mesh: Mesh) -> dict[str, str]:
    """Layouts to try on a mesh, by what they stand for: every stage, and stages that differ between levels."""
    levels = list(mesh)[::-1]
    layouts = {f"all {stage}": dict.fromkeys(levels, stage) for stage in ("0", "1", "2", "3", "3d")}
    if sum(size > 1 for size in mesh.values()) > 1:
        for stage in ("0", "1", "3k"):
            layouts[f"3 inside, {stage} outside"] = {**dict.fromkeys(levels, "3"), levels[-1]: stage}
    return {title: ",".join(f"{n}={stage}" for n, stage in stages.items()) for title, stages in layouts.items()}


def selftest(mesh: Mesh, *, steps: int = 6, lab: Lab | None = None) -> Result | None:
    """Runs all checks on the ranks of `mesh`.

    Returns:
        The result; None on ranks of a torchrun other than the first.
    """
    start = time.monotonic()
    raw = on_all_ranks("selftest:run", {"steps": steps}, mesh, lab=lab)
    if raw is None:
        return None
    found = from_raw(raw["probe"], mesh, "selftest") if raw["probe"] else None
    checks = [*map(_check, raw["checks"]), *_probed(found), *_predicted(found, raw)]
    return Result(
        environment=raw["environment"],
        checks=tuple(checks),
        seconds=time.monotonic() - start,
        cluster=cluster_toml(found.cluster) if found else "",
        raw={key: raw[key] for key in ("probe", "compute", "steps")},
    )


def _check(data: Mapping[str, str]) -> Check:
    return Check(**data)


# On every rank --------------------------------------------------------------------------------------------------------


def run(ranks: Ranks, *, steps: int) -> dict[str, Any]:
    """The task of every rank."""
    from zeromesh.measure.probe import measure
    from zeromesh.measure.steps import measure_compute, measure_steps

    mesh = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
    layouts = strategies(mesh)
    checks = [check for title, strategy in layouts.items() for check in _exact(ranks, title, strategy)]
    several = ranks.world > 1
    timed = list(layouts.values())[-3:] if several else []
    batch = _timed_batch()
    return {
        "environment": environment(ranks, mesh),
        "checks": [asdict(check) for check in checks],
        "probe": measure(ranks, rounds=8, seconds=6.0) if several else None,
        "compute": measure_compute(ranks, batch, steps=steps),
        "steps": {text: measure_steps(ranks, batch, text, steps=steps, warmup=2) for text in timed},
    }


def _timed_batch() -> Batch:
    return Batch(model="1M", dtype="fp32", sequences=2, tokens=64, micro_batches=2)


def environment(ranks: Ranks, mesh: Mesh) -> dict[str, Any]:
    """Versions and hardware, as rank 0 sees them, with the names of all hosts."""
    import torch
    import torch.distributed as dist

    hosts: list[Any] = [None] * ranks.world
    dist.all_gather_object(hosts, platform.node())
    device = {}
    if not ranks.on_cpu:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's
        device = {"device_name": torch.cuda.get_device_name(), "nccl": str(nccl)}
    return {
        "zeromesh": zeromesh.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": ranks.device.type,
        **device,
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "mesh": mesh_text(mesh),
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_VISIBLE", "ZEROMESH_"))
        },
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _exact(ranks: Ranks, title: str, strategy: str) -> Iterator[Check]:
    """What must be right: numbers, bytes, memory."""
    from zeromesh.measure.parity import largest_difference
    from zeromesh.measure.steps import Training

    name = f"{title} ({strategy})"
    yield _judge(f"parity, {name}", lambda: _parity(largest_difference(ranks, strategy)))
    yield _judge(f"bytes and memory, {name}", lambda: _accounts(Training(ranks, _small_batch(), strategy)))


def _small_batch() -> Batch:
    return Batch(model="tiny", dtype="bf16", sequences=1, tokens=16, micro_batches=2)


def _judge(name: str, look: Callable[[], tuple[bool, str]]) -> Check:
    good, detail = look()
    return Check(name=name, status="ok" if good else "failed", detail=detail)


def _parity(difference: float) -> tuple[bool, str]:
    return difference <= PARITY, f"parameters differ by {difference:.2g} of their size (allowed {PARITY:g})"


def _accounts(training: Any) -> tuple[bool, str]:
    """Bytes that were sent and are held, beside what the schedule says; the worst of all ranks."""
    import torch
    import torch.distributed as dist

    import zeromesh as zm

    training.step()
    with zm.traffic_report(training.model, micro_batches=len(training.data)) as traffic:
        training.step()
    lines = traffic.lines()
    # Chunks of an all-reduce over more than two ranks may differ by an element for each.
    sent_off = max(abs(line.sent_bytes - line.predicted_bytes) / max(line.predicted_bytes, 1) for line in lines)
    memory = zm.memory_report(training.model, training.optimizer)
    held_off = max(abs(line.allocated_bytes - line.predicted_bytes) for line in memory)
    worst = torch.tensor([sent_off, float(held_off)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    sent = ", ".join(f"{line.axis} {line.sent_bytes}" for line in lines)
    detail = f"sent {sent}: {float(worst[0]):.2%} off; held {memory[-1].allocated_bytes}: {int(worst[1])} bytes off"
    return float(worst[0]) <= 0.02 and float(worst[1]) == 0, detail


# What it means --------------------------------------------------------------------------------------------------------


def _probed(found: Probe | None) -> Iterator[Check]:
    for level in found.levels if found else ():
        rates = ", ".join(f"{name} {one.line.bytes_per_s / 1e6:.4g} MB/s" for name, one in level.fits.items())
        detail = f"one rank sends: {rates}; a step takes {level.latency_s * 1e6:.3g} us"
        noisy = [f"{operation}: {one.noise}" for operation, one in level.fits.items() if not one.trusted]
        status = "look" if noisy else "ok"
        yield Check(name=f"links, {level.name}", status=status, detail="; ".join([detail, *noisy]))


def _predicted(found: Probe | None, raw: Mapping[str, Any]) -> Iterator[Check]:
    if found is None:
        return
    batch = _timed_batch()
    for strategy, measured in raw["steps"].items():
        step = median_step([from_json(trace) for trace in measured["traces"]])
        predicted = predict(measured["schedule"], found.cluster, batch, raw["compute"])
        error = predicted.step_s / step.step_s - 1
        detail = (
            f"step {step.step_s * 1e3:.4g} ms, predicted {predicted.step_s * 1e3:.4g} ({error:+.0%}); waiting "
            f"{step.seconds(kind='wait') * 1e3:.4g} ms, predicted {predicted.exposed_s * 1e3:.4g}"
        )
        yield Check(name=f"time, {strategy}", status="ok" if abs(error) <= LIKELY else "look", detail=detail)
