"""The errors that `zeromesh plan` prints. They are a small table in the package, since predicting all tables takes
minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from validation.row import Row
from validation.score import score
from zeromesh.report.uncertainty import Errors

ERRORS = Path(__file__).resolve().parents[1] / "src" / "zeromesh" / "report" / "errors.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tables behind one entry."""

    of: str  # the predicted quantity, in words
    degrees: tuple[str, ...] = ()  # the parallelisms that the entry is for; empty: only data parallelism
    tables: tuple[str, ...]  # of the published figures


SOURCES = (
    Source(
        of="step times of other engines",
        tables=(
            *("AMSP Table V", "AMSP Fig. 12", "AMSP MFU", "LLM Foundry, one node", "LLM Foundry, several nodes"),
            *("torchtitan", "Megatron Bridge"),
        ),
    ),
    Source(
        of="one strategy's step time over another's",
        tables=("AMSP layouts, one engine", "ZeRO++ over ZeRO-3", "PaRO", "Frontier"),
    ),
    Source(of="memory of other engines", tables=("torchtitan memory", "InternEvo memory", "Galvatron memory")),
    Source(
        of="step times with cp relative to none, in fp8",
        degrees=("cp",),
        tables=("torchtitan, cp over none",),
    ),
    Source(
        of="step times of Llama in fp8 under Megatron",
        degrees=("tp", "pp"),
        tables=("Megatron Bridge, tp and pp",),
    ),
    Source(
        of="an all-to-all inside a node with nothing beside it",
        degrees=("ep",),
        tables=("Collectives of tp and ep",),
    ),
    Source(of="memory of 7B and 20B on 3 to 16 A800", degrees=("tp", "pp"), tables=("InternEvo memory, tp and pp",)),
    Source(of="memory of one to four layers on 8 A100", degrees=("tp", "pp"), tables=("Galvatron memory, tp and pp",)),
)


def errors(rows: Sequence[Row]) -> Iterator[Errors]:
    """Yields the entries, from the rows of all their tables."""
    for source in SOURCES:
        found = score(source.of, [row for row in rows if row.table in source.tables])
        median, p90 = round(found.median, 3), round(found.p90, 3)
        yield Errors(of=source.of, degrees=source.degrees, rows=found.count, median=median, p90=p90)


def errors_json(rows: Sequence[Row]) -> str:
    return "[\n" + ",\n".join(f" {json.dumps(asdict(entry))}" for entry in errors(rows)) + "\n]\n"
