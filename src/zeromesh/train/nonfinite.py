"""What becomes of a run whose loss or gradient is NaN or infinite. Torch-free.

::

    stop       the run ends with an error; the checkpoints are those of before
    skip       the gradient is thrown away and the optimizer does not step; the step counts, its batch is not used again
    rollback   the newest checkpoint is loaded, and the run goes on from its step with the batches that follow the one
               that did it: what was trained on since the checkpoint is left out as well, since it may have led there

The loss and the norm are of the global batch, the same number on every rank, so all ranks decide alike.

[Note: Batches] Step s takes batch s of the seed's order, plus the number of batches that roll backs have left out. That
number is in every checkpoint. Where a run is killed between a roll back and the next checkpoint, it comes to the same
batch once more, and rolls back once more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from zeromesh.errors import NonFiniteError
from zeromesh.train.config import FaultsConfig


class Remedy(enum.Enum):
    """What to do about one step."""

    SKIP = "skip"
    ROLL_BACK = "rollback"


@dataclass(slots=True, kw_only=True)
class NonFinite:
    """Counts of one run; part of its checkpoints.

    Args:
        skipped: steps without an optimizer step.
        rollbacks: times that a checkpoint was loaded again.
        in_a_row: steps whose loss or norm was not finite since the last that was.
        left_out: batches that no step will use: [Note: Batches].
    """

    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0
    left_out: int = 0

    def batch(self, step: int) -> int:
        """The batch of step 0, 1, ...: [Note: Batches]."""
        return step + self.left_out

    def finite(self) -> None:
        """A step went well."""
        self.in_a_row = 0

    def judge(self, config: FaultsConfig, what: str) -> Remedy:
        """Counts a step that did not.

        Args:
            config: what to do, and how often.
            what: which step, and what was not finite where.

        Raises:
            NonFiniteError: the run is to stop, or has come to its bounds.
        """
        self.in_a_row += 1
        if config.nonfinite == "stop":
            raise NonFiniteError(
                f"{what}. The optimizer has not stepped, and nothing was saved since. Look at the learning rate, the "
                f'warm-up and the data; faults.nonfinite = "skip" or "rollback" goes on without the batch'
            )
        total = self.skipped + self.rollbacks + 1
        for name, count, bound in (
            ("nonfinite_in_a_row", self.in_a_row, config.nonfinite_in_a_row),
            ("nonfinite_in_all", total, config.nonfinite_in_all),
        ):
            if count > bound:
                how = "in a row" if name.endswith("row") else "of this run"
                raise NonFiniteError(
                    f"{what}: number {count} {how}, and faults.{name} = {bound}. The parameters or the learning rate, "
                    f"not one batch, are the likely cause: go on from an older checkpoint with other settings"
                )
        remedy = Remedy(config.nonfinite)
        if remedy is Remedy.SKIP:
            self.skipped += 1
        return remedy

    def rolled_back(self, step: int, to: int) -> None:
        """The run goes on from step `to`, having come to grief in `step`; both count steps done before."""
        self.rollbacks += 1
        self.left_out += step + 1 - to

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint's `state` says; what it does not say starts at 0."""
        for field in fields(self):
            setattr(self, field.name, int(state.get(field.name, 0)))


def describe(step: int, loss: float, norm: float, ranks: list[int]) -> str:
    """What was not finite.

    >>> describe(12, float("nan"), float("nan"), [1, 3])
    'step 12: the loss is nan on ranks 1, 3'
    >>> describe(12, 2.5, float("inf"), [])
    'step 12: the norm of the gradient is inf (the loss is 2.5)'
    """
    if ranks:
        return f"step {step}: the loss is {loss:g} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"step {step}: the norm of the gradient is {norm:g} (the loss is {loss:g})"
