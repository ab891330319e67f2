"""What rank 0 prints before and after a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zeromesh.launch.device import device_name
from zeromesh.observe.report import MemoryLine, TrafficLine
from zeromesh.train.config import TrainConfig
from zeromesh.train.corpus import Corpus
from zeromesh.train.nonfinite import NonFinite
from zeromesh.train.resize import mesh_text
from zeromesh.train.sampler import Sampler
from zeromesh.train.sequences import Documents

T = TypeVar("T")

KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer: master copy and moments",
    "buffers": "gather and reduce buffers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one device, in bytes."""

    name: str
    predicted: int
    measured: int

    @classmethod
    def of_memory(cls, line: MemoryLine) -> Self:
        name = KINDS.get(line.kind, line.kind)
        return cls(name=name, predicted=line.predicted_bytes, measured=line.allocated_bytes)

    @classmethod
    def of_traffic(cls, line: TrafficLine) -> Self:
        name = f"{line.axis}: {line.size} ranks, stage {line.stage}"
        return cls(name=name, predicted=line.predicted_bytes, measured=line.sent_bytes)


def header(
    config: TrainConfig, corpus: Corpus, model: nn.Module, sampler: Sampler, device: torch.device, steps_done: int
) -> list[str]:
    """Model, layout, data, batch and rank 0's device of a run, in a few lines."""
    parameters = sum(parameter.shape.numel() for parameter in model.parameters())
    tokens = config.batch.global_sequences * config.data.seq_len
    lines = [
        f"{type(model).__name__}, {parameters:,} parameters; mesh {mesh_text(config.mesh)}, strategy {config.chosen()}",
        *_data(corpus),
        f"{tokens:,} tokens a step: {sampler.micro_batches} micro-batches of up to {config.batch.micro} sequences"
        f" of {config.data.seq_len} on each of {config.world} ranks ({device_name(device)})",
    ]
    if steps_done >= config.run.steps:
        lines.append(f"all {config.run.steps} steps are done: nothing is left to do")
    return lines


def _data(corpus: Corpus) -> Iterator[str]:
    rows = corpus.training
    yield f"{corpus.num_documents:,} documents, {rows.tokens.numel():,} tokens; vocabulary {corpus.vocab_size:,}"
    if isinstance(rows, Documents):
        yield packed(rows)


def packed(documents: Documents) -> str:
    """How they came into rows, and what did not."""
    return (
        f"in {len(documents):,} rows of {documents.seq_len} tokens; cut off: {documents.cut_off:,};"
        f" left out, since a row would hold nothing to learn of them: {documents.left_out:,}"
    )


def fault_lines(counts: NonFinite) -> list[str]:
    """What went wrong on the way; nothing where nothing did."""
    lines = []
    if counts.skipped:
        lines.append(f"{counts.skipped} steps were skipped: their loss or gradient was not finite")
    if counts.rollbacks:
        lines.append(f"rolled back {counts.rollbacks} times; {counts.left_out} batches were left out")
    return lines


def gathered(rows: Sequence[T]) -> list[list[T]]:
    """Each row as every rank has it; collective."""
    everyone: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(rows))
    return [list(row) for row in zip(*everyone, strict=True)]


def table(memory_lines: Sequence[Sequence[MemoryLine]], traffic_lines: Sequence[Sequence[TrafficLine]]) -> str:
    """Predicted against measured, in bytes; where devices differ, the largest.

    Args:
        memory_lines, traffic_lines: by row, by rank.
    """
    memory = [[Row.of_memory(line) for line in ranks] for ranks in memory_lines]
    traffic = [[Row.of_traffic(line) for line in ranks] for ranks in traffic_lines]
    devices = len(memory[0])
    same = all(row.predicted == row.measured for ranks in (*memory, *traffic) for row in ranks)
    verdict = "predicted and measured agree" if same else "predicted and measured differ"
    lines = [
        *_section("bytes of one device", "predicted", "allocated", memory),
        "",
        *_section("bytes one device sends a step, by axis", "predicted", "counted", traffic),
        "",
        f"{verdict} on all {devices} devices" if same else f"{verdict}; the largest of {devices} devices is shown",
    ]
    return "\n".join(lines)


def _section(title: str, left: str, right: str, rows: Sequence[Sequence[Row]]) -> list[str]:
    lines = [f"{title:<40} {left:>14} {right:>14}", f"{'-' * 40} {'-' * 14} {'-' * 14}"]
    for ranks in rows:
        predicted, measured = max(row.predicted for row in ranks), max(row.measured for row in ranks)
        lines.append(f"{ranks[0].name:<40} {predicted:>14,} {measured:>14,}")
    return lines
