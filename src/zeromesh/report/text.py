"""Plans and simulations as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from zeromesh.cluster.cluster import Cluster
from zeromesh.planner.evaluate import Choice
from zeromesh.planner.plan import Planned
from zeromesh.report.build import candidates_table, choice_lines, search_note, traffic_table, trust_lines, what_if_lines
from zeromesh.report.page import Table
from zeromesh.strategy.stage import HOST
from zeromesh.units import format_bytes, format_seconds

_COLOURS = {"chosen": "green", "slower": "yellow", "excluded": "red"}


def print_plan(planned: Planned, then: Sequence[tuple[str, Planned]] = ()) -> None:
    """The best, the best `then`, candidates, memory, traffic and the why."""
    console = Console()
    cluster = planned.cluster
    console.print(
        f"[bold]{planned.model.name}[/bold] on {cluster.world} x {cluster.device.name} "
        f"({', '.join(f'{name} {size}' for name, size in cluster.axes)})"
    )
    console.print(Text.assemble("recommended: ", (planned.best.simulation.named, "bold green")), soft_wrap=True)
    for line in (*choice_lines(planned), *what_if_lines(planned, then)):
        console.print(Text(line))
    _candidates(console, planned.candidates)
    _details(console, planned.best)
    console.print("why the others lose")
    for why in planned.why:
        console.print(Text.assemble((why.name, _COLOURS[why.outcome]), "  ", (why.strategy, "cyan"), "  ", why.text))
    console.print(Text(search_note(planned), style="dim"))


def print_simulation(choices: Sequence[Choice], cluster: Cluster) -> None:
    """One strategy: time, memory and traffic of its first choice, beside the others."""
    console = Console()
    choice = choices[0]
    console.print(f"{choice.simulation.engine} on {cluster.world} x {cluster.device.name} of {cluster.name}")
    _candidates(console, choices)
    _details(console, choice)


def _candidates(console: Console, choices: Sequence[Choice]) -> None:
    for name, micro_batch, recompute, step, tokens, mfu, exposed, memory, fits in candidates_table(choices).rows:
        console.print(Text(name, style="cyan"), soft_wrap=True)  # a long name stays one word
        fitting = "" if fits == "yes" else ", does not fit"
        console.print(Text(f"  {step} a step, {tokens} tokens/s a device, MFU {mfu}, {exposed} exposed"))
        joint = "\n  " if HOST in memory else "; "
        console.print(Text(f"  {memory}{fitting}{joint}micro-batch {micro_batch}, recomputation {recompute}"))


def _details(console: Console, choice: Choice) -> None:
    simulation = choice.simulation
    memory = ", ".join(f"{kind} {format_bytes(value)}" for kind, value in simulation.memory.as_dict().items())
    console.print(Text(f"memory per device: {memory} (usable {format_bytes(simulation.memory_limit_bytes)})"))
    if simulation.host_memory_bytes:
        limit, machine = simulation.machine_limit_bytes, format_bytes(simulation.machine_memory_bytes)
        usable = f"{format_bytes(limit)} usable" if isfinite(limit) else "not known how much it has: --host-memory"
        host = format_bytes(simulation.host_memory_bytes)
        console.print(Text(f"memory of its host: {host} per device, {machine} a machine ({usable})"))
    console.print(
        Text(
            f"computes {format_seconds(simulation.compute_s, digits=4)}, waits for communication "
            f"{format_seconds(simulation.exposed_comm_s)}"
        )
    )
    rows = [row for row in traffic_table(choice).rows if row[1] != "1" or row[0] == HOST]
    if rows:
        console.print("traffic per device and step:")
    for axis, size, stage, sent, exposed in rows:
        ranks = f" ({size} ranks{f', stage {stage}' if stage else ''}): {sent} sent," if size else ":"
        ranks = f": {sent} copied, and the step there," if axis == HOST else ranks
        console.print(Text(f"  {axis}{ranks} {exposed} exposed"))
    for line in (*simulation.notes(), *trust_lines(simulation)):
        console.print(Text(line))


def rich_table(table: Table) -> RichTable:
    """The table for a terminal: text to the left, figures to the right."""
    shown = RichTable(box=None, pad_edge=False)
    for position, head in enumerate(table.heads):
        first = position == 0
        shown.add_column(head, justify="left" if first else "right", overflow="fold", min_width=24 if first else None)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown
