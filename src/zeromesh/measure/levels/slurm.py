"""The switches above each host, from what SLURM says. Torch-free.

`SLURM_TOPOLOGY_ADDR` has them in each process that srun starts where a topology plugin is configured, "core.leaf3.n17";
else `scontrol show topology` and topology.conf name what each switch, or block, joins::

    SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-15]
    SwitchName=core Level=1 LinkSpeed=1 Nodes=n[0-63] Switches=leaf[0-3]
    BlockName=b0 BlockIndex=0 Nodes=n[0-17]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

MOST_NAMES = 1 << 17
"""Of one list of hosts: more would be a mistake in the file."""

_RANGE = re.compile(r"\[([^\]]*)\]")


def parse_address(address: str) -> tuple[str, ...]:
    """The switches of `SLURM_TOPOLOGY_ADDR`, outermost first, without the host.

    >>> parse_address("core.leaf3.n17")
    ('core', 'leaf3')
    """
    return tuple(address.split(".")[:-1]) if address else ()


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """The switches above each host, outermost first, from topology.conf or `scontrol show topology`."""
    above: dict[str, str] = {}
    leaf: dict[str, str] = {}
    for line in text.splitlines():
        said = dict(word.split("=", 1) for word in line.split("#")[0].split() if "=" in word)
        name = said.get("SwitchName") or said.get("BlockName")
        if name is None:
            continue
        children = said.get("Switches", "")
        for child in hosts_of(children):
            above[child] = name
        if not children:  # scontrol lists the hosts of all levels; those of the lowest count
            leaf.update(dict.fromkeys(hosts_of(said.get("Nodes", "")), name))
    return {host: _upwards(switch, above) for host, switch in leaf.items()}


def _upwards(switch: str, above: Mapping[str, str]) -> tuple[str, ...]:
    way = [switch]
    while (higher := above.get(way[-1])) is not None and higher not in way:
        way.append(higher)
    return tuple(reversed(way))


def hosts_of(text: str) -> list[str]:
    """Names in SLURM's short form.

    >>> hosts_of("n[08-10,12],login")
    ['n08', 'n09', 'n10', 'n12', 'login']
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = _RANGE.split(part.strip())
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ("".join(choice) for choice in product(*choices))
        if len(names) > MOST_NAMES:
            return []
    return [name for name in names if name and name != "(null)"]


def _numbers(text: str) -> Sequence[str]:
    found: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()):
            return []
        if int(high or low) - int(low) > MOST_NAMES:
            return []
        found += (f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1))
    return found
