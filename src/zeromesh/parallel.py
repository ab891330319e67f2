"""Parallelism beside data: by how many ranks a model is cut inside of each data-parallel one.

[Note: Mesh] The ranks of a cluster, innermost first::

    tp              a part of the innermost level
    cp (and ep)     the innermost data-parallel ranks: they share weights, so zeromesh's stages lie over them
    data            the ranks that the strategy's axes span, cp included
    pp              the outermost ranks

This is the order of torchtitan's mesh (torchtitan/distributed/parallel_dims.py: pp, dp_replicate, dp_shard, cp, tp,
outermost first). With one of each nothing is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.errors import InputError, one_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""Pipeline schedules of torch.distributed.pipelining: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble."""

DEGREES = ("tp", "cp", "pp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Degrees of the parallelisms beside data: [Note: Mesh]. Raises InputError for a degree below 1, or a schedule that
    does not exist or takes no chunks."""

    tp: int = 1  # ranks that share the heads, the feed-forward and the vocabulary of each layer
    cp: int = 1  # ranks that share the tokens of each sequence
    pp: int = 1  # ranks in a row that share the layers
    ep: int = 1  # ranks that share the experts; of the data-parallel ones
    pp_schedule: str = "1f1b"  # one of `SCHEDULES`
    pp_chunks: int = 1  # stages that one rank of a pipeline holds
    sequence_parallel: bool = True  # norms and residuals, which tp leaves whole in each layer, are cut along tokens

    def __post_init__(self) -> None:
        for name in (*DEGREES, "pp_chunks"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_schedule(self.pp_schedule, self.pp_chunks)

    @property
    def cuts(self) -> bool:
        """Whether anything is cut beside data."""
        return any(getattr(self, name) > 1 for name in DEGREES)

    def __str__(self) -> str:
        """As `tp=4,pp=2 (1f1b)`; empty where nothing is cut."""
        text = ",".join(f"{name}={getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1)
        if self.pp > 1:
            chunks = f", {self.pp_chunks} chunks" if self.pp_chunks > 1 else ""
            text += f" ({self.pp_schedule}{chunks})"
        return text if self.sequence_parallel or self.tp == 1 else f"{text} without sequence parallelism"

    # Pipelines ------------------------------------------------------------------------------------------------------

    def in_flight(self, rank: int, micro_batches: int) -> float:
        """Micro-batches whose activations rank `rank` of a pipeline, 0 first, holds at the most.

        GPipe holds all. 1F1B (PipeDream-Flush, arXiv 2006.09503) runs p - rank forwards before its first backward.
        Interleaved, of v chunks of 1/v of the layers each, 2 (p - rank - 1) + (v - 1) p + 1 chunks (arXiv 2104.04473;
        Megatron-LM's schedules.py, get_pp_rank_microbatches). Zero-bubble ZB-H1 holds as many as 1F1B (2401.10241).
        """
        if self.pp == 1:
            return 1.0
        if self.pp_schedule == "gpipe":
            return float(micro_batches)
        held = float(self.pp - rank)
        if self.pp_chunks > 1:
            held = (2 * (self.pp - rank - 1) + (self.pp_chunks - 1) * self.pp + 1) / self.pp_chunks
        return min(held, float(micro_batches))

    def bubble_s(self, others_s: float, weights_s: float) -> float:
        """Seconds of a step that one rank of a pipeline stands idle, where one micro-batch's forward and backward take
        `others_s` on all other ranks together. Of those `weights_s` are for gradients of weights, which need not be
        there for the rank before to go on.

        With equal ranks (p - 1)(F + B) for GPipe and 1F1B, a share (p - 1)/(m + p - 1) of the step; a v-th of that
        interleaved (arXiv 2104.04473, section 2.2); (p - 1)(F + B - 2 W), B with W in it, for ZB-H1 (2401.10241,
        table 1).
        """
        if self.pp_schedule == "zero-bubble":
            others_s -= 2 * weights_s
        return max(0.0, others_s) / self.pp_chunks

    def filled_by(self, micro_batches: int) -> bool:
        """Whether so many micro-batches a step fill the pipeline."""
        rounds = self.pp_chunks == 1 or micro_batches % self.pp == 0
        return self.pp == 1 or (micro_batches >= self.pp and rounds)

    def check_micro_batches(self, count: int) -> None:
        """Raises InputError unless so many micro-batches a step fill the pipeline."""
        if not self.filled_by(count):
            rounds = f", a multiple of {self.pp} with several chunks a rank" if self.pp_chunks > 1 else ""
            raise InputError(
                f"a pipeline of {self.pp} ranks needs at least {self.pp} micro-batches a step{rounds}; got {count}: "
                "take a larger batch, smaller micro-batches or fewer ranks in the pipeline"
            )


def check_schedule(name: str, chunks: int) -> None:
    """Raises InputError unless there is such a schedule with so many chunks."""
    if name not in SCHEDULES:
        raise InputError(f"pp_schedule must be {one_of(name, SCHEDULES)}")
    if name in ("gpipe", "1f1b") and chunks > 1:
        raise InputError(f"{name} has one stage a rank, got {chunks} chunks: take interleaved or zero-bubble")
    if name == "interleaved" and chunks == 1:
        raise InputError("interleaved needs at least 2 chunks a rank, got 1: with one it is 1f1b")


WHOLE = Parallel()
"""Nothing is cut."""
