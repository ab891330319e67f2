"""The training of one step, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.errors import ConfigError, InputError, one_of
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.strategy.plan import settle_dtypes

OPTIMIZERS = ("adamw", "muon")
OWNERSHIPS = ("slices", "owners")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWorkload:
    """One training step. Raises InputError for a size below 1, or a dtype that is not fp64, fp32, bf16 or fp16."""

    seq_len: int
    global_batch_tokens: int  # tokens in a step, all devices together
    micro_batch: int = 1  # sequences that a device computes at once
    recomputation: Recomputation = Recomputation.NONE  # of the blocks' activations
    param_dtype: str = "bf16"  # of compute, and of parameters on the wire
    reduce_dtype: str | None = None  # of gradients on the wire; None is `param_dtype`
    grad_dtype: str = "fp32"  # of the accumulated gradient
    master_dtype: str = "fp32"  # of the optimizer's copy
    optimizer: str = "adamw"  # or muon: for matrices of blocks, with adamw for the rest
    ownership: str = "slices"  # or owners: adamw steps on whole tensors with an owner each, as muon always does
    parallel: Parallel = WHOLE  # degrees that divide the model in addition to data parallelism

    def __post_init__(self) -> None:
        settle_dtypes(self)
        for name in ("seq_len", "global_batch_tokens", "micro_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be {one_of(self.optimizer, OPTIMIZERS)}")
        if self.ownership not in OWNERSHIPS:
            raise ConfigError(f"ownership must be {one_of(self.ownership, OWNERSHIPS)}")
        if (self.optimizer == "muon" or self.ownership == "owners") and (self.parallel.tp > 1 or self.parallel.ep > 1):
            raise InputError(
                f"owners step on whole tensors, which tp and ep divide; got {self.parallel} with {self.optimizer} on "
                f"{self.ownership}: leave both at 1, or take adamw on slices"
            )

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a device computes at once."""
        return self.seq_len * self.micro_batch // self.parallel.cp

    def micro_batches(self, world: int) -> int:
        """Micro-batches of one step on each of `world` data-parallel ranks. Raises ConfigError if the batch does not
        divide: the message gives the cost of uneven shares, and the nearest batches that divide. Raises InputError if
        they do not fill the pipeline."""
        at_once = self.micro_batch_tokens * world
        count, rest = divmod(self.global_batch_tokens, at_once)
        if rest == 0:
            self.parallel.check_micro_batches(count)
            return count
        idle = 1 - self.global_batch_tokens / ((count + 1) * at_once)
        nearest = " or ".join(str(n * at_once) for n in (count, count + 1) if n)
        raise ConfigError(
            f"a global batch of {self.global_batch_tokens} tokens does not divide over {world} devices with "
            f"{self.micro_batch} sequence(s) of {self.seq_len} tokens each ({at_once} tokens at once): with uneven "
            f"shares a step would last {count + 1} micro-batches and the devices idle {idle:.0%} of it; "
            f"the nearest that divides is {nearest}"
        )
