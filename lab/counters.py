"""Bytes that crossed each link, from the kernel's own interface counters.

The counters count Ethernet frames as they pass a veth pair. TCP's segments are still joined there (up to 64 KiB behind
one header of 66 bytes), so payload and counter differ by .1 % for large messages. The bucket charges every segment of
1448 bytes its own header, so payload moves at 95.6 % of a link's rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.plan import Command, Wiring, port
from lab.tree import Link, TreePath

HEADER_BYTES = 66
"""Header bytes of a TCP frame: 14 of Ethernet, 20 of IP, 32 of TCP with timestamps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Traffic of one link, seen from its lower end. Counts can be subtracted and added."""

    sent_bytes: int = 0  # up: out of the node, package or leaf that the link is named after
    received_bytes: int = 0  # down
    sent_packets: int = 0  # frames in `sent_bytes`; joined segments count once

    @property
    def sent_payload_bytes(self) -> int:
        """TCP payload in `sent_bytes`, if nothing else was sent. The number of frames differs between runs; about as
        many again only acknowledge."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def __sub__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(**{name: getattr(self, name) - getattr(other, name) for name in self.__slots__})


Counters = Mapping[str, LinkBytes]


def difference(after: Counters, before: Counters) -> dict[str, LinkBytes]:
    """Returns the traffic of each link between two readings."""
    return {name: after[name] - before[name] for name in after}


def by_level(wiring: Wiring, counters: Counters) -> tuple[LinkBytes, ...]:
    """Returns the sums over the links of each level, outermost first."""
    totals = [LinkBytes()] * len(wiring.tree.levels)
    for link in wiring.tree.links:
        totals[link.level] += counters[link.name]
    return tuple(totals)


def read_commands(wiring: Wiring) -> Mapping[TreePath, Command]:
    """Returns one command for each switch, which prints the statistics of the upper ends of the links below it as
    JSON."""
    return {
        path: Command(
            argv=("ip", "-n", wiring.namespace(path), "-s", "-j", "link", "show"), purpose="read interface counters"
        )
        for path in wiring.tree.switches
    }


def parse(links: Iterable[Link], printed: Mapping[TreePath, list[dict[str, Any]]]) -> dict[str, LinkBytes]:
    """Extracts the counters of `links` from the output of `read_commands`, by the link's name."""
    statistics = {(path, row["ifname"]): row["stats64"] for path, rows in printed.items() for row in rows}
    return {link.name: _link_bytes(statistics[link.path[:-1], port(link)]) for link in links}


def _link_bytes(upper_end: Mapping[str, Mapping[str, int]]) -> LinkBytes:
    # The upper end received the bytes that the lower end sent.
    sent, received = upper_end["rx"], upper_end["tx"]
    return LinkBytes(
        sent_bytes=sent["bytes"],
        received_bytes=received["bytes"],
        sent_packets=sent["packets"],
    )
