"""Shows values in a notebook: `_repr_html_` returns their page. `import zeromesh` loads this module under IPython."""

from __future__ import annotations

from html import escape
from typing import Any

from zeromesh.planner.evaluate import Choice
from zeromesh.planner.plan import Planned
from zeromesh.report.build import plan_page, simulation_page, timeline
from zeromesh.report.page import Bar, Fact, MemoryChart, Page, Section, Table
from zeromesh.strategy.plan import Plan
from zeromesh.trace import Trace
from zeromesh.units import format_bytes, format_seconds


def framed(html: str) -> str:
    """Puts a page into a frame for a notebook cell, so that its styles do not leak."""
    return f'<iframe srcdoc="{escape(html)}" style="width: 100%; height: 40em; border: 0"></iframe>'


def trace_page(trace: Trace) -> str:
    """Returns the timeline of a step as HTML."""
    batches = len({event.micro_batch for event in trace.events if event.micro_batch >= 0})
    shown = timeline(trace, batches) if trace.events else None
    return Page(title="One step", subtitle=trace.label, facts=(), sections=(), timeline=shown).to_html()


def value_page(plan: Plan) -> str:
    """Returns a plan, with the figures that it was chosen by, as HTML."""
    found: dict[str, Any] = plan.predicted or {}
    held = {kind: size for kind, size in found.get("memory_bytes", {}).items() if kind != "total"}
    most = 1.05 * sum(held.values())
    batch = f"{plan.micro_batch} x {plan.micro_batches}"
    facts = {"strategy": str(plan.strategy), "sequences x micro-batches": batch, "recomputation": plan.recompute}
    if found:
        facts |= {"step time": format_seconds(found["step_s"], 4), "MFU": f"{found['mfu']:.1%}"}
        facts |= {"memory per device": format_bytes(sum(held.values()))}
    rows = [
        (axis["axis"], str(axis["size"]), axis["stage"], format_bytes(axis["bytes_sent_per_device"]))
        for axis in found.get("axes", ())
    ]
    traffic = Table(heads=("axis", "size", "stage", "sent per device and step"), rows=tuple(rows))
    return Page(
        title=f"Plan for {' x '.join(f'{name} {size}' for name, size in plan.mesh)}",
        subtitle="",
        facts=tuple(Fact(key=name, label=name, value=value) for name, value in facts.items()),
        memory=MemoryChart(kinds=tuple(held), bars=(Bar.of("predicted", held, most),)) if held else None,
        sections=(Section(key="traffic", title="Traffic", table=traffic),) if rows else (),
    ).to_html()


Plan._repr_html_ = lambda self: framed(value_page(self))  # type: ignore[attr-defined]  # only for IPython
Choice._repr_html_ = lambda self: framed(simulation_page([self]))  # type: ignore[attr-defined]  # as above
Planned._repr_html_ = lambda self: framed(plan_page(self))  # type: ignore[attr-defined]  # as above
Trace._repr_html_ = lambda self: framed(trace_page(self))  # type: ignore[attr-defined]  # as above
