"""The few words that ranks exchange about a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """All ranks that save or load together.

    Args:
        group: of their own, of a backend that works on the host (gloo), since a background thread talks on it; None on
            a single rank.
        rank, size: in the group.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, None on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]
