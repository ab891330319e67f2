"""The first run on a new cluster: checks numbers, bytes and memory, and compares links and steps with predictions.

Parity, bytes and memory decide the verdict. Times are only reported, and marked if they are unlikely: a shared cluster
may be slow without being wrong.

A check that raises ends the test, since ranks are then out of step. The result has the findings so far, the check that
ran and the error: just then a bug report needs it. So the result file exists from the beginning, and the first rank
rewrites it before each check. Even if all processes are killed, it names the check that ran.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.errors import InputError
from zeromesh.files.users import write_whole
from zeromesh.measure.launch import Mesh, is_first, mesh_text, on_all_ranks
from zeromesh.measure.probe import Probe, from_raw
from zeromesh.measure.setting import read_setting
from zeromesh.measure.steps import Batch, from_json, median_step, planned
from zeromesh.units import format_bytes_per_s

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks

PARITY = 1e-9
"""Allowed difference. fp64 sums in another order differ by about 1e-13 after three steps of AdamW; a wrong summand
makes 1e-3 and more."""

LIKELY = 0.25
"""Predicted step times that are off by more are marked."""


SLOW = 0.9
"""Share of the median rate below which a device is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the result. Its status is "ok", "failed", or "look": unlikely, but no reason to fail."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that a bug report needs: versions and devices, the checks as they were made, the text of the probed
    cluster file (empty for a single rank), and the figures behind the checks."""

    environment: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float
    cluster: str
    raw: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def strategies(mesh: Mesh) -> dict[str, str]:
    """Returns layouts to try on a mesh, by name: every stage, and stages that differ between levels. The first one
    scatters sums in place, which not every backend supports."""
    levels = list(mesh)[::-1]
    layouts = {f"all {stage}": dict.fromkeys(levels, stage) for stage in ("2", "0", "1", "3", "3d")}
    if sum(size > 1 for size in mesh.values()) > 1:
        for stage in ("0", "1", "3k"):
            layouts[f"3 inside, {stage} outside"] = {**dict.fromkeys(levels, "3"), levels[-1]: stage}
    return {title: ",".join(f"{n}={stage}" for n, stage in stages.items()) for title, stages in layouts.items()}


def selftest(mesh: Mesh, output: Path, *, steps: int = 6) -> Result | None:
    """Runs all checks on the ranks of `mesh`, with `steps` timed steps of some strategies, and writes the result file.
    Returns None on ranks of a torchrun other than the first. Raises InputError if the file cannot be written, or the
    mesh does not match the ranks."""
    start = time.monotonic()
    if is_first():
        _note(output, _nothing(mesh), _begun("all ranks start"))
    raw = _on_all_ranks(mesh, output, steps)
    if raw is None:
        return None
    checks, cluster = [Check(**check) for check in raw["checks"]], ""
    try:
        if raw["probe"]:
            from zeromesh.cluster.read import cluster_toml  # needs pydantic, which a bare GPU machine may lack

            found = from_raw(raw["probe"], mesh, "selftest")
            checks += _probed(found)
            cluster = cluster_toml(found.cluster)
            checks += _predicted(found, raw)
    except Exception as error:
        traceback.print_exc()
        checks.append(Check(name="links and times beside predicted ones", status="failed", detail=_words(error)))
    result = _result(raw, checks, time.monotonic() - start, cluster)
    _write(output, result)
    return result


def _result(raw: Mapping[str, Any], checks: Sequence[Check], seconds: float, cluster: str) -> Result:
    return Result(
        environment=raw["environment"],
        checks=tuple(checks),
        seconds=seconds,
        cluster=cluster,
        raw={key: raw[key] for key in ("probe", "steps")},
    )


def _on_all_ranks(mesh: Mesh, output: Path, steps: int) -> Any:
    """Returns the result of `run`; if ranks could not be started or died, the result until then."""
    try:
        return on_all_ranks("zeromesh.measure.selftest:run", {"steps": steps, "output": str(output.absolute())}, mesh)
    except InputError as error:
        if is_first():
            _note(output, _nothing(mesh), _failed("all ranks start", _words(error)))
        raise
    except Exception as error:
        if not is_first():
            raise
        # A pipe, or /dev/null, does not return its contents.
        noted = json.loads(output.read_text()) if output.is_file() else _result(_nothing(mesh), (), 0.0, "").to_json()
        died = _failed("all ranks start, and live to the end", _words(error))
        return {**noted["raw"], "environment": noted["environment"], "checks": [*noted["checks"], died]}


def _note(output: Path, found: Mapping[str, Any], last: dict[str, str]) -> None:
    """Writes the result for the case that nothing follows."""
    checks = [Check(**check) for check in (*found["checks"], last)]
    _write(output, _result(found, checks, 0.0, ""))


def _write(output: Path, result: Result) -> None:
    """Writes the file completely or not at all. Raises InputError if it cannot be written."""
    text, output = json.dumps(result.to_json(), indent=1) + "\n", output.resolve()
    try:
        if output.exists() and not output.is_file():  # a pipe, say, is not replaced
            output.write_text(text)
        else:
            write_whole(output, text)
    except OSError as error:
        raise InputError(f"the result file cannot be written: {output}: {error.strerror}") from None


def _nothing(mesh: Mesh) -> dict[str, Any]:
    return {"environment": _here(mesh), "checks": [], "probe": None, "steps": {}}


def _failed(name: str, detail: str) -> dict[str, str]:
    return {"name": name, "status": "failed", "detail": detail}


def _begun(name: str) -> dict[str, str]:
    return _failed(name, "begun, and not ended")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# On every rank --------------------------------------------------------------------------------------------------------


def run(ranks: Ranks, *, steps: int, output: str) -> dict[str, Any]:
    """The task of every rank. A check that raises ends it, and is its last. `output` always has the findings so far."""
    mesh = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
    found = _nothing(mesh)
    doing = "environment"
    try:
        for doing, work in _work(ranks, mesh, steps, found):
            if ranks.rank == 0:
                with suppress(InputError):  # if the disk is full, the end of the test will report it
                    _note(Path(output), found, _begun(doing))
            work()
    except Exception as error:
        traceback.print_exc()
        ranks.kept.append(error)
        found["checks"].append(_failed(doing, _all_words(ranks, error)))
        if not ranks.on_cpu and ranks.rank:
            raise  # the first rank may be in a collective that only this rank's end will end
    return found


def _work(ranks: Ranks, mesh: Mesh, steps: int, found: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields all checks in order, each with a name. Findings go into `found`."""
    import torch.distributed as dist

    from zeromesh.launch.device import SHARE
    from zeromesh.measure.probe import measure

    layouts = strategies(mesh)
    yield "environment", lambda: found.update(environment=environment(ranks, mesh))
    on_host = {f"all 3, {stage} on the host": f"host={stage},{layouts['all 3']}" for stage in ("1", "2", "3")}
    for title, strategy in (layouts | on_host).items():
        for name, look in _exact(ranks, title, strategy):
            yield name, partial(_judge, name, look, found["checks"])
    timed = SHARE not in os.environ  # ranks that share a device wait for each other
    if timed and ranks.world > 1:
        works = [asdict(_timed_batch().work)]
        patient = partial(measure, ranks, rounds=8, seconds=6.0, patience=math.inf, works=works)
        yield "links", lambda: found.update(probe=patient())
    for text in list(layouts.values())[-3:] if timed and ranks.world > 1 else []:
        yield f"time, {text}", partial(_time, ranks, text, steps, found["steps"])
    yield "the end of all ranks", dist.barrier  # so that the first learns of a rank that failed in its last check


def _all_words(ranks: Ranks, error: Exception) -> str:
    """Returns this rank's error, after those of ranks that failed before it.

    A rank stores its error before it leaves, and others fail because it left. So the first rank finds the cause here.
    """
    from torch.distributed import distributed_c10d

    said = f"rank {ranks.rank}: {_words(error)}"
    try:
        store = distributed_c10d._get_default_store()  # torch has no public way to it
        keys = [f"zeromesh/selftest/{rank}" for rank in range(ranks.world)]
        before = [store.get(key).decode() for key in keys if store.check([key])]
        store.set(keys[ranks.rank], said)
    except Exception:  # the store itself may have failed
        before = []
    return "; ".join([*before, said])


def _timed_batch() -> Batch:
    return Batch(model="1M", dtype="fp32", sequences=2, tokens=64, micro_batches=2)


def environment(ranks: Ranks, mesh: Mesh) -> dict[str, Any]:
    """Returns versions and hardware, as rank 0 sees them, with the names of all hosts."""
    import torch
    import torch.distributed as dist

    from zeromesh.launch.device import device_name

    hosts: list[Any] = [None] * ranks.world
    dist.all_gather_object(hosts, platform.node())
    device = {}
    if not ranks.on_cpu:
        module = torch.get_device_module(ranks.device)
        nccl = f"{module.nccl.version()}" if hasattr(module, "nccl") else "none"
        device = {"device_name": device_name(ranks.device), "nccl": nccl}
    return {
        **_here(mesh),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": ranks.device.type,
        **device,
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
    }


def _here(mesh: Mesh) -> dict[str, Any]:
    """Facts that this process knows without the others."""
    return {
        **read_setting(),
        "device": "unknown",
        "backend": "unknown",
        "mesh": mesh_text(mesh),
        "hosts": {platform.node(): prod(mesh.values())},
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_VISIBLE", "ZEROMESH_"))
        },
    }


def _exact(ranks: Ranks, title: str, strategy: str) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    """Yields the checks that decide the verdict: numbers, bytes, memory."""
    from zeromesh.measure.parity import largest_difference
    from zeromesh.measure.steps import Training

    name = f"{title} ({strategy})"
    yield f"parity, {name}", lambda: _parity(largest_difference(ranks, strategy))
    batch = Batch(model="tiny", dtype="bf16", sequences=1, tokens=16, micro_batches=2)
    yield f"bytes and memory, {name}", lambda: _accounts(Training(ranks, batch, strategy))


def _judge(name: str, look: Callable[[], tuple[bool, str]], checks: list[dict[str, str]]) -> None:
    good, detail = look()
    checks.append({"name": name, "status": "ok" if good else "failed", "detail": detail})


def _time(ranks: Ranks, strategy: str, steps: int, found: dict[str, Any]) -> None:
    from zeromesh.measure.steps import Training, measure_round

    training = Training(ranks, _timed_batch(), strategy)
    training.timed(2)
    found[strategy] = measure_round(training, steps=steps, recorded=steps)


def _parity(difference: float) -> tuple[bool, str]:
    return difference <= PARITY, f"parameters differ by {difference:.2g} of their size (allowed {PARITY:g})"


def _accounts(training: Any) -> tuple[bool, str]:
    """Compares bytes sent and held with the schedule's: the mean over ranks, and the worst."""
    import torch
    import torch.distributed as dist

    import zeromesh as zm

    training.step()
    with zm.traffic_report(training.model, micro_batches=len(training.data)) as traffic:
        training.step()
    lines = traffic.lines()
    # The last chunks of an all-reduce may be shorter, or empty, so ranks send different amounts.
    sent = torch.tensor([line.sent_bytes for line in lines], dtype=torch.float64)
    dist.all_reduce(sent)
    means = (sent / dist.get_world_size()).tolist()
    memory = zm.memory_report(training.model, training.optimizer)
    worst = torch.tensor(float(max(abs(line.allocated_bytes - line.predicted_bytes) for line in memory)))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    pairs = [(mean, line.predicted_bytes) for mean, line in zip(means, lines, strict=True)]
    sent_off = max((abs(mean - predicted) / max(predicted, 1) for mean, predicted in pairs), default=0.0)
    found = ", ".join(f"{line.label} {mean:.0f}" for mean, line in zip(means, lines, strict=True))
    held = sum(line.allocated_bytes for line in memory if line.kind == "total")
    detail = f"sent {found}: {sent_off:.2%} off; held {held}: {int(worst)} bytes off"
    return sent_off <= 0.02 and float(worst) == 0, detail


# Verdict --------------------------------------------------------------------------------------------------------


def _probed(found: Probe) -> Iterator[Check]:
    yield _devices(found.raw["machine"])
    for level in found.levels:
        rates = ", ".join(f"{name} {format_bytes_per_s(one.line.bytes_per_s)}" for name, one in level.fits.items())
        detail = f"one rank sends: {rates}; a step takes {level.latency_s * 1e6:.3g} us"
        noisy = [f"{operation}: {one.noise}" for operation, one in level.fits.items() if not one.trusted]
        status = "look" if noisy else "ok"
        yield Check(name=f"links, {level.name}", status=status, detail="; ".join([detail, *noisy]))


def _devices(machine: Mapping[str, Any]) -> Check:
    """Marks a device that is slower than the others, since all ranks wait for it, unless ranks share cores."""
    found, slow = [], False
    for what, rates in machine["by_rank"].items():
        least, usual = min(rates), statistics.median(rates)
        slow = slow or (machine["cores"] is None and least < SLOW * usual)
        found.append(f"{what} {least / usual:.2f} (rank {rates.index(least)})")
    status = "look" if slow else "ok"
    return Check(name="devices", status=status, detail=f"the slowest rank's rate over the median: {', '.join(found)}")


def _predicted(found: Probe, raw: Mapping[str, Any]) -> Iterator[Check]:
    for strategy, measured in raw["steps"].items():
        step = median_step([from_json(trace) for trace in measured["traces"]])
        predicted = planned(strategy, found.cluster, _timed_batch())
        error = predicted.step_s / step.step_s - 1
        detail = (
            f"step {step.step_s * 1e3:.4g} ms, predicted {predicted.step_s * 1e3:.4g} ({error:+.0%}); waiting "
            f"{step.seconds(kind='wait') * 1e3:.4g} ms, predicted {predicted.exposed_comm_s * 1e3:.4g}"
        )
        yield Check(name=f"time, {strategy}", status="ok" if abs(error) <= LIKELY else "look", detail=detail)
