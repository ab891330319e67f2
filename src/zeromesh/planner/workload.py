"""The batch of one step, and its division into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil

from zeromesh.errors import InputError, short_repr
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import DEGREES, WHOLE, Parallel
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy.plan import settle_dtypes
from zeromesh.strategy.stage import DTYPE_FIELDS

MAX_MICRO_BATCH = 64
"""Most sequences per device and micro-batch that are tried: matrix products reach their best rate long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one step, and the choices that are fixed.

    Args:
        seq_len: tokens per sequence.
        global_batch_tokens: tokens per step over all devices.
        micro_batch: sequences per device and micro-batch; None lets the planner choose.
        recomputation: recomputation of the blocks; None lets the planner choose.
        param_dtype, reduce_dtype, grad_dtype, master_dtype: fp64, fp32, bf16 or fp16, for the options of
            `zeromesh.shard` of these names; reduce_dtype None is param_dtype.
        optimizer: adamw, or muon for the matrices of blocks with adamw for the rest.
        ownership: adamw steps on slices, or on whole tensors with owners. Muon always has owners.
        tp, cp, pp, ep: degrees of tensor, context, pipeline and expert parallelism; None lets the planner choose. See
            `zeromesh.parallel.Parallel`, also for the next three.
        pp_schedule: pipeline schedule: gpipe, 1f1b, interleaved or zero-bubble.
        pp_chunks: pipeline stages per rank.
        sequence_parallel: tp shards norms and residuals along the sequence.

    Raises:
        InputError: a size below 1, an unknown dtype, or a batch that is not a multiple of the sequence length.
    """

    seq_len: int
    global_batch_tokens: int
    micro_batch: int | None = None
    recomputation: Recomputation | None = None
    param_dtype: str = "bf16"
    reduce_dtype: str | None = None
    grad_dtype: str = "fp32"
    master_dtype: str = "fp32"
    optimizer: str = "adamw"
    ownership: str = "slices"
    tp: int | None = 1
    cp: int | None = 1
    pp: int | None = 1
    ep: int | None = 1
    pp_schedule: str = "1f1b"
    pp_chunks: int = 1
    sequence_parallel: bool = True

    __repr__ = short_repr

    def __post_init__(self) -> None:
        settle_dtypes(self)
        self._parallel({name: getattr(self, name) or 1 for name in DEGREES})
        for name in ("seq_len", "global_batch_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"micro_batch must be at least 1 sequence, got {self.micro_batch}")
        if self.global_batch_tokens % self.seq_len:
            whole = self.global_batch_tokens // self.seq_len
            raise InputError(
                f"a step of {self.global_batch_tokens} tokens is not a multiple of the sequence length {self.seq_len}; "
                f"the nearest are {' and '.join(str(n * self.seq_len) for n in (whole, whole + 1) if n)} tokens"
            )

    @property
    def sequences(self) -> int:
        """Sequences of one step over all devices."""
        return self.global_batch_tokens // self.seq_len

    @property
    def wire_dtype(self) -> str:
        """Dtype of gradients on a wire that a strategy leaves open."""
        return self.reduce_dtype or self.param_dtype

    def sequences_per_device(self, world: int) -> int:
        """Sequences of one step on each device.

        Raises:
            InputError: the batch does not divide; names the cost of uneven shares, and batches that divide.
        """
        if self.sequences % world == 0:
            return self.sequences // world
        most = ceil(self.sequences / world)
        wasted = 1 - self.sequences / (world * most)
        nearest = [n * world * self.seq_len for n in (self.sequences // world, most) if n]
        raise InputError(
            f"{self.sequences} sequences cannot be divided evenly among {world} devices: the step would wait for the "
            f"devices with {most}, and {wasted:.1%} of all device time would be idle; the nearest batches that divide "
            f"are {' and '.join(map(str, nearest))} tokens"
        )

    def _parallel(self, degrees: Mapping[str, int]) -> Parallel:
        return Parallel(
            **degrees, pp_schedule=self.pp_schedule, pp_chunks=self.pp_chunks, sequence_parallel=self.sequence_parallel
        )

    @property
    def parallel(self) -> Parallel:
        """The degrees of parallelism.

        Raises:
            InputError: one is left to the planner.
        """
        left = [name for name in DEGREES if getattr(self, name) is None]
        if left:
            raise InputError(f"{', '.join(left)} must be given, got None: only a search chooses degrees")
        return self._parallel({name: getattr(self, name) for name in DEGREES})

    def parallels(self, most: int) -> Iterator[Parallel]:
        """Every choice of the open degrees, in powers of 2 up to `most`. Most of them do not divide the model."""
        powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
        given = [[getattr(self, name)] if getattr(self, name) is not None else powers for name in DEGREES]
        for degrees in product(*given):
            yield self._parallel(dict(zip(DEGREES, degrees, strict=True)))

    def splits(self, world: int, parallel: Parallel = WHOLE) -> Iterator[tuple[int, int]]:
        """(sequences per micro-batch, micro-batches per step) on `world` data-parallel ranks, smallest micro-batch
        first. By default every rank has sequences of its own, and there is no pipeline.

        Raises:
            InputError: the batch does not divide among the devices, or not into the given micro-batch, or does not fill
                the pipeline.
        """
        share = self.sequences_per_device(world // parallel.cp)
        if self.micro_batch is None:
            parallel.check_micro_batches(share)
            for size in range(1, min(share, MAX_MICRO_BATCH) + 1):
                if share % size == 0 and parallel.filled_by(share // size):
                    yield size, share // size
        elif share % self.micro_batch:
            divides = [size for size in range(1, share + 1) if share % size == 0]
            nearest = sorted(divides, key=lambda size: abs(size - self.micro_batch))[:2]  # type: ignore[operator]
            raise InputError(
                f"each device has {share} sequences per step, which is not a multiple of micro_batch "
                f"{self.micro_batch}; the nearest that divide are {' and '.join(map(str, sorted(nearest)))}"
            )
        else:
            parallel.check_micro_batches(share // self.micro_batch)
            yield self.micro_batch, share // self.micro_batch

    def fixed(self, micro_batch: int, recomputation: Recomputation, parallel: Parallel = WHOLE) -> FixedWorkload:
        """The workload with its open choices made; degrees are 1 unless given."""
        same = ("seq_len", "global_batch_tokens", *DTYPE_FIELDS, "optimizer", "ownership")
        return FixedWorkload(
            micro_batch=micro_batch,
            recomputation=recomputation,
            parallel=parallel,
            **{name: getattr(self, name) for name in same},
        )

    def recomputations(self) -> tuple[Recomputation, ...]:
        return tuple(Recomputation) if self.recomputation is None else (self.recomputation,)
