"""The options of `zm.shard`, defined once, for `zm.shard`, `zm.Sharding` and the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zeromesh.schedule.unit import BUCKET_BYTES
from zeromesh.strategy.stage import DTYPE_FIELDS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zeromesh.modules import UnitClasses
    from zeromesh.strategy.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a model is sharded, beside the strategy and the mesh; `zm.shard` explains each."""

    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    grad_dtype: torch.dtype | str | None = None
    master_dtype: torch.dtype | str | None = None
    units: UnitClasses | None = None
    resident: Sequence[str] = ()
    init: Callable[[nn.Module], None] | None = None
    bucket_bytes: int = BUCKET_BYTES
    register: bool | None = None
    debug: bool | None = None
    parts: Parts | None = field(default=None, hash=False)

    @property
    def dtypes(self) -> dict[str, torch.dtype | str | None]:
        """The four dtypes, by the names of their options."""
        return {name: getattr(self, name) for name in DTYPE_FIELDS}
