"""Prints plans and simulations in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from zeromesh.cluster.cluster import Cluster
from zeromesh.planner.evaluate import Choice
from zeromesh.planner.plan import Planned
from zeromesh.report.build import (
    candidates_table,
    choice_lines,
    pipeline_lines,
    search_note,
    traffic_table,
    what_if_lines,
)
from zeromesh.report.page import Table
from zeromesh.report.uncertainty import uncertainty_lines
from zeromesh.strategy.stage import HOST
from zeromesh.units import format_bytes, format_seconds

_COLOURS = {"chosen": "green", "slower": "yellow", "excluded": "red"}


def print_plan(planned: Planned, then: Sequence[tuple[str, Planned]] = (), further: Sequence[str] = ()) -> None:
    """Prints the best layout, the best layouts after changes (`then`), candidates, memory, traffic and reasons; then
    the sentences in `further`."""
    console, cluster, best = Console(), planned.cluster, planned.best
    console.print(
        f"[bold]{planned.model.name}[/bold] on {cluster.world} x {cluster.device.name} "
        f"({', '.join(f'{name} {size}' for name, size in cluster.axes)})"
    )
    _print_words(console, ("recommended: ", ""), (best.simulation.named, "bold green"))
    for line in (*choice_lines(planned), *what_if_lines(planned, then)):
        _print(console, line, 1)
    _candidates(console, planned.candidates)
    _details(console, best)
    _title(console, "why the others lose")
    for why in planned.why:
        _print_words(console, (f"  {why.name}  ", _COLOURS[why.outcome]), (why.strategy, "cyan"))
        _print(console, why.text, 2)
    _title(console, "")
    for line in (search_note(planned), *further):
        _print(console, line)


def print_simulation(choices: Sequence[Choice], cluster: Cluster, further: Sequence[str] = ()) -> None:
    """Prints time, memory and traffic of a strategy's first choice, with the other choices; then the sentences in
    `further`."""
    console, choice = Console(), choices[0]
    console.print(f"{choice.simulation.engine} on {cluster.world} x {cluster.device.name} of {cluster.name}")
    _candidates(console, choices)
    _details(console, choice)
    for line in further:
        _title(console, "")
        _print(console, line)


def _print_words(console: Console, *words: tuple[str, str]) -> None:
    """Prints words with their styles on one line, however long."""
    console.print(Text.assemble(*words), soft_wrap=True)


def _print(console: Console, text: str, depth: int = 0) -> None:
    """Prints an indented paragraph without breaking words."""
    indent = "  " * depth
    wrapped = textwrap.TextWrapper(console.width, indent, indent, break_long_words=False, break_on_hyphens=False)
    console.print(Text(wrapped.fill(text)), soft_wrap=True)


def _title(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}" if title else "", style="bold"))


def _candidates(console: Console, choices: Sequence[Choice]) -> None:
    _title(console, "candidates" if len(choices) > 1 else "prediction")
    for choice, row in zip(choices, candidates_table(choices).rows, strict=True):
        name, _, recompute, step, tokens, mfu, exposed, memory, fits = row
        count, size = choice.candidate.micro_batches, choice.candidate.micro_batch
        batches = f"{count} micro-batch{'es' * (count > 1)} of {size} sequence{'s' * (size > 1)}"
        _print_words(console, (f"  {name}", "cyan"))
        _print(console, f"{step} a step, {tokens} tokens/s a device, MFU {mfu}, {exposed} exposed", 2)
        fitting = "" if fits == "yes" else ", does not fit"
        _print(console, f"{memory}{fitting}; {batches}, recomputation {recompute}", 2)


def _details(console: Console, choice: Choice) -> None:
    simulation = choice.simulation
    _title(console, f"one device under {simulation.named}")
    memory = ", ".join(f"{kind} {format_bytes(value)}" for kind, value in simulation.memory.as_dict().items())
    _print(console, f"memory: {memory} (usable {format_bytes(simulation.memory_limit_bytes)})", 1)
    if simulation.host_memory_bytes:
        limit, machine = simulation.machine_limit_bytes, format_bytes(simulation.machine_memory_bytes)
        usable = f"{format_bytes(limit)} usable" if isfinite(limit) else "not known how much it has: --host-memory"
        host = format_bytes(simulation.host_memory_bytes)
        _print(console, f"memory of its host: {host} per device, {machine} a machine ({usable})", 1)
    computes, waits = format_seconds(simulation.compute_s, digits=4), format_seconds(simulation.exposed_comm_s)
    _print(console, f"a step: computes {computes}, waits for communication {waits}", 1)
    for axis, size, stage, sent, exposed in traffic_table(choice).rows:
        if axis == HOST:
            _print(console, f"{axis}: {sent} copied, and the step there, {exposed} exposed", 1)
        elif size != "1":
            ranks = f" ({size} ranks{f', stage {stage}' if stage else ''}): {sent} sent," if size else ":"
            _print(console, f"{axis}{ranks} {exposed} exposed", 1)
    for line in (*pipeline_lines(simulation), *simulation.notes()):
        _print(console, line, 1)
    _title(console, "how far such predictions were off")
    for line in uncertainty_lines(simulation.parallel):
        _print(console, line, 1)


def rich_table(table: Table) -> RichTable:
    """Makes a table for a terminal: text to the left, figures to the right."""
    shown = RichTable(box=None, pad_edge=False)
    for position, head in enumerate(table.heads):
        first = position == 0
        shown.add_column(head, justify="left" if first else "right", overflow="fold", min_width=24 if first else None)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown
