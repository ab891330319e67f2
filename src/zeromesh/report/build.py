"""Makes the page of a plan or a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from math import isfinite

from zeromesh.cluster.cluster import Cluster
from zeromesh.planner.evaluate import Choice, Estimate
from zeromesh.planner.plan import Planned
from zeromesh.report.curves import round_values
from zeromesh.report.page import (
    Bar,
    Fact,
    FrontChart,
    MemoryChart,
    Page,
    Point,
    Remark,
    Row,
    Section,
    Span,
    Table,
    Tick,
    Timeline,
)
from zeromesh.report.uncertainty import error_of_steps, uncertainty_lines
from zeromesh.simulator.result import Simulation
from zeromesh.strategy import Stage
from zeromesh.strategy.stage import HOST
from zeromesh.trace import Event, Trace
from zeromesh.units import format_bytes, format_seconds

KINDS = ("params", "grads", "optimizer", "buffers", "activations", "overhead")
_FINEST = 2000
"""Spans that a screen can show in a row; closer spans of one kind are drawn as one."""


def plan_page(planned: Planned) -> str:
    best, cluster = planned.best, planned.cluster
    return Page(
        title=f"{planned.model.name} on {cluster.world} x {cluster.device.name}",
        subtitle=f"{cluster.name}: {_levels(cluster)}; sequences of {planned.workload.seq_len:,} tokens, "
        f"{planned.workload.global_batch_tokens:,} tokens a step",
        facts=_facts(best),
        memory=_memory(planned.candidates, planned.limit_bytes, cluster),
        front=_front(planned.found.front, planned.limit_bytes),
        timeline=timeline(planned.trace, best.candidate.micro_batches) if planned.trace else None,
        sections=_sections(planned.candidates, best),
        why=tuple(
            Remark(name=reason.name, strategy=reason.strategy, outcome=reason.outcome, text=reason.text)
            for reason in planned.why
        ),
        notes=(*choice_lines(planned), *_notes(best.simulation), search_note(planned)),
    ).to_html()


def simulation_page(choices: Sequence[Choice], cluster: Cluster | None = None) -> str:
    """Returns the HTML page of a simulated strategy: its first choice, and the others in a table."""
    choice, simulation = choices[0], choices[0].simulation
    devices = f"{cluster.world} x {cluster.device.name}" if cluster else f"{simulation.world} devices"
    return Page(
        title=f"{simulation.named} on {devices}",
        subtitle=f"engine {simulation.engine}" + (f", cluster {cluster.name}: {_levels(cluster)}" if cluster else ""),
        facts=_facts(choice),
        memory=_memory(choices, simulation.memory_limit_bytes, cluster),
        timeline=timeline(simulation.trace, simulation.micro_batches) if simulation.trace else None,
        sections=_sections(choices, choice),
        notes=_notes(simulation),
    ).to_html()


def _sections(choices: Sequence[Choice], best: Choice) -> tuple[Section, ...]:
    return (
        Section(key="candidates", title="Candidates", table=candidates_table(choices)),
        Section(key="traffic", title="Traffic of the best", table=traffic_table(best)),
    )


_ANY = 0.97
"""From this share of computation on, a layout hardly waits. Layouts whose times have at least this ratio count as
equally fast."""


def search_note(planned: Planned) -> str:
    """Returns sentences on the searched space and the gap to the optimum."""
    found = planned.found
    proof = (
        "No layout is faster than the fastest: this is proven."
        if found.gap == 0
        else f"A layout that was not simulated can be at most {found.gap:.1%} faster than the fastest."
    )
    if any(point.candidate.strategy.percent < 100 for point in found.front):
        proof += " Shares of the tensors on the host were tried in steps of 10 %, and nothing is proven of others."
    return (
        f"{found.searched:,} candidates, {found.pruned_memory:,} cannot fit, {found.simulated} simulated in "
        f"{planned.seconds:.2f} s. {proof}"
    )


def choice_lines(planned: Planned) -> list[str]:
    """Returns lines on why the best layout is recommended: the fastest beside it, how far both may be off, and how much
    the network matters."""
    best, fastest = planned.best.simulation, planned.fastest.simulation
    lines = []
    differ = planned.best.candidate != planned.fastest.candidate
    if differ:
        gained, more = 1 - fastest.step_s / best.step_s, fastest.memory.total - best.memory.total
        memory = f"needs {format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
        cuts = [len(choice.candidate.strategy.axes) for choice in (planned.fastest, planned.best)]
        cut = f", cuts levels into {cuts[0]} parts instead of {cuts[1]}" if cuts[0] != cuts[1] else ""
        name = str(planned.fastest.candidate) if fastest.named == best.named else fastest.named
        lines.append(f"fastest: {name}; it is {gained:.1%} faster, {memory}{cut}")
    error = error_of_steps(best.parallel)
    if differ and error is not None:
        lines.append(
            f"both step times are predictions, which were {error.median:.1%} off at the median of {error.rows} "
            f"published figures"
        )
    if planned.depends:
        kept = planned.depends.layout == planned.best.candidate.named
        lines.append(f"{planned.depends}{'' if kept else ', which --no-robust recommends'}")
    host = planned.best.candidate.strategy.host
    if host is not Stage.ZERO:
        known = "" if isfinite(best.machine_limit_bytes) else " (not known how much it has: --host-memory)"
        longer = "a step takes no longer" if planned.host_s <= 0 else f"{format_seconds(planned.host_s)} more a step"
        lines.append(
            f"{best.strategy.partition(',')[0]} fits: {longer}, "
            f"{format_bytes(best.machine_memory_bytes)} of a machine's memory{known}"
        )
    computed = best.compute_s / best.step_s
    if computed > _ANY:
        alike = max(choice.simulation.step_s for choice in planned.candidates) <= best.step_s / _ANY
        rest = "any of these layouts will do" if alike else "with this layout the network hardly matters"
        lines.append(f"{computed:.0%} of the step is computation: {rest}")
    else:
        for_host = sum(seconds for axes, _, seconds in best.exposed if axes == HOST) / best.step_s
        beside = f", {for_host:.0%} for the host" if host is not Stage.ZERO else ""
        lines.append(f"{1 - computed - for_host:.0%} of the step waits for the network{beside}")
    return lines


def what_if_lines(planned: Planned, then: Sequence[tuple[str, Planned]]) -> list[str]:
    """Returns the recommendation and its step time now, and after each change."""
    now_s = planned.best.simulation.step_s
    lines = [f"now: {_taken(planned)}"] if then else []
    for change, other in then:
        ratio = other.best.simulation.step_s / now_s
        lines.append(f"what if {change}: {_taken(other)}; {abs(1 - ratio):.1%} {'less' if ratio < 1 else 'more'} time")
    return lines


def _taken(planned: Planned) -> str:
    simulation = planned.best.simulation
    return f"{simulation.named} takes {format_seconds(simulation.step_s, digits=4)} a step and {simulation.memory_text}"


def candidates_table(choices: Sequence[Choice]) -> Table:
    """One row per choice, best first."""
    return Table(
        heads=("strategy", "micro-batch", "recompute", "step", "tokens/s/device", "MFU", "exposed", "memory", "fits"),
        rows=tuple(
            (
                choice.simulation.named,
                f"{choice.candidate.micro_batch} x {choice.candidate.micro_batches}",
                choice.candidate.recomputation.value,
                format_seconds(choice.simulation.step_s, digits=4),
                f"{choice.simulation.tokens_per_s_per_device:,.0f}",
                f"{choice.simulation.mfu:.1%}",
                format_seconds(choice.simulation.exposed_comm_s),
                choice.simulation.memory_text,
                "yes" if choice.simulation.fits else "no",
            )
            for choice in choices
        ),
    )


def traffic_table(choice: Choice) -> Table:
    """One row per axis, innermost first, with the strategy's names."""
    simulation = choice.simulation
    exposed: dict[str, float] = {}
    for axes, _, seconds in simulation.exposed:
        exposed[axes] = exposed.get(axes, 0.0) + seconds
    return Table(
        heads=("axis", "size", "stage", "sent per device and step", "exposed"),
        rows=tuple(
            (
                axis.axis,
                str(axis.size),
                axis.stage,
                format_bytes(axis.bytes_sent_per_device),
                format_seconds(exposed.get(axis.axis, 0.0)),
            )
            for axis in simulation.axes
        )
        # A wait for traffic over several axes at once is not divided.
        + tuple(
            (axes, "", "", "", format_seconds(seconds))
            for axes, seconds in exposed.items()
            if axes not in {axis.axis for axis in simulation.axes}
        ),
    )


def pipeline_lines(simulation: Simulation) -> list[str]:
    """Returns a line on the ranks of a pipeline, if there is one."""
    ranks = [
        f"{rank.rank}{f' to {rank.rank + rank.count - 1}' if rank.count > 1 else ''}: "
        f"{format_seconds(rank.step_s, digits=4)}, {format_bytes(rank.memory_bytes)}"
        for rank in simulation.ranks
    ]
    return [f"ranks of the pipeline: {'; '.join(ranks)}"] if ranks else []


def _notes(simulation: Simulation) -> tuple[str, ...]:
    return (*simulation.notes(), *pipeline_lines(simulation), *uncertainty_lines(simulation.parallel))


def _levels(cluster: Cluster) -> str:
    return " x ".join(f"{name} {size}" for name, size in cluster.axes)


def _facts(choice: Choice) -> tuple[Fact, ...]:
    simulation, candidate = choice.simulation, choice.candidate
    batch = f"{candidate.micro_batch} x {candidate.micro_batches}"
    return (
        Fact(key="strategy", label="strategy", value=simulation.named),
        Fact(key="step_s", label="step time", value=format_seconds(simulation.step_s, digits=4)),
        Fact(key="mfu", label="MFU", value=f"{simulation.mfu:.1%}"),
        Fact(key="tokens", label="tokens/s per device", value=f"{simulation.tokens_per_s_per_device:,.0f}"),
        Fact(key="memory", label="memory per device", value=simulation.memory_text),
        Fact(key="batch", label="sequences x micro-batches", value=batch),
        Fact(key="recomputation", label="recomputation", value=candidate.recomputation.value),
    )


def _memory(choices: Sequence[Choice], limit_bytes: float, cluster: Cluster | None) -> MemoryChart:
    most = max(limit_bytes, *(choice.simulation.memory.total for choice in choices)) * 1.05
    return MemoryChart(
        kinds=KINDS,
        bars=tuple(Bar.of(str(each.candidate), asdict(each.simulation.memory), most) for each in choices),
        limit=100 * limit_bytes / most,
        limit_label=f"{format_bytes(limit_bytes)} usable"
        + (f" of {format_bytes(cluster.device.memory_bytes)} ({cluster.device.name})" if cluster else ""),
        limit_bytes=limit_bytes,
    )


def _front(front: Sequence[Estimate], limit_bytes: float) -> FrontChart:
    most_bytes = max([limit_bytes, *(point.memory_bytes for point in front)]) * 1.04
    slowest, fastest = max(p.step_s for p in front), min(p.step_s for p in front)
    low, high = fastest - 0.1 * (slowest - fastest or fastest), slowest + 0.1 * (slowest - fastest or slowest)

    def y(step_s: float) -> float:
        return 100 * (high - step_s) / (high - low)

    return FrontChart(
        points=tuple(
            Point(
                x=100 * point.memory_bytes / most_bytes,
                y=y(point.step_s),
                label=f"{point.candidate}: {format_seconds(point.step_s, 4)}, {_memory_of(point)}",
                step_s=point.step_s,
                memory_bytes=point.memory_bytes,
                best=point.step_s == fastest,
            )
            for point in front
        ),
        x_ticks=tuple(
            Tick(at=100 * value / most_bytes, label=format_bytes(value)) for value in round_values(0, most_bytes)
        ),
        y_ticks=tuple(Tick(at=y(value), label=format_seconds(value, digits=4)) for value in round_values(low, high)),
        limit=100 * limit_bytes / most_bytes,
    )


def _memory_of(point: Estimate) -> str:
    host = f" + {format_bytes(point.host_memory_bytes)} on the host" if point.host_memory_bytes else ""
    return f"{format_bytes(point.memory_bytes)}{host}"


def timeline(trace: Trace, micro_batches: int) -> Timeline:
    """Draws a step's events, with a row for each resource."""
    whole = trace.step_s
    resources = sorted({event.resource for event in trace.events}, key=lambda name: (name != "compute", name))
    caption = f"{format_seconds(whole, digits=4)}: {trace.label}"
    traced = len({event.micro_batch for event in trace.events if event.micro_batch >= 0})
    if traced < micro_batches:
        caption += f"; {traced} of {micro_batches} micro-batches, the others are alike"
    return Timeline(
        rows=tuple(_row(name, [e for e in trace.events if e.resource == name], whole) for name in resources),
        ticks=tuple(Tick(at=100 * value / whole, label=format_seconds(value)) for value in round_values(0, whole)),
        caption=caption,
    )


def _row(name: str, events: Sequence[Event], whole: float) -> Row:
    busy = sum(event.seconds for event in events if event.kind != "wait")
    spans = [
        Span(
            kind=group[0].kind,
            left=100 * group[0].start_s / whole,
            width=100 * (group[-1].end_s - group[0].start_s) / whole,
            label=_span_label(group),
        )
        for group in _merged(sorted(events, key=lambda event: event.start_s), whole / _FINEST)
    ]
    return Row(name=name, busy=f"{busy / whole:.0%}", spans=tuple(spans))


def _merged(events: Sequence[Event], finest_s: float) -> list[list[Event]]:
    """Groups neighbouring events of a kind that the screen could not tell apart."""
    groups = [[event] for event in events[:1]]
    for before, event in pairwise(events):
        near = event.start_s - before.end_s < finest_s and event.end_s - groups[-1][0].start_s < finest_s
        if near and event.kind == before.kind:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _span_label(group: Sequence[Event]) -> str:
    first = group[0]
    unit = "" if first.unit is None else f" {first.unit or 'root'}"
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    sent = sum(event.sent_bytes for event in group)
    size = f", {format_bytes(sent)}" if sent else ""
    return f"{first.name}{unit}{more}: {format_seconds(group[-1].end_s - first.start_s)}{size}"
