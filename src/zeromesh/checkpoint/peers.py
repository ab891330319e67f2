"""Small messages that ranks exchange about a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from zeromesh.comm.groups import borrow_channel, default_timeout_s
from zeromesh.engine.control import Control
from zeromesh.engine.meetings import Progress
from zeromesh.errors import CommunicationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Peers:
    """All ranks that save or load together. Each user has its own, since ranks may interleave two users' exchanges
    differently.

    Every exchange has a name, for messages. If one fails or takes longer than the group's timeout, it raises
    CommunicationError, which names the missing ranks.

    `group` is their own and has a backend that works on the host (gloo), since a background thread uses it. `progress`
    records who has arrived. A single rank has neither.
    """

    group: dist.ProcessGroup | None = None
    progress: Progress | None = field(default=None, compare=False)

    @property
    def rank(self) -> int:
        """This rank's number in the group, whose order may differ from the mesh's."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def all_gather(self, value: T, what: str) -> list[T]:
        """Returns every rank's value, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self._exchange(what, lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def gather(self, value: T, what: str) -> list[T] | None:
        """Returns every rank's value on rank 0, None on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._exchange(what, lambda: dist.gather_object(value, values, group=self.group, group_dst=0))
        return values

    def broadcast(self, value: T, what: str) -> T:
        """Returns rank 0's value on all ranks."""
        if self.group is None:
            return value
        values = [value]
        self._exchange(what, lambda: dist.broadcast_object_list(values, group=self.group, group_src=0))
        return values[0]

    def _exchange(self, what: str, collective: Callable[[], object]) -> None:
        progress = self.progress
        assert progress is not None  # not None if there is a group
        if progress.failure:
            raise CommunicationError(f"rank {self.rank} cannot come to {what}: {progress.failure}")
        try:
            progress.arrive(what)
            collective()
        except RuntimeError as error:
            failure = (
                f"rank {self.rank} waited in vain for {what}, of {self.size} ranks. "
                f"Missing: {'; '.join(progress.missing()) or 'a rank that has ended since'}. It has died, has stalled, "
                f"or has raised an error of its own, which then says why. [{str(error).splitlines()[0]}]"
            )
            progress.fail(failure)
            raise CommunicationError(failure) from error
        except BaseException as error:
            progress.fail(f"{what} was interrupted ({type(error).__name__})")
            raise


def make_peers(control: Control) -> Peers:
    """Makes a group of all ranks that the model is spread over, for one user. All ranks call it.

    A background thread may use the group while training and other users communicate. Its timeout is that of the process
    group. When the user is gone, the group is kept for the next user.
    """
    everyone = control.everyone()
    if everyone is None:
        return Peers()
    channel, give_back = borrow_channel(everyone, default_timeout_s(control.device.type))
    group = channel.process_group
    progress = Progress(
        key=f"zeromesh/checkpoints/{group.group_name}",
        rank=group.rank(),
        size=group.size(),
        count=channel.started,
    )
    peers = Peers(group=group, progress=progress)

    def end() -> None:
        channel.used(progress.count, failed=bool(progress.failure))
        give_back()

    # A running save holds its peers as well, so they live until it has ended.
    weakref.finalize(peers, end).atexit = False
    return peers
