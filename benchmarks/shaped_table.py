"""Tables of the measurements by `shaped.py`.

    python -m benchmarks.shaped_table benchmarks/results/shaped.json > benchmarks/results/shaped.md

The lower bound of a lossless step is the longer of two times. One is the same strategy's step without shaped links: its
computation, and the processor time for moving the same bytes. The other is the bytes of the busiest link over its rate.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab import Tree

Cell = dict[str, Any]
Row = dict[str, Any]
NAMES = ("node", "cluster", "region")
CAPS = (1.3, 1.6, 1.9)
CURVE = (1.0, 1.3, 1.6, 1.9, 2.5, 4.0)
"""Caps on memory, as multiples of FSDP2's."""

MIN_PAIRS = 8
"""From this number of rounds on, a cell is shown in pairs: it has few systems, many times, while others have all
systems."""

OURS_REDUCES = " + our reduce-scatter"
NO_MASTERS = ", bf16 masters"


def shape_of(tree: str) -> tuple[int, ...]:
    """Returns the sizes of the mesh's axes, outermost first."""
    parsed = Tree.parse(tree)
    return (*(level.size for level in parsed.levels), *([parsed.ranks_per_leaf] * (parsed.ranks_per_leaf > 1)))


def mesh_of(tree: str) -> dict[str, int]:
    """Returns the axes with their sizes, outermost first."""
    shape = shape_of(tree)
    return dict(zip(NAMES[: len(shape)][::-1], shape, strict=True))


def link_seconds(tree: str, sent_bytes: dict[str, int]) -> float:
    """Seconds of the busiest link, given the bytes per axis. A link carries all bytes that ranks below it send out."""
    names, shape = zip(*mesh_of(tree).items(), strict=True)
    seconds = 0.0
    for depth, level in enumerate(Tree.parse(tree).levels):
        if level.rate_bytes_per_s is not None:
            below = math.prod(shape[depth + 1 :])
            out = sum(sent_bytes[name] for name in names[: depth + 1])
            seconds = max(seconds, below * out / level.rate_bytes_per_s)
    return seconds


def is_lossless(row: Row) -> bool:
    return "@int" not in row["system"]


def fastest_pair(rows: Sequence[Row], dtype: str, *, masters: bool) -> tuple[Row, ...]:
    """Returns the fastest of ours and of the peers, among those with fp32 masters or those without; empty if there is
    no such pair."""
    ours = [row for row in rows if "sent_bytes" in row and not (masters and row["system"].endswith(NO_MASTERS))]
    peers = [row for row in rows if "sent_bytes" not in row]
    peers = [row for row in peers if masters != (dtype == "bfloat16" and row["system"].startswith("DDP"))]
    return tuple(min(side, key=lambda row: row["step_s"]) for side in (ours, peers)) if ours and peers else ()


def key_of(cell: Cell) -> tuple[object, ...]:
    return shape_of(cell["tree"]), cell["dtype"], cell["micro_batches"], cell.get("model")


def bounded(cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any], float, float]]:
    """Yields (cell, row, unshaped seconds, link seconds) of every lossless row that was also measured without
    shaping."""
    free = {key_of(c): {r["system"]: r["step_s"] for r in c["rows"]} for c in cells if is_free(c)}
    for cell in cells:
        if is_free(cell) or key_of(cell) not in free:
            continue
        for row in cell["rows"]:
            unshaped = free[key_of(cell)].get(row["system"])
            if "sent_bytes" in row and is_lossless(row) and unshaped:
                yield cell, row, unshaped, link_seconds(cell["tree"], row["sent_bytes"])


def is_free(cell: Cell) -> bool:
    return all(level.rate_bytes_per_s is None for level in Tree.parse(cell["tree"]).levels)


def label(cell: Cell) -> str:
    return f"{cell['tree']} | {cell['dtype']} | {cell['micro_batches']}"


def caps_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Fastest lossless that fits\n"
    yield "Step of the best peer over that of ours, under caps of so many times FSDP2's memory.\n"
    yield (
        "| tree | dtype | micro-batches | "
        + " | ".join(f"{cap}x" for cap in CAPS)
        + " | no cap | ours / peer, no cap |"
    )
    yield "|---" * (5 + len(CAPS)) + "|"
    logs: dict[float, list[float]] = {cap: [] for cap in CAPS}
    for cell in cells:
        by_cap = {entry["cap"]: entry for entry in cell["under_caps"]}
        if is_free(cell) or not by_cap:
            continue
        for cap in CAPS:
            logs[cap].append(math.log(by_cap[cap]["speedup"]))
        shown = " | ".join(f"{by_cap[cap]['speedup']:.2f}" for cap in CAPS)
        free = by_cap[None]
        yield f"| {label(cell)} | {shown} | {free['speedup']:.2f} | {free['ours']} / {free['peer']} |"
    means = " | ".join(f"**{math.exp(statistics.fmean(values)):.2f}**" for values in logs.values() if values)
    yield f"| geometric mean | | | {means} | | |\n"


def pairs_table(cells: Sequence[Cell]) -> Iterator[str]:
    """Half of the rounds choose the fastest of ours and of the peers; the other half time them; then the halves change
    roles. So the luck that made a row the fastest is not part of the figure."""
    yield "## Without a cap, in pairs\n"
    yield (
        "Step of the best peer over that of ours, both chosen in half of the rounds and timed in the other half: "
        "median of all pairs, and what it lies between with 95 %. In bf16 both with fp32 masters or both without, "
        "whichever is worse.\n"
    )
    yield "| tree | dtype | micro-batches | pairs | median | 95 % | ours / peer |"
    yield "|---" * 7 + "|"
    for cell in cells:
        compared = [pairs for masters in (True, False) if (pairs := _pairs(cell, masters=masters))]
        names, ratios = min(compared, key=lambda found: statistics.median(found[1]))
        low, high = _interval(ratios)
        yield (
            f"| {label(cell)} | {len(ratios)} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} "
            f"| {'; '.join(dict.fromkeys(names))} |"
        )
    yield ""


def _pairs(cell: Cell, *, masters: bool) -> tuple[list[str], list[float]]:
    """Returns the names of the chosen pairs, and the peer's step over ours in each round."""
    rows = {row["system"]: row for row in cell["rows"] if is_lossless(row)}
    names: list[str] = []
    ratios: list[float] = []
    for half in (0, 1):
        # Two consecutive rounds, since every other round has the systems in reverse order.
        chosen = [index for index in range(cell["rounds"]) if index // 2 % 2 == half]
        medians = [row | {"step_s": statistics.median(row["all_s"][i] for i in chosen)} for row in rows.values()]
        pair = fastest_pair(medians, cell["dtype"], masters=masters)
        if not pair:
            return [], []
        ours, peer = (rows[row["system"]] for row in pair)
        names.append(f"{ours['system']} / {peer['system']}")
        ratios += [
            peer["all_s"][index] / ours["all_s"][index] for index in range(cell["rounds"]) if index not in chosen
        ]
    return names, ratios


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns order statistics between which the median lies with at least 95 %: of n fair coins, fewer than 2.5 % fall
    outside on either side."""
    values, count = sorted(values), len(values)
    outside = 0
    while sum(math.comb(count, k) for k in range(outside + 1)) <= 0.025 * 2**count:
        outside += 1
    outside = max(outside - 1, 0)
    return values[outside], values[-1 - outside]


def curve_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## The curve\n"
    yield (
        "Seconds of the fastest lossless of ours / of the peers under each cap, in times of FSDP2's memory; in bf16 of "
        "the pair that counts, both with fp32 masters or both without.\n"
    )
    yield "| tree | dtype | micro-batches | " + " | ".join(f"{cap:g}x" for cap in CURVE) + " |"
    yield "|---" * (3 + len(CURVE)) + "|"
    for cell in cells:
        unit = next((row["bytes"] for row in cell["rows"] if row["system"] == "FSDP2"), None)
        if unit is not None:
            yield f"| {label(cell)} | " + " | ".join(_point(cell, cap, cap * unit) for cap in CURVE) + " |"
    yield ""


def _point(cell: Cell, cap: float, most_bytes: float) -> str:
    seconds = {row["system"]: row["step_s"] for row in cell["rows"]}
    pair = next((entry for entry in cell["under_caps"] if entry["cap"] == cap), None)
    if pair is not None:
        return f"{seconds[pair['ours']]:.2f} / {seconds[pair['peer']]:.2f}"
    # None of ours fits, or none that a peer can be compared with.
    peers = [row["step_s"] for row in cell["rows"] if "sent_bytes" not in row and row["bytes"] <= most_bytes]
    return f"- / {min(peers):.2f}" if peers else "-"


def systems_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Every system at its own memory\n"
    yield "Times of FSDP2's memory, seconds of a step, smallest first.\n"
    for cell in cells:
        unit = next((row["bytes"] for row in cell["rows"] if row["system"] == "FSDP2"), None)
        if unit is not None:
            rows = sorted(cell["rows"], key=lambda row: (row["bytes"], row["step_s"]))
            points = (f"{row['bytes'] / unit:.2f}x {row['step_s']:.2f} {row['system']}" for row in rows)
            yield f"- {label(cell)}: {'; '.join(points)}"
    yield ""


def fsdp_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## FSDP2 with sharded gradients\n"
    yield (
        "Step of the best FSDP2 that reduces every micro-batch, as it ships and with our reduce-scatter, over our best "
        "in no more than 1.9 of its memory.\n"
    )
    for cell in cells:
        rows = {row["system"]: row for row in cell["rows"]}
        if is_free(cell) or "FSDP2" not in rows:
            continue
        fitting = [
            r
            for r in rows.values()
            if "sent_bytes" in r
            and not r["system"].endswith(("@int8/int4", NO_MASTERS))
            and r["bytes"] <= 1.9 * rows["FSDP2"]["bytes"]
        ]
        best = min(fitting, key=lambda row: row["step_s"])
        sharded = [r for n, r in rows.items() if n.startswith("FSDP2") and "2-D" not in n and "whole" not in n]
        shown = []
        for given in (False, True):
            peers = [row for row in sharded if row["system"].endswith(OURS_REDUCES) == given]
            if peers:
                peer = min(peers, key=lambda row: row["step_s"])
                shown.append(f"{peer['step_s'] / best['step_s']:.2f} ({peer['system']})")
        yield f"- {label(cell)}: {', '.join(shown)} over {best['system']}"
    yield ""


def quantised_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## int8 parameters and int4 gradients on the outermost axis\n"
    for cell in cells:
        rows = {row["system"]: row["step_s"] for row in cell["rows"]}
        for name, seconds in rows.items():
            if name.endswith("@int8/int4") and not is_free(cell):
                plain = rows[name.removesuffix("@int8/int4")]
                yield f"- {label(cell)}, {name}: {plain:.2f} s lossless, {seconds:.2f} s: {plain / seconds:.2f}x"
    yield ""


def bound_table(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Lossless steps over their lower bound\n"
    yield (
        "The bound is the longer of two: the step without shaping, which is computation and the processor's part of "
        "sending, and the bytes over the busiest link at its rate. Allowed is 1.10 where one is at least twice the "
        "other, else 1.25.\n"
    )
    yield "| tree | dtype | micro-batches | strategy | step s | unshaped s | link s | over bound | allowed |"
    yield "|---" * 9 + "|"
    kept: list[tuple[float, float]] = []
    for cell, row, unshaped, link in bounded(cells):
        bound = max(unshaped, link)
        allowed = 1.10 if bound >= 2 * min(unshaped, link) else 1.25
        over = row["step_s"] / bound
        kept.append((over, allowed))
        yield (
            f"| {label(cell)} | {row['system']} | {row['step_s']:.2f} | {unshaped:.2f} | {link:.2f} | {over:.2f} "
            f"| {allowed:.2f} |"
        )
    if kept:
        inside = sum(over <= allowed for over, allowed in kept)
        median = statistics.median(over for over, _ in kept)
        yield f"\n{inside} of {len(kept)} inside; median {median:.2f} of the bound."
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    held = json.loads(parser.parse_args().file.read_text())
    print("# Behind slow links\n")
    print(", ".join(f"{key}: {value}" for key, value in held["setting"].items()) + "\n")
    if any("carried_s" in row for cell in held["cells"] for row in cell["rows"]):
        print(
            "In bf16 DDP was timed while the last of ours still refreshed its parameters. What that can have cost it "
            "at most, `carried_s`, is taken off: these figures of ours are the least that they can be.\n"
        )
    whole = [cell for cell in held["cells"] if cell["rounds"] < MIN_PAIRS]
    paired = [cell for cell in held["cells"] if cell["rounds"] >= MIN_PAIRS]
    for table in (caps_table, curve_table, systems_table, fsdp_table, quantised_table, bound_table) if whole else ():
        print("\n".join(table(whole)))
    if paired:
        print("\n".join(pairs_table(paired)))


if __name__ == "__main__":
    main()
