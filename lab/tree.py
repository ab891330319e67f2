"""The shape of an emulated cluster: a tree of links, as text and as a value.

::

    2@200mbit,2@1gbit,2          outermost first

                       [root]
              200mbit /      \\ 200mbit        2 nodes, each behind a link of 200 Mbit/s, both directions
                   [0]        [1]
            1gbit /   \\      /   \\ 1gbit      each with 2 packages behind a link of 1 Gbit/s
               [0.0] [0.1] [1.0] [1.1]         leaves, each with its own network
                0 1   2 3   4 5   6 7          each with 2 ranks, which meet on loopback

    tree = (size "@" rate ",")* ranks_per_leaf       the last may be left out if it is 1
    rate = 200mbit | 1gbit | "25 MB/s" | "200 Mbit/s" | unshaped
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from zeromesh import units
from zeromesh.errors import InputError

#: Place of a switch or a leaf in the tree: the member numbers from the outermost level down. () is the root.
TreePath = tuple[int, ...]

UNSHAPED = "unshaped"

# Each leaf costs a namespace, and in every other leaf a route and a neighbour entry. Beyond this number, one measures
# the machine instead of the shaped links.
MAX_LEAVES = 1024

_TC_PREFIXES = {"t": 10**12, "g": 10**9, "m": 10**6, "k": 10**3, "": 1}
_TC_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmgt]?)bit", re.IGNORECASE)
_EXPECTED = 'expected a tree, outermost level first, such as "2@200mbit,2@1gbit,2"'


class LabError(InputError):
    """An emulated cluster cannot be set up here: privileges or tools are missing, or the kernel refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of links: each member of the level above has `size` members below it, each behind its own link."""

    size: int  # members in one group
    rate_bytes_per_s: float | None  # per link and direction, headers included, in whole bit/s; None: not shaped

    def __post_init__(self) -> None:
        if self.size < 1:
            raise LabError(f"a level of a tree has at least 1 member, got {self.size}; {_EXPECTED}")
        if self.rate_bytes_per_s is not None:
            object.__setattr__(self, "rate_bytes_per_s", _whole_bits(self.rate_bytes_per_s) / 8)

    def __str__(self) -> str:
        return f"{self.size}@{format_rate(self.rate_bytes_per_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of the tree: from its lower end `path` up to `path[:-1]`."""

    path: TreePath
    rate_bytes_per_s: float | None  # per direction; None: not shaped

    @property
    def name(self) -> str:
        """`path` as text: "0.1"."""
        return path_name(self.path)

    @property
    def level(self) -> int:
        """The level of the tree that the link belongs to; 0 is the outermost."""
        return len(self.path) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs."""

    rank: int  # in the world; grows leaf by leaf, innermost level fastest
    local_rank: int  # within its leaf
    leaf: int  # number of its leaf
    path: TreePath  # of its leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Levels of links, outermost first, and the ranks in each leaf. Raises LabError for fewer than one rank, or more
    leaves than one machine can emulate."""

    levels: tuple[LinkLevel, ...]
    ranks_per_leaf: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if self.ranks_per_leaf < 1:
            raise LabError(f"a leaf has at least 1 rank, got {self.ranks_per_leaf}; {_EXPECTED}")
        if self.num_leaves > MAX_LEAVES:
            raise LabError(f"tree {self}: {self.num_leaves} leaves; one machine emulates at most {MAX_LEAVES}")

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Parses a tree. Raises LabError if `text` does not describe one.

        >>> tree = Tree.parse("2@200mbit,2@1gbit,2")
        >>> tree.num_leaves, tree.world_size, [level.size for level in tree.levels]
        (4, 8, [2, 2])
        >>> str(Tree.parse("4 @ 0.5 Gbit/s"))
        '4@500mbit,1'
        """
        *outer, last = (part.strip() for part in text.split(","))
        if "@" in last:
            outer, last = [*outer, last], "1"
        levels = tuple(_parse_level(part, text) for part in outer)
        return cls(levels=levels, ranks_per_leaf=_parse_size(last, text))

    def __str__(self) -> str:
        return ",".join([*map(str, self.levels), str(self.ranks_per_leaf)])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Members of each level of links, outermost first."""
        return tuple(level.size for level in self.levels)

    @property
    def num_leaves(self) -> int:
        """Number of leaves, which are network namespaces that ranks run in."""
        return math.prod(self.sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks in all leaves."""
        return self.num_leaves * self.ranks_per_leaf

    @property
    def leaves(self) -> tuple[TreePath, ...]:
        """The path of each leaf, in the order of their ranks."""
        return self._paths(len(self.levels))

    @property
    def switches(self) -> tuple[TreePath, ...]:
        """The path of each switch, root first."""
        return tuple(path for depth in range(len(self.levels)) for path in self._paths(depth))

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link, outermost level first."""
        return tuple(
            Link(path=path, rate_bytes_per_s=level.rate_bytes_per_s)
            for depth, level in enumerate(self.levels, start=1)
            for path in self._paths(depth)
        )

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each rank runs, by rank."""
        spots = itertools.product(enumerate(self.leaves), range(self.ranks_per_leaf))
        return tuple(
            Place(rank=rank, local_rank=local_rank, leaf=leaf, path=path)
            for rank, ((leaf, path), local_rank) in enumerate(spots)
        )

    def _paths(self, depth: int) -> tuple[TreePath, ...]:
        return tuple(itertools.product(*map(range, self.sizes[:depth])))


def path_name(path: TreePath) -> str:
    """Returns `path` as text.

    >>> path_name((0, 1)), path_name(())
    ('0.1', 'root')
    """
    return ".".join(map(str, path)) or "root"


def parse_rate(text: str) -> float | None:
    """Returns the bytes per second in `text`, in tc's spelling or with a unit; None for "unshaped". Raises LabError if
    it is not a rate, or less than one bit per second.

    >>> parse_rate("200mbit"), parse_rate("25 MB/s"), parse_rate("unshaped")
    (25000000.0, 25000000.0, None)
    """
    if text.strip() == UNSHAPED:
        return None
    tc = _TC_RATE.fullmatch(text.strip())
    try:
        rate = float(tc["number"]) * _TC_PREFIXES[tc["prefix"].lower()] / 8 if tc else units.parse_bytes_per_s(text)
    except InputError as error:
        raise LabError(f'expected a rate, such as 200mbit, 1gbit, "25 MB/s" or {UNSHAPED}, got {text!r}') from error
    return _whole_bits(rate) / 8


def format_rate(rate_bytes_per_s: float | None) -> str:
    """Returns a rate exactly, as tc spells it.

    >>> format_rate(25e6), format_rate(312.5e6), format_rate(None)
    ('200mbit', '2500mbit', 'unshaped')
    """
    if rate_bytes_per_s is None:
        return UNSHAPED
    bits = round(rate_bytes_per_s * 8)
    prefix, factor = next((p, f) for p, f in _TC_PREFIXES.items() if bits % f == 0)
    return f"{bits // factor}{prefix}bit"


def _parse_level(part: str, text: str) -> LinkLevel:
    size, at, rate = part.partition("@")
    if not at:
        raise LabError(f"tree {text!r}: level {part!r} has no rate; only the last number, ranks per leaf, has none")
    try:
        return LinkLevel(size=_parse_size(size, text), rate_bytes_per_s=parse_rate(rate))
    except LabError as error:
        raise LabError(f"tree {text!r}: level {part!r}: {error}") from error


def _parse_size(size: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", size.strip()):
        raise LabError(f"tree {text!r}: {size.strip()!r} is not a whole number; {_EXPECTED}")
    return int(size)


def _whole_bits(rate_bytes_per_s: float) -> int:
    bits = round(rate_bytes_per_s * 8) if math.isfinite(rate_bytes_per_s) else 0
    if bits < 1:
        raise LabError(f"a rate is a finite number of at least 1 bit/s, got {rate_bytes_per_s * 8:g} bit/s")
    return bits
