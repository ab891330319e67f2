"""Shows a rehearsal to people: tables in the terminal, or one self-contained HTML page. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from zeromesh.integrations.elastic import mesh_text
from zeromesh.rehearsal.result import COMPUTE, Memory, Peak, Rehearsal
from zeromesh.report.build import KINDS, timeline
from zeromesh.report.page import Bar, Fact, MemoryChart, Page, Remark, Section, Table
from zeromesh.report.text import rich_table
from zeromesh.units import format_bytes, format_seconds

_READS = 20
"""Limit for the listed lines of code at which the host waits."""


def print_rehearsal(rehearsals: Sequence[Rehearsal], failures: Sequence[str]) -> None:
    """Prints the rehearsal of the first rank, and failures on any rank, including differences between ranks."""
    console = Console()
    first = rehearsals[0]
    console.print(Text(_title(first), style="bold"))
    console.print(Text(_subtitle(first, rehearsals)))
    for section in _sections(first):
        console.print(Text(f"\n{section.title}", style="bold"))
        console.print(rich_table(section.table))
    console.print(Text(f"\n{_time(first)}"))
    for failure in failures:
        console.print(Text(f"would fail: {failure}", style="bold red"))
    if not failures:
        console.print(Text(_nothing_fails(rehearsals), style="green"))


def rehearsal_page(rehearsals: Sequence[Rehearsal], failures: Sequence[str]) -> str:
    """Returns the rehearsal as an HTML page, with the timeline."""
    first = rehearsals[0]
    return Page(
        title=_title(first),
        subtitle=_subtitle(first, rehearsals),
        facts=_facts(first),
        memory=_chart(first.memory, first.cluster),
        timeline=timeline(first.trace, first.micro_batches) if first.trace and first.trace.events else None,
        sections=_sections(first),
        why=tuple(Remark(name="would fail", strategy="", outcome="excluded", text=text) for text in failures),
        why_title="What would fail",
        notes=(_time(first), *(() if failures else (_nothing_fails(rehearsals),))),
    ).to_html()


def _title(first: Rehearsal) -> str:
    return f"{first.model}, {first.strategy}, as rank {first.rank} of {first.world:,}"


def _subtitle(first: Rehearsal, rehearsals: Sequence[Rehearsal]) -> str:
    others = f"; compared with rank {', '.join(str(other.rank) for other in rehearsals[1:])}" if rehearsals[1:] else ""
    where = f" of {first.cluster}" if first.cluster else ", no cluster given"
    batches = f"{first.micro_batches} micro-batch{'es' * (first.micro_batches != 1)}"
    return f"mesh {mesh_text(dict(first.mesh))}{where}; {batches} a step{others}"


def _nothing_fails(rehearsals: Sequence[Rehearsal]) -> str:
    compared = ", and its collectives come in the same order on all of them" if rehearsals[1:] else ""
    ranks = "rank" if len(rehearsals) == 1 else "ranks"
    return f"nothing was found that would fail on the {len(rehearsals)} {ranks} rehearsed{compared}"


def _time(first: Rehearsal) -> str:
    host = f"the host needs {format_seconds(first.host_s)} a step on this machine"
    away = first.memory.host
    kinds = () if away is None or "step=device" in first.strategy else away.kinds
    if any(line.kind == "optimizer" and line.allocated_bytes for line in kinds):
        host += ", beside the optimizer's step in its memory, which is not timed here (zeromesh simulate)"
    if first.step_s is None or first.exposed_s is None:
        return f"{host}; for the time of a step say which cluster: --cluster NAME (see `zeromesh clusters`)"
    return (
        f"a step takes {format_seconds(first.step_s, digits=4)} on {first.cluster} with eager kernels, "
        f"{format_seconds(first.exposed_s)} of it waiting for communication; {host}"
    )


def _sections(first: Rehearsal) -> tuple[Section, ...]:
    found = [
        Section(key="state", title="Bytes of one device", table=_state(first.memory)),
        Section(key="peaks", title="Where the most is in use, phase by phase", table=_peaks(first.memory)),
        Section(key="traffic", title="Bytes one device sends a step, by axis", table=_traffic(first)),
        Section(key="launches", title="Launches a step, the most of any block", table=_launches(first)),
    ]
    if first.host_reads:
        rows = tuple((read.where, read.what, f"{read.count:,}") for read in first.host_reads[:_READS])
        reads = Table(heads=("line", "what", "times a step"), rows=rows)
        found.append(Section(key="reads", title="Where the host waits for the device", table=reads))
    return tuple(found)


def _state(memory: Memory) -> Table:
    rows = [(kind.kind, f"{kind.predicted_bytes:,}", f"{kind.allocated_bytes:,}") for kind in memory.kinds]
    total = ("total", f"{memory.predicted_bytes:,}", f"{memory.allocated_bytes:,}")
    peak = [
        ("peak, with activations", "", f"{memory.peak.allocated_bytes:,}"),
        ("peak, reserved by the allocator", "", f"{memory.peak_reserved_bytes:,}"),
    ]
    if memory.retries:
        peak.append(("the allocator gives its cache back", "", f"{memory.retries} times a step"))
    host = [] if memory.host is None else memory.host.kinds
    away = [(f"{kind.kind}, on the host", f"{kind.predicted_bytes:,}", f"{kind.allocated_bytes:,}") for kind in host]
    if memory.host is not None:
        limit_bytes = memory.host.limit_bytes
        usable = f"{limit_bytes / memory.host.ranks:,.0f}" if limit_bytes is not None else ""
        away.append(("peak, on the host (usable: its share)", usable, f"{memory.host.peak_bytes:,}"))
    beside = [("context and communicators", f"{memory.overhead_bytes:,.0f}", "")] if memory.overhead_bytes else []
    limit = [("usable", f"{memory.limit_bytes:,.0f}", "")] if memory.limit_bytes is not None else []
    return Table(heads=("kind", "predicted", "allocated"), rows=(*rows, total, *peak, *beside, *limit, *away))


def _peaks(memory: Memory) -> Table:
    """Lists the highest place of each phase, in the order of phases."""
    highest: dict[str, Peak] = {}
    for peak in memory.peaks:
        before = highest.get(peak.place.phase, peak)
        highest[peak.place.phase] = max(before, peak, key=lambda p: p.allocated_bytes)
    return Table(
        heads=("place", "allocated", "reserved by then"),
        rows=tuple(
            (str(p.place), format_bytes(p.allocated_bytes), format_bytes(p.reserved_bytes)) for p in highest.values()
        ),
    )


def _traffic(first: Rehearsal) -> Table:
    return Table(
        heads=("axis", "size", "stage", "calls", "predicted", "counted"),
        rows=tuple(
            (
                axis.label,
                f"{axis.size:,}",
                axis.stage,
                f"{axis.collectives:,}",
                f"{axis.predicted_bytes:,}",
                f"{axis.sent_bytes:,}",
            )
            for axis in first.axes
        ),
    )


def _launches(first: Rehearsal) -> Table:
    kinds = first.launches_per_unit()
    rows = tuple((kind, f"{kinds[kind]:,}") for kind in sorted(kinds, key=lambda kind: (kind != COMPUTE, kind)))
    return Table(heads=("kind", "launches"), rows=rows)


def _facts(first: Rehearsal) -> tuple[Fact, ...]:
    memory = first.memory
    beside = ", context and communicators included" if memory.overhead_bytes else ""
    facts = [
        Fact(key="strategy", label="strategy", value=first.strategy),
        Fact(key="world", label="ranks", value=f"{first.world:,}"),
        Fact(key="peak", label=f"peak memory{beside}", value=format_bytes(memory.peak_bytes)),
        Fact(key="reserved", label=f"reserved{beside}", value=format_bytes(memory.needed_bytes)),
        Fact(key="host_s", label="host time of a step", value=format_seconds(first.host_s)),
    ]
    if first.step_s is not None:
        facts.insert(2, Fact(key="step_s", label="step time", value=format_seconds(first.step_s, digits=4)))
    return tuple(facts)


def _chart(memory: Memory, cluster: str) -> MemoryChart:
    held = dict.fromkeys(KINDS, 0.0) | {kind.kind: float(kind.allocated_bytes) for kind in memory.kinds}
    rest = held | {"overhead": memory.overhead_bytes}
    peak = rest | {"activations": float(memory.peak.allocated_bytes - memory.allocated_bytes)}
    most = max(sum(peak.values()), memory.limit_bytes or 0.0) * 1.05
    bars = (Bar.of("between steps", rest, most), Bar.of(f"at the peak: {memory.peak.place}", peak, most))
    if memory.limit_bytes is None:
        return MemoryChart(kinds=KINDS, bars=bars)
    return MemoryChart(
        kinds=KINDS,
        bars=bars,
        limit=100 * memory.limit_bytes / most,
        limit_label=f"{format_bytes(memory.limit_bytes)} usable of a device of {cluster}",
        limit_bytes=memory.limit_bytes,
    )
