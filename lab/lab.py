"""An emulated cluster on one Linux machine: real processes, real TCP, links with chosen rates."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from lab import counters as link_counters
from lab.check import check_kernel
from lab.counters import LinkBytes
from lab.plan import Wiring, environment
from lab.registry import Registry
from lab.shell import check_host, execute, execute_json
from lab.tree import LabError, Place, Tree
from zeromesh.errors import InputError
from zeromesh.integrations.elastic import asked_by, noticing
from zeromesh.launch.processes import Launch, OnLine, RankResult, raise_failed, run_ranks

#: One command for all ranks, or a function from a rank's place to its command.
RankCommand = Sequence[str] | Callable[[Place], Sequence[str]]

DEFAULT_PORT = 29500

_numbers = itertools.count()


class Lab:
    """A tree of shaped links with ranks at its leaves, while the `with` block lasts.

    ::

        with Lab("2@200mbit,2") as lab:                   # 2 nodes behind 200 Mbit/s, 2 ranks each
            lab.run(["python", "train.py"], check=True)   # each rank with torchrun's environment
            print(lab.counters()["0"].sent_bytes)         # what node 0 sent over its link

    Entering raises LabError if the user is not root, a program is missing, or the kernel refuses a part. Nothing is
    left behind.
    """

    def __init__(self, tree: Tree | str) -> None:
        parsed = Tree.parse(tree) if isinstance(tree, str) else tree
        self.wiring = Wiring(
            lab=Registry().own_name(next(_numbers)),
            tree=parsed,
            has_ipv6=Path("/proc/net/if_inet6").exists(),
        )
        self._ports = itertools.count(DEFAULT_PORT)
        self._owner_pid: int | None = None

    @property
    def name(self) -> str:
        """The lab's name, the prefix of its namespaces."""
        return self.wiring.lab

    @property
    def tree(self) -> Tree:
        return self.wiring.tree

    def __enter__(self) -> Self:
        check_host()
        # Ranks of a killed run may still use the processors that a measurement needs.
        for leftover in Registry().leftovers():
            Registry().remove(leftover)
        self._owner_pid = os.getpid()
        try:
            for command in self.wiring.up():
                execute(command)
            check_kernel(self.wiring)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child that leaves the `with` block by an exception must not remove its owner's lab.
        if self._owner_pid == os.getpid():
            # Signals wait: a second one would interrupt the removal, and the next lab would fail on the remains.
            with noticing(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                Registry().remove(self.name)
                came = asked_by()
            self._owner_pid = None
            if came:
                signal.raise_signal(came)

    def run(
        self,
        command: RankCommand,
        *,
        ranks: Iterable[int] | None = None,
        timeout_s: float = 600.0,
        on_line: OnLine | None = None,
        check: bool = False,
    ) -> tuple[RankResult, ...]:
        """Runs `command` once for each rank. Returns how each ended, by rank.

        Args:
            command: one command for all ranks, or a function from a rank's `Place` to its command.
            ranks: start only these ranks. The world size stays that of the tree.
            timeout_s: time after which everything that still runs is ended.
            on_line: called with each line of output when it comes.
            check: raise if a rank fails.

        Raises:
            InputError: the lab is not up, or a rank does not exist.
            RanksFailedError: with `check`, if a rank failed or exceeded the timeout.
        """
        if self._owner_pid is None:
            raise InputError(f"lab {self.name} is not up: use it in its `with` block")
        places = self._chosen(ranks)
        port = next(self._ports)
        launches = [
            Launch(
                rank=place.rank,
                argv=("ip", "netns", "exec", self.wiring.namespace(place.path), *_command_at(command, place)),
                env=environment(self.wiring, place, port=port, around=os.environ),
            )
            for place in places
        ]
        results = run_ranks(launches, timeout_s=timeout_s, on_line=on_line)
        if check:
            raise_failed(results)
        return results

    def counters(self) -> dict[str, LinkBytes]:
        """Returns the traffic of each link since the lab started, by the link's name: "0", "1", "0.0", ... Raises
        LabError if the lab is gone."""
        printed = {path: execute_json(c) for path, c in link_counters.read_commands(self.wiring).items()}
        return link_counters.parse(self.tree.links, printed)

    def _chosen(self, ranks: Iterable[int] | None) -> tuple[Place, ...]:
        places = self.tree.places
        wanted = range(len(places)) if ranks is None else sorted(set(ranks))
        unknown = [rank for rank in wanted if not 0 <= rank < len(places)]
        if unknown or not wanted:
            raise InputError(f"expected ranks of 0..{len(places) - 1}, got {unknown or 'none'}")
        return tuple(places[rank] for rank in wanted)


def unavailable_reason() -> str | None:
    """Returns why no lab can be made on this machine, by trying a small one; None if it can."""
    try:
        with Lab("2@1gbit"):
            return None
    except LabError as error:
        return str(error)


def _command_at(command: RankCommand, place: Place) -> tuple[str, ...]:
    return tuple(command(place) if callable(command) else command)
