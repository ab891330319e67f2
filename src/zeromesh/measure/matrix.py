"""The matrix that a bench runs: topologies, strategies, accumulation, dtypes. And how long it may take. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Self, cast

from zeromesh.errors import InputError, MeshError
from zeromesh.lab import Tree
from zeromesh.measure.launch import Mesh, mesh_of_tree, parse_mesh
from zeromesh.measure.shapes import SHAPES
from zeromesh.measure.steps import Batch, steps_between_marks
from zeromesh.schedule import FlatBuffer, Role, Schedule, Unit
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.strategy import Overlap

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
"""By the number of levels that have several members."""

VISIT_S = 5.0
"""For the timed steps of a layout in a round: slow ones get fewer of them, but at least one."""

# For the estimate alone: what a core computes and moves, and what starting the ranks takes.
_GUESSED_FLOPS = 2e10
_GUESSED_BYTES_PER_S = 8e8
_START_S = 10.0
_PROBE_REST_S = 8.0
_CELL_START_S = 2.0


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
        """Sizes of its levels, outermost first."""
        return parse_mesh(self.text) if self.tree is None else mesh_of_tree(self.tree)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The same, innermost first."""
        return tuple(self.mesh.items())[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: a strategy on a topology with a batch."""

    topology: str
    strategy: str
    batch: Batch

    @property
    def name(self) -> str:
        """What `--only` is matched with."""
        return f"{self.topology} {self.strategy} x{self.batch.micro_batches} {self.batch.dtype}"

    @property
    def of_compute(self) -> Cell:
        """What every rank computes in it, for itself: that depends on no strategy."""
        return replace(self, strategy="")

    @property
    def key(self) -> str:
        """A file's name that no other cell has."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(topology=data["topology"], strategy=data["strategy"], batch=Batch(**data["batch"]))


def make_cells(
    topologies: Sequence[str],
    strategies: Sequence[str],
    batches: Iterable[Batch],
    *,
    overlap: str = "",
    only: str = "",
) -> list[Cell]:
    """The cells of a matrix, topology by topology.

    Args:
        topologies: none: `TOPOLOGIES`.
        strategies: none: `STRATEGIES` of as many levels. Those that do not name a topology's levels are left out
            there.
        batches: each is run with every strategy.
        overlap: replaces every strategy's: none, gather or all.
        only: cells whose name contains this.

    Raises:
        InputError: a topology or strategy is wrong, or nothing is left.
    """
    batches = list(batches)
    cells = [
        Cell(topology=topology.text, strategy=strategy, batch=batch)
        for topology in (Topology(text=text) for text in topologies or TOPOLOGIES)
        for strategy in _strategies(topology, strategies, overlap)
        for batch in batches
    ]
    chosen = [cell for cell in dict.fromkeys(cells) if only in cell.name]
    if not chosen:
        examples = "; ".join(cell.name for cell in cells[:3]) or "none: no strategy has the levels of a topology"
        raise InputError(f"nothing is left to run. Cells are called as these: {examples}")
    return chosen


def by_setting(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of each topology and batch: layouts to choose from."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.of_compute, []).append(cell)
    return list(found.values())


def _strategies(topology: Topology, texts: Sequence[str], overlap: str) -> list[str]:
    names = [name for name, _ in topology.axes]
    found = []
    for text in texts or STRATEGIES.get(len(names), ()):
        try:
            parsed = Strategy.parse(text, names)
            Layout.of(parsed, topology.axes)
        except MeshError:
            continue  # of other levels
        if overlap:
            parsed = replace(parsed, overlap=cast(Overlap, overlap))
        found.append(str(parsed))
    return found


def estimate_s(cells: Sequence[Cell], *, steps: int, cores: int) -> float:
    """Roughly how long one round of the cells takes, on the rates that topologies name and guesses for the rest."""
    return sum(_CELL_START_S + steps * _step_s(cell, cores) for cell in cells)


def timed_steps(most: int, step_s: float) -> int:
    """Of one layout in one round."""
    return max(1, min(most, int(VISIT_S / step_s)))


def estimate_rounds_s(
    held: Mapping[Cell, int], *, rounds: int, steps: int, warmup: int, cores: int
) -> tuple[float, float]:
    """Roughly how long cells take of which so many rounds are there: if one round tells all, and if none ever does."""
    least = more = 0.0
    for cell, having in held.items():
        timed = timed_steps(steps, _step_s(cell, cores))
        first = warmup + steps_between_marks(timed, 1)
        least += 0.0 if having else estimate_s([cell], steps=first, cores=cores)
        more += (rounds - max(1, having)) * estimate_s([cell], steps=steps_between_marks(timed, 0), cores=cores)
    return least, least + more


def estimate_start_s(cells: Sequence[Cell], probe_s: float) -> float:
    """Roughly how long it takes to start and to probe their topologies, with so many seconds for each level."""
    level_s = probe_s + _PROBE_REST_S
    return sum(_START_S + level_s * len(Topology(text=text).axes) for text in {cell.topology for cell in cells})


def _step_s(cell: Cell, cores: int) -> float:
    """Computation on a rank's share of the cores, and the bytes of a model that is one unit, level after level."""
    topology, batch = Topology(text=cell.topology), cell.batch
    numel = SHAPES[batch.model].num_params
    share = min(1.0, cores / prod(topology.mesh.values()))
    compute = 6 * numel * batch.sequences * batch.tokens * batch.micro_batches / (_GUESSED_FLOPS * share)
    buffer = FlatBuffer(numel=numel, param_dtype=batch.dtype, master_dtype="fp32", reduce_dtype=batch.dtype)
    unit = Unit(name="", role=Role.BLOCK, buffers=(buffer,))
    schedule = Schedule.of(Layout.of(cell.strategy, topology.axes), [unit])
    sent = sent_bytes_per_axis(schedule, micro_batches=batch.micro_batches)
    rates = _rates(topology)
    return max(compute, sum(sent[axis.name] / rates[axis.mesh_axis] for axis in schedule.layout.axes))


def _rates(topology: Topology) -> dict[str, float]:
    """Bytes per second of one rank by axis."""
    tree, rates = topology.tree, dict.fromkeys(topology.mesh, _GUESSED_BYTES_PER_S)
    if tree is not None:
        ranks = tree.world_size
        several = iter(topology.mesh)
        for level in tree.levels:
            ranks //= level.size
            name = next(several) if level.size > 1 else None
            if name is not None and level.rate_bytes_per_s is not None:
                rates[name] = level.rate_bytes_per_s / ranks
    return rates
