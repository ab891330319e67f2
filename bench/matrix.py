"""The matrix that a bench runs: topologies, strategies, accumulation, dtypes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from lab import Tree
from zeromesh.errors import InputError, MeshError
from zeromesh.measure.launch import Mesh, parse_mesh
from zeromesh.measure.steps import Batch
from zeromesh.strategy import Layout, Strategy

TOPOLOGIES = ("2@200mbit,2", "2@1gbit,2", "2@1gbit,4", "4@1gbit,2", "2@200mbit,2@1gbit,2")

STRATEGIES = {
    1: ("node=0", "node=1", "node=2", "node=3"),
    2: (
        "node=0,cluster=0",
        "node=1,cluster=0",
        "node=1,cluster=1",
        "node=2,cluster=2",
        "node=3,cluster=0",
        "node=3,cluster=1",
        "node=3,cluster=3k",
        "node=3,cluster=3",
    ),
    3: (
        "package=0,node=0,cluster=0",
        "package=1,node=1,cluster=1",
        "package=2,node=2,cluster=2",
        "package=3,node=1,cluster=0",
        "package=3,node=3,cluster=0",
        "package=3,node=3,cluster=1",
        "package=3,node=3,cluster=3k",
        "package=3,node=3,cluster=3",
    ),
}
"""By the number of levels with several members."""

LEVEL_NAMES = {1: ("node",), 2: ("cluster", "node"), 3: ("cluster", "node", "package")}
"""Names of an emulated cluster's levels, outermost first, by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where cells run: an emulated cluster ("2@200mbit,2"), or processes on loopback ("cluster=2,node=2")."""

    text: str

    @property
    def tree(self) -> Tree | None:
        """The emulated cluster; None on loopback."""
        return Tree.parse(self.text) if "@" in self.text else None

    @property
    def mesh(self) -> Mesh:
        """Sizes of the levels, outermost first; an emulated cluster's levels with one member are left out. Raises
        MeshError if it has no level with several members, or more than three."""
        tree = self.tree
        if tree is None:
            return parse_mesh(self.text)
        sizes = [size for size in (*tree.sizes, tree.ranks_per_leaf) if size > 1]
        if len(sizes) not in LEVEL_NAMES:
            raise MeshError(f"tree {tree} must have 1 to 3 levels of more than one member; it has {len(sizes)}")
        return dict(zip(LEVEL_NAMES[len(sizes)], sizes, strict=True))

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of the levels, innermost first."""
        return tuple(self.mesh.items())[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: a strategy on a topology with a batch."""

    topology: str
    strategy: str
    batch: Batch

    @property
    def setting(self) -> Cell:
        """The cell without its strategy: cells with one setting compute the same."""
        return replace(self, strategy="")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(topology=data["topology"], strategy=data["strategy"], batch=Batch(**data["batch"]))


def make_cells(topologies: Sequence[str], strategies: Sequence[str], batches: Sequence[Batch]) -> list[Cell]:
    """Returns the cells of a matrix, topology by topology. Each batch is run with every strategy.

    Without topologies, it takes `TOPOLOGIES`; without strategies, those in `STRATEGIES` for the number of levels.
    Strategies that name other levels than a topology are left out there. Raises InputError if one is wrong, or nothing
    is left.
    """
    cells = [
        Cell(topology=topology.text, strategy=strategy, batch=batch)
        for topology in (Topology(text=text) for text in topologies or TOPOLOGIES)
        for strategy in _strategies(topology, strategies)
        for batch in batches
    ]
    if not cells:
        raise InputError("nothing is left to run: no strategy has the levels of a topology")
    return list(dict.fromkeys(cells))


def by_setting(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups cells by topology and batch: each group has the layouts to choose from."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.setting, []).append(cell)
    return list(found.values())


def _strategies(topology: Topology, texts: Sequence[str]) -> list[str]:
    names = [name for name, _ in topology.axes]
    found = []
    for text in texts or STRATEGIES.get(len(names), ()):
        try:
            parsed = Strategy.parse(text, names)
            Layout.of(parsed, topology.axes)
        except MeshError:
            continue  # it names other levels
        found.append(str(parsed))
    return found
