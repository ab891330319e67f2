"""Measures a cluster (a rate and a latency for each level, and the device) for the file that the planner reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import prod
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device, Kernel
from zeromesh.cluster.level import Curve, Level
from zeromesh.cost.constants import default_constants
from zeromesh.errors import MeasurementError
from zeromesh.measure.fit import SCATTERING, Fit, fit
from zeromesh.measure.launch import Mesh, on_all_ranks
from zeromesh.measure.work import Work
from zeromesh.units import format_bytes_per_s

if TYPE_CHECKING:
    from zeromesh.launch.ranks import Ranks

ROUNDS = 16
SECONDS_PER_LEVEL = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProbe:
    """One level as measured, from a rank's view."""

    name: str
    size: int
    fits: Mapping[str, Fit]  # for our all-gather, reduce-scatter and all-reduce, by bytes that one rank sends
    host_s_per_byte: float | None  # processor seconds per byte sent; None if the device has no part in it
    host_call_s: float  # further processor seconds of a collective
    busy_latency_s: float | None  # of a whole short collective while the ranks compute; None as above
    curves: tuple[Curve, ...] = ()  # medians of timings without and beside computation, by bytes that one rank sends

    @property
    def bytes_per_s(self) -> float:
        """The rate of one rank. A step gathers about as much as it reduces, so their times add."""
        return 2 / sum(1 / self.fits[operation].line.bytes_per_s for operation in SCATTERING)

    @property
    def latency_s(self) -> float:
        """Latency of one of the size - 1 steps, less the cost model's launch."""
        whole = sum(self.fits[operation].line.latency_s for operation in SCATTERING) / len(SCATTERING)
        return max(0.0, whole - default_constants().launch_s) / (self.size - 1)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the level's rate that each operation reaches."""
        return {operation: one.line.bytes_per_s / self.bytes_per_s for operation, one in self.fits.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measured cluster: its description, which goes to the planner's file, and the measurements."""

    cluster: Cluster
    levels: tuple[LevelProbe, ...]
    raw: Mapping[str, Any]

    @property
    def missing(self) -> tuple[str, ...]:
        """Sentences on levels that could not be found."""
        return tuple(self.raw.get("found", {}).get("missing", ()))

    def require_trust(self) -> None:
        """Raises MeasurementError if a level's timings are too noisy."""
        for level in self.levels:
            for operation, found in level.fits.items():
                found.require_trust(f"{operation} over {level.name} ({level.size} ranks)")


def probe(
    mesh: Mesh | None,
    *,
    ranks: int = 0,
    name: str = "measured",
    rounds: int = ROUNDS,
    seconds: float = SECONDS_PER_LEVEL,
    work: Work | None = None,
) -> Probe | None:
    """Measures the ranks of `mesh`. Returns None on ranks of a torchrun other than the first.

    Args:
        mesh: sizes by level, outermost first. None: the levels that the ranks find (`levels.find_levels`).
        ranks: how many there are, if there is no mesh.
        rounds: timings of each size; at least 4.
        seconds: approximate time for each level.
        work: a model's work, at whose shapes the devices are measured.

    Raises:
        MeasurementError: there are too few rounds, or no time.
    """
    started = mesh or {"node": ranks}
    require_patience(rounds, seconds)
    works = [] if work is None else [asdict(work)]
    options = {"rounds": rounds, "seconds": seconds, "find": mesh is None, "works": works}
    raw = on_all_ranks("zeromesh.measure.probe:measure", options, started)
    return None if raw is None else from_raw(raw, started, name)


def require_patience(rounds: int, seconds: float) -> None:
    """Raises MeasurementError if a probe has too few rounds or no time."""
    if rounds < 4:
        raise MeasurementError(f"a probe's spread takes at least 4 rounds, got {rounds}")
    if not seconds > 0:
        raise MeasurementError(f"a probe needs more than 0 seconds for each level, got {seconds:g}")


def measure(
    ranks: Ranks,
    *,
    rounds: int,
    seconds: float,
    patience: float | None = None,
    find: bool = False,
    works: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The task of every rank; for the arguments see `measure_links`. With `find`, it finds levels instead of taking the
    mesh's. `works` are the models' works at whose shapes devices are measured."""
    from torch.distributed.device_mesh import init_device_mesh

    from zeromesh.measure.kernels import measure_kernels
    from zeromesh.measure.levels import find_levels
    from zeromesh.measure.links import PATIENCE, measure_links
    from zeromesh.measure.machine import measure_machine

    found = find_levels(ranks) if find else None
    if found is not None:
        made = init_device_mesh(ranks.device.type, tuple(found.mesh.values()), mesh_dim_names=tuple(found.mesh))
        ranks = replace(ranks, mesh=made)
    machine = measure_machine(ranks)
    kernels = [kernel for work in works for kernel in measure_kernels(ranks, Work.from_json(work))]
    levels = measure_links(ranks, rounds=rounds, seconds=seconds, patience=patience or PATIENCE)
    measured = {"machine": machine, "kernels": kernels, "works": list(works), "levels": levels}
    return {**measured, **({} if found is None else {"found": asdict(found)})}


def from_raw(raw: Mapping[str, Any], mesh: Mesh, name: str) -> Probe:
    """Makes a probe from the ranks' measurements, over `mesh` or the levels that they found."""
    mesh = raw["found"]["mesh"] if "found" in raw else mesh
    levels = tuple(_level_probe(level, mesh[level], found) for level, found in raw["levels"].items())
    return Probe(cluster=_cluster(levels, raw, mesh, name), levels=levels, raw=raw)


def _level_probe(name: str, size: int, found: Mapping[str, Any]) -> LevelProbe:
    timings, beside = (_by_size(found[kind]) for kind in ("timings", "beside"))
    short = [times[min(times)] for operation, times in beside.items() if operation in SCATTERING]
    return LevelProbe(
        name=name,
        size=size,
        fits={operation: fit(by_size) for operation, by_size in timings.items()},
        host_s_per_byte=found["host_s_per_byte"],
        host_call_s=found["host_call_s"],
        busy_latency_s=None if found["host_s_per_byte"] is None else mean(map(median, short)),
        curves=(*_curves(timings, size, beside=False), *_curves(beside, size, beside=True)),
    )


def _by_size(timings: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[int, Sequence[float]]]:
    return {operation: {int(sent): s for sent, s in by_size.items()} for operation, by_size in timings.items()}


def _curves(timings: Mapping[str, Mapping[int, Sequence[float]]], size: int, *, beside: bool) -> Iterator[Curve]:
    for operation, by_size in timings.items():
        points = {float(sent): median(seconds) for sent, seconds in by_size.items()}
        yield Curve(operation=operation, ranks=size, points=points, beside_computation=beside)


def _cluster(levels: tuple[LevelProbe, ...], raw: Mapping[str, Any], mesh: Mesh, name: str) -> Cluster:
    machine = raw["machine"]
    device = Device(
        name=machine["name"],
        memory_bytes=machine["memory_bytes"],
        memory_bytes_per_s=machine["memory_bytes_per_s"],
        peak_flops=machine["peak_flops"],
        achievable_flops=machine["peak_flops"],
        cores=machine["cores"],
        kernels=tuple(Kernel(**kernel) for kernel in raw.get("kernels", ())),
    )
    by_name = {level.name: level for level in levels}
    made: list[Level] = []
    for axis, size in list(mesh.items())[::-1]:
        made.append(_level(axis, size, by_name.get(axis), made))
    return Cluster(
        name=name,
        description=f"measured by zeromesh probe, {date.today().isoformat()}",
        device=device,
        levels=tuple(made),
        host_memory_bytes=machine["host_memory_bytes"],
        host_copy_bytes_per_s=machine["host_copy_bytes_per_s"],
        host_step_bytes_per_s=machine["host_step_bytes_per_s"],
        sources=tuple(sorted(_sources(levels, raw).items())),
    )


def _level(name: str, size: int, found: LevelProbe | None, inside: list[Level]) -> Level:
    if found is None:  # a single member sends nothing, so any rate will do
        rate = inside[-1].bandwidth_bytes_per_s if inside else 1e9
        return Level(name=name, size=1, bandwidth_bytes_per_s=rate, latency_s=0.0, kind="loopback")
    host, beside, below = found.host_s_per_byte, found.busy_latency_s, prod(level.size for level in inside)
    return Level(
        name=name,
        size=size,
        # All ranks of a member have sent at once, and the file needs the member's total rate.
        bandwidth_bytes_per_s=found.bytes_per_s * below,
        latency_s=found.latency_s,
        kind="loopback",  # a rate of this kind is taken as it is, not as a data sheet's
        busy_latency_s=None if beside is None else max(found.latency_s, beside / (found.size - 1)),
        host_bytes_per_s=1 / host if host else None,
        host_call_s=found.host_call_s if host else 0.0,
        shares=found.shares,
        curves=tuple(
            replace(curve, points={sent * below: seconds for sent, seconds in curve.pairs}) for curve in found.curves
        ),
    )


def _sources(levels: tuple[LevelProbe, ...], raw: Mapping[str, Any]) -> dict[str, str]:
    copies = raw["machine"]["host_copies"]
    sources = {
        "device.memory": "the machine's, divided by its ranks" if raw["machine"]["cores"] else "the driver's",
        "host_memory": "the system's: all of one machine's",
        "host_copy": "measured: copies on processors, half of memory_bandwidth"
        if not copies
        else f"measured: up and down at once, on all ranks at once; alone {format_bytes_per_s(copies['up'])} up and "
        f"{format_bytes_per_s(copies['down'])} down",
        "host_step": "measured: fused AdamW on all ranks at once, 30 bytes an element",
        "device.memory_bandwidth": "measured: a copy, read and write counted, on all ranks at once",
        "device.peak": "measured: the fastest of a few square products, on all ranks at once; not a data sheet's",
    }
    if works := raw.get("works"):
        shown = "; ".join(
            f"{w['name']} with {w['kernels']} kernels, {w['sequences']} sequences of {w['tokens']} tokens"
            for w in works
        )
        sources["device.kernel"] = (
            f"measured: products, attention and the rest of a block of {shown}, on all ranks at once"
        )
    sources |= {f"level.{name}.size": said for name, said in raw.get("found", {}).get("sources", {}).items()}
    for level in levels:
        rates = ", ".join(f"{name} {format_bytes_per_s(one.line.bytes_per_s)}" for name, one in level.fits.items())
        spread = max(one.spread for one in level.fits.values())
        sources[f"level.{level.name}.bandwidth"] = (
            f"measured: our collectives on {raw['levels'][level.name]['backend']}, all groups at once: {rates} of one "
            f"rank; timings spread by {spread:.0%}"
        )
        latencies = ", ".join(f"{name} {one.line.latency_s * 1e6:.4g} us" for name, one in level.fits.items())
        sources[f"level.{level.name}.latency"] = f"measured: {latencies} for the whole collective of {level.size}"
    return sources
