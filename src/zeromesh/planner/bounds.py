"""Lower bounds on step time, vectorised over layouts; `zeromesh.planner.time_bound` has the mathematics.

The transfers are those of `zeromesh.schedule.transfer`, their seconds those of `zeromesh.cost`. Here they are tabulated
by (level, size of a part, pieces of its region), so that a layout takes a few look-ups. Padding, which only adds, is
left out. Units that are small enough to be joined each take their share of one transfer of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from math import ceil
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from zeromesh.cost.collective import HOST
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import Constants
from zeromesh.cost.contention import MOST_TAKEN, taken_share
from zeromesh.cost.transfer import TransferModel
from zeromesh.model.spec import Recomputation, UnitKind, UnitSpec
from zeromesh.planner.memory_bound import PREFETCH, MemoryBound, state_degree
from zeromesh.planner.space import STAGES, Block, Integers, divisors
from zeromesh.planner.time_bound import (
    APART_ROWS,
    LANE_ROWS,
    LOST_ROWS,
    ComputeSeconds,
    Floats,
    Row,
    Shared,
    TimeBound,
    operations,
)
from zeromesh.schedule.memory import reduce_slots
from zeromesh.schedule.transfer import COPIES, Operation, Transfer
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.simulator.computation import Computation, MicroBatchSeconds, idle_seconds
from zeromesh.simulator.division import Division
from zeromesh.simulator.memory import MOMENTS
from zeromesh.simulator.owned import by_owners, newton_schulz_s
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy import Axis, Stage, Wire
from zeromesh.strategy.collective import AUTO, find_collective
from zeromesh.wires import coded


@dataclass(frozen=True, kw_only=True)
class Bounds(MemoryBound):
    """Lower bounds on step time, beside those on memory."""

    constants: Constants
    collective: str = AUTO
    known: Shared = field(default_factory=Shared, compare=False)  # with other bounds of the same workload

    @cached_property
    def overlapping(self) -> bool:
        """Whether one transfer keeps two levels at work at once."""
        return find_collective(self.collective).pairs

    def _met(self, lanes: Floats, further: Floats) -> Floats:
        """The seconds of two parts of a layout together: in separate lanes, or all in the engine's queues."""
        apart = np.add if self.mechanics.queues else np.maximum
        chained = np.maximum if self.overlapping else np.add
        return np.concatenate(
            [apart(lanes[:APART_ROWS], further[:APART_ROWS]), chained(lanes[APART_ROWS:], further[APART_ROWS:])]
        )

    @cached_property
    def _with_root(self) -> bool:
        """Whether the unit after the root is joined with it: one transfer for both."""
        return bool(self._roots) and len(self.joined[0]) > 1

    # Compute --------------------------------------------------------------------------------------------------------

    @cached_property
    def compute(self) -> ComputeModel:
        device = self.cluster.device
        dtype = device.compute_dtype(self.workload.param_dtype)
        return ComputeModel(device=device, constants=self.constants, dtype=dtype)

    @cached_property
    def transfers(self) -> TransferModel:
        return TransferModel.of(self.cluster, self.constants, self.compute)

    def micro_batch_s(self, sequences: int, recomputation: Recomputation) -> ComputeSeconds:
        seq_len = self.workload.seq_len
        if self.division is not None:
            return self._divided_s(self.division, self.workload.fixed(sequences, recomputation, self.parallel))
        forward = backward = 0.0
        moving: list[float] = []
        for unit in self.model.units:
            one = self.compute.unit(unit, tokens=sequences * seq_len, seq_len=seq_len, recomputation=recomputation)
            one = one.collecting(self._collecting_s(unit))
            moving += [one.moving] if one.total else []
            forward += unit.count * one.forward
            backward += unit.count * (one.backward + one.recompute)
        return ComputeSeconds(forward=forward, backward=backward, moving=self._moving(moving))

    def _moving(self, shares: Sequence[float]) -> float:
        """w, from the shares of a micro-batch's units. 0 with owners, whose steps may be matrix products."""
        owned = by_owners(self.workload.optimizer, self.workload.ownership, self.mechanics)
        return 0.0 if owned else min(shares, default=0.0)

    def _divided_s(self, division: Division, work: FixedWorkload) -> ComputeSeconds:
        key, known = (division.parallel, work.micro_batch, work.recomputation, self._narrowest), self.known.seconds
        if key not in known:
            every = [[(unit, self._computation(unit, work)) for unit in part.model.units] for part in division.parts]
            known[key] = [MicroBatchSeconds.of((unit.count, one) for unit, one in units) for units in every]
        own = known[key][self.part]
        seconds = [self._computation(unit, work).seconds for unit in self.model.units]
        return ComputeSeconds(
            forward=own.forward,
            backward=own.backward,
            waiting=own.waiting,
            idle=idle_seconds(division, known[key])[self.part],
            moving=self._moving([one.moving for one in seconds if one.total]),
        )

    def _computation(self, unit: UnitSpec, work: FixedWorkload) -> Computation:
        assert self.division is not None
        one = Computation.of(unit, self.division, self.compute, self.transfers, work)
        return one.collecting(self._collecting_s(unit))

    def _collecting_s(self, unit: UnitSpec) -> float:
        """Least seconds in which a unit's gradients are copied to where they are reduced."""
        if not self.mechanics.collects:
            return 0.0
        made = ITEM_BYTES[self.workload.param_dtype]
        return self.compute.gradients(unit.num_trainable * (made + self._narrowest))

    @cached_property
    def _narrowest(self) -> int:
        """Least bytes of a gradient's element where it is collected, which depends on the slot's dtype."""
        wires = [wire for wire in self._grad_wires if coded(wire) is None]
        return min(ITEM_BYTES[dtype] for dtype in (self.workload.wire_dtype, self.workload.grad_dtype, *wires))

    def _stepped(self, block: Block) -> Floats:
        """Elements that a rank steps on. With owners, some rank has at least the mean."""
        trained = (trained / state_degree(own) for own, (_, trained) in self.elements.layouts(block))
        return sum(trained, np.zeros(len(block)))

    def optimizer_s(self, block: Block) -> Floats:
        """Seconds of the optimizer's step on the device."""
        by_state = state_degree(block)
        seconds = self._stepped(block) * (0.0 if self.host.shards_states else self.compute.optimizer(1.0))
        if self.workload.optimizer == "muon":
            seconds += self._newton_schulz_s / by_state
        return np.asarray(seconds)

    @cached_property
    def _newton_schulz_s(self) -> float:
        """Seconds of the iterations for all tensors that Muon steps on."""
        return sum(newton_schulz_s(self.compute, tensor.shape) for tensor in self.elements.matrices)

    # Communication --------------------------------------------------------------------------------------------------

    def time(self, block: Block) -> TimeBound:
        """Bounds of the layouts of `block`, without their compute."""
        lanes = np.zeros((LANE_ROWS, len(block)))
        busy = np.zeros((len(block.sizes), 2, len(block)))
        lost = np.zeros((LOST_ROWS, len(block)))
        moved = np.zeros((2, len(block)))
        adding = np.zeros(len(block))
        axes = np.zeros(len(block))
        for experts, (own, _) in enumerate(self.elements.layouts(block)):
            of_part = np.zeros_like(lanes)
            axes += sum((sizes > 1).astype(np.float64) for level in own.sizes for sizes in level)
            for level, found, rows in self._by_level(own, bool(experts)):
                found = found.take(rows, axis=1)
                of_part = self._met(of_part, found[:LANE_ROWS])
                busy[level] += found[Row.BUSY_MICRO : Row.MEMORY_MICRO]
                moved += found[Row.MEMORY_MICRO : Row.ADDING]
                adding = np.maximum(adding, found[Row.ADDING])
                lost += self._taken[level] * found[:LOST_ROWS]
            added = self._added(own, bool(experts))
            lanes = self._met(lanes, self._met(of_part, added))
            if self.cluster.device.cores is None:  # otherwise the network model shares out the cores
                lost[Row.REDUCE_MICRO] += added[Row.REDUCE_MICRO] - added[Row.REDUCE_EDGE]
                lost[Row.REDUCE_LATE] += added[Row.REDUCE_LATE]
        # Collectives cannot take more than the device has.
        most, moving = max(self._taken), self._most_moved
        real = np.minimum(1.0, MOST_TAKEN / np.maximum((2 * axes + len(COPIES)) * most + moving + adding, 1e-9))
        streamed = (1 + MOMENTS) * ITEM_BYTES[self.workload.master_dtype] / self.constants.host_copy_bytes_per_s
        on_host_s = min(streamed, self.compute.host_step(1.0, self.cluster.machine_devices)) * self.host.shards_states
        return TimeBound(
            lanes=lanes,
            busy=busy,
            lost=lost * real,
            moved=moved * real,
            moving=moving,
            edge=axes * most * real,
            copied=self.copied_bytes(block) / self.constants.host_copy_bytes_per_s,
            stepped=self._stepped(block) * on_host_s,
        )

    def _added(self, block: Block, experts: bool) -> Floats:
        """Seconds of kernels that add reduced gradients to the accumulated ones, in the lane of reductions."""
        rows, adding = np.zeros((LANE_ROWS, 1)), list[tuple[UnitSpec, float]]()
        if self._adds:
            for unit in self.model.units:
                seconds = self._adding_s(self.elements.by_unit[experts][id(unit)][0])
                adding.append((unit, seconds))
                rows[Row.REDUCE_MICRO] += unit.count * seconds
                rows[Row.REDUCE_BLOCKS] += unit.count * seconds if self._in_slots(unit, Stage.TWO) else 0.0
                if unit.kind is UnitKind.ROOT or unit is self._entered:
                    rows[Row.REDUCE_EDGE] += seconds
                if unit is self._entered:
                    rows[Row.REDUCE_FIRST] += seconds
        rows[Row.REDUCE_LATE] = self._outside(adding, reduce_slots(PREFETCH), Stage.TWO)
        shards = block.degree(*[stage for stage in STAGES if stage.shards_grads])
        return np.where(shards > 1, rows / shards, 0.0)

    def _in_slots(self, unit: UnitSpec, stage: Stage) -> bool:
        """Whether the unit shares slots with others if an axis has this stage; joined units may not."""
        return unit.kind is UnitKind.BLOCK and (stage.shards_params or not self.joins)

    def _outside(self, each: Sequence[tuple[UnitSpec, float]], slots: int, stage: Stage) -> float:
        """Most seconds of a micro-batch's transfers outside of the pass that they belong to. `each` has the seconds of
        one of each unit. As many units that share slots count as there are `slots`, and all others."""
        sharing = [seconds for unit, seconds in each if self._in_slots(unit, stage)]
        others = (unit.count * seconds for unit, seconds in each if not self._in_slots(unit, stage))
        return slots * max(sharing, default=0.0) + sum(others)

    @cached_property
    def _adds(self) -> bool:
        return self.mechanics.adds(self.cluster.messages) and not any(map(coded, self._grad_wires))

    def _adding_s(self, numel: float) -> float:
        narrowest = min(ITEM_BYTES[wire] for wire in self._grad_wires)
        return self.compute.memory((narrowest + 2 * ITEM_BYTES[self.workload.grad_dtype]) * numel)

    @cached_property
    def _grad_wires(self) -> list[str]:
        wires = [self._axis(level, Stage.ZERO, 2).wire.grad for level in range(len(self.cluster.levels))]
        return [wire or self.workload.wire_dtype for wire in wires]

    @cached_property
    def _taken(self) -> tuple[float, ...]:
        """By level, the share of the device that a collective over this level takes."""
        axes = [self._axis(level, Stage.ZERO, max(2, each.size)) for level, each in enumerate(self.cluster.levels)]
        return tuple(taken_share(self.cluster, (axis,), self.constants) for axis in axes)

    @cached_property
    def _most_moved(self) -> float:
        """Largest share of memory bandwidth that collectives on all levels take at once. Lanes that share links share
        it."""
        most = 0.0
        for level, each in enumerate(self.cluster.levels):
            axes = [self._axis(level, Stage.ZERO, size) for size in divisors(each.size) if size > 1]
            sent = [Transfer(operation=o, axis=axis, numel=_ENDLESS, wire="fp32") for axis in axes for o in _OPERATIONS]
            costs = [self.transfers.cost(transfer) for transfer in sent]
            most += max((cost.memory_s / cost.transfer_s for cost in costs if cost.transfer_s), default=0.0)
        return most

    def _parts(self, block: Block) -> Iterator[tuple[int, Stage, bool, Integers, Integers]]:
        """Each part: its level and stage; whether it is replicated, and scatters and gathers in two lanes; its size;
        and the pieces into which more significant axes cut its region."""
        pieces = np.ones(len(block), dtype=np.int64)
        for tier in _TIERS:
            for level, sizes in enumerate(block.sizes):
                for stage in tier:
                    part = sizes[STAGES.index(stage)]
                    if (part > 1).any():
                        yield level, stage, False, part, pieces
                        pieces = pieces * part
        by_level = self._sums_by_level(block)
        for level, sizes in enumerate(block.sizes):
            inner = by_level & np.any([other[-1] > 1 for other in block.sizes[level + 1 :]], axis=0)
            for halves in (True, False):
                part = np.where(inner == halves, sizes[-1], 1)
                if (part > 1).any():
                    yield level, Stage.ZERO, halves, part, pieces
            pieces = pieces * np.where(by_level, sizes[-1], 1)

    def _by_level(self, block: Block, experts: bool) -> Iterator[tuple[int, Floats, Integers]]:
        """Each level; the rows of its parts together, with a column for each way to cut it; and the column of each
        layout. Many layouts differ only on other levels."""
        count = len(divisors(self.cluster.world))  # of numbers of pieces
        for level, parts in groupby(sorted(self._parts(block), key=itemgetter(0)), key=itemgetter(0)):
            of_stages: list[tuple[Stage, bool, Integers]] = []
            columns = first = np.zeros(len(block), dtype=np.int64)
            for _, stage, halves, sizes, pieces in parts:
                places = self._size_position[level][sizes] * count + self._piece_position[pieces]
                places[sizes == 1] = 0  # a part of one rank sends nothing
                of_stages.append((stage, halves, places))
                columns, first = _distinct(columns * (count * len(divisors(self.cluster.levels[level].size))) + places)
            found = np.zeros((len(Row), len(first)))
            for stage, halves, places in of_stages:
                part = self._columns(level, stage, halves, experts, places[first])
                found[:LANE_ROWS] = self._met(found[:LANE_ROWS], part[:LANE_ROWS])
                found[LANE_ROWS : Row.ADDING] += part[LANE_ROWS : Row.ADDING]
                found[Row.ADDING] = np.maximum(found[Row.ADDING], part[Row.ADDING])
            yield level, found, columns

    def _sums_by_level(self, block: Block) -> npt.NDArray[np.bool_]:
        """Whether a layout's replicated levels each pass on a share to the next one. Not if an inner one is quantised:
        [Note: By level]."""
        whole = np.zeros(len(block), dtype=bool)
        rounded = np.zeros(len(block), dtype=bool)
        for level, sizes in enumerate(block.sizes):
            replicated = sizes[-1] > 1
            whole |= rounded & replicated
            if coded(self._grad_wires[level]):
                rounded |= replicated
        return ~whole

    @cached_property
    def _piece_position(self) -> Integers:
        return _positions(divisors(self.cluster.world))

    @cached_property
    def _size_position(self) -> list[Integers]:
        return [_positions(divisors(level.size)) for level in self.cluster.levels]

    def _columns(self, level: int, stage: Stage, halves: bool, experts: bool, places: Integers) -> Floats:
        """Columns of a table by places: size of a part, then pieces of its region."""
        sizes, pieces = divisors(self.cluster.levels[level].size), divisors(self.cluster.world)
        table = self.known.tables.setdefault((*self._sent[experts], level, stage, halves), {0: [0.0] * len(Row)})
        columns, first = _distinct(places)
        wanted = places[first].tolist()
        for place in wanted:
            if place not in table:
                axis = self._axis(level, stage, sizes[place // len(pieces)])
                table[place] = self._part(axis, pieces[place % len(pieces)], experts, halves=halves)
        return np.array([table[place] for place in wanted]).reshape(-1, len(Row)).T.take(columns, axis=1)

    @cached_property
    def _sent(self) -> dict[bool, tuple[object, ...]]:
        """Key of a table besides level and stage: for everything but experts, and for experts."""
        place = self.cluster, self.wires, self.joins, self._with_root, self._entered is None
        return {
            part: (*place, self.elements.total[part], *((u.kind, u.count, *numels[id(u)]) for u in self.model.units))
            for part, numels in self.elements.by_unit.items()
        }

    def _part(self, axis: Axis, pieces: int, experts: bool, *, halves: bool) -> list[float]:
        """One column of a table."""
        row = [0.0] * len(Row)
        entered, trainable = self._entered, self.elements.total[experts][1]
        gathered, reduced = list[tuple[UnitSpec, float]](), list[tuple[UnitSpec, float]]()
        for unit, gathers in self._gathers_by_unit(axis.stage):
            numels = self.elements.by_unit[experts][id(unit)]
            is_root = any(unit is root for root in self._roots)
            shared = self.joins or (self._with_root and (unit is entered or is_root))
            for operation, per_micro in operations(axis.stage):
                gather = operation == "all_gather"
                transfer = partial(self._transfer, axis, operation, pieces, halves)
                seconds, busy, memory = self._cost(transfer, numels, frozen=gather and per_micro)
                together = numels[0], seconds
                if shared and not axis.stage.shards_params and trainable:
                    # However units are joined, a unit's share is at least its share of one transfer of all.
                    whole = transfer(trainable)
                    seconds, busy, memory = (numels[0] / trainable * each for each in whole)
                    together = trainable, whole[0]
                times = gathers if gather and per_micro else unit.count
                row[(Row.GATHER_MICRO if gather else Row.REDUCE_MICRO) + (not per_micro)] += times * seconds
                row[Row.FORWARD] += unit.count * seconds if gather and per_micro else 0.0
                if per_micro:
                    (gathered if gather else reduced).append((unit, seconds))
                if per_micro and self._in_slots(unit, axis.stage):
                    row[Row.GATHER_BLOCKS if gather else Row.REDUCE_BLOCKS] += times * seconds
                    row[Row.FORWARD_BLOCKS] += unit.count * seconds if gather else 0.0
                row[Row.BUSY_MICRO + (not per_micro)] += times * busy
                row[Row.MEMORY_MICRO + (not per_micro)] += times * memory
                if self._adds and operation == "reduce_scatter" and per_micro and seconds:
                    adding_s = self._adding_s(together[0] / (axis.size * pieces))
                    row[Row.ADDING] = max(row[Row.ADDING], adding_s / (together[1] + adding_s))
                alone, both = _EDGES[gather, per_micro]
                if is_root or unit is entered:
                    row[both] += seconds
                if unit is entered if per_micro else is_root:
                    row[alone] += seconds
        blocks = [each for each in gathered if self._in_slots(each[0], axis.stage)]
        row[Row.AHEAD] = self._outside(blocks, PREFETCH + 1, axis.stage)
        row[Row.REDUCE_LATE] = self._outside(reduced, reduce_slots(PREFETCH), axis.stage)
        return row

    def _gathers_by_unit(self, stage: Stage) -> Iterator[tuple[UnitSpec, int]]:
        """How often a micro-batch gathers each unit over an axis of `stage`.

        A block is gathered in the forward and, if a backward comes back to it, in the backward. But the last blocks of
        the forward are still in their slots then. Over a kept axis, and for units that stay gathered, once.
        """
        spare = PREFETCH + 1
        for unit in reversed(self.model.units):
            if unit.kind is UnitKind.BLOCK and unit.returned and not stage.kept:
                again = max(0, unit.count - spare)
                spare -= unit.count - again
                yield unit, unit.count + again
            else:
                yield unit, unit.count

    @cached_property
    def _entered(self) -> UnitSpec | None:
        """The unit that runs first, if it is a single one. The first computation waits for its parameters and the
        root's, and their gradients come last."""
        inner = (unit for unit in self.model.units if unit.kind is not UnitKind.ROOT)
        first = next(inner, None)
        return first if first is not None and first.count == 1 else None

    @property
    def _roots(self) -> list[UnitSpec]:
        return [unit for unit in self.model.units if unit.kind is UnitKind.ROOT]

    def _axis(self, level: int, stage: Stage, size: int) -> Axis:
        text = self.wires[level] if self.wires else ""
        name = self.cluster.levels[level].name
        wire = Wire.parse(text) if text else Wire()
        return Axis(name=name, mesh_axis=name, size=size, stride=1, stage=stage, wire=wire)

    def _cost(
        self, transfer: Callable[[int], tuple[float, float, float]], numels: tuple[int, int], *, frozen: bool
    ) -> tuple[float, float, float]:
        """Seconds of one transfer of a unit's trainable and frozen elements, in all, of its links and of memory."""
        trainable, rest = numels
        sent = [numel for numel in (trainable, rest if frozen else 0) if numel]
        found = [transfer(numel) for numel in sent]
        seconds, busy, memory = (sum(each) for each in zip((0.0, 0.0, 0.0), *found, strict=True))
        return seconds, busy, memory

    def _transfer(
        self, axis: Axis, operation: Operation, pieces: int, halves: bool, numel: int
    ) -> tuple[float, float, float]:
        """Seconds of a transfer, in all, of its links and of memory. In `halves`, those of the longer half."""
        default = self.workload.param_dtype if operation == "all_gather" else self.workload.wire_dtype
        wire = (axis.wire.param if operation == "all_gather" else axis.wire.grad) or default
        numel = ceil(numel / pieces)
        found = [self._seconds(Transfer(operation=operation, axis=axis, numel=numel, wire=wire))]
        if operation == "all_reduce":
            two: tuple[Operation, Operation] = ("reduce_scatter", "all_gather")
            parts = [self._seconds(Transfer(operation=half, axis=axis, numel=numel, wire=wire)) for half in two]
            # Inside of another replicated level it runs as these two, whose measured rates may differ.
            found.append(tuple(sum(both) for both in zip(*parts, strict=True)))
        seconds, busy, memory = (min(each) for each in zip(*found, strict=True))
        return max(each for each, *_ in parts) if halves and not self.mechanics.queues else seconds, busy, memory

    def _seconds(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds of a transfer, in all, of its links and of memory."""
        cost = self.transfers.cost(transfer)
        return cost.seconds, sum(share for level, share in cost.busy if level != HOST), cost.memory_s


_EDGES = {
    (True, True): (Row.UNSHARD_FIRST, Row.UNSHARD_EDGE),
    (True, False): (Row.REFRESH_ROOT, Row.REFRESH_EDGE),
    (False, True): (Row.REDUCE_FIRST, Row.REDUCE_EDGE),
    (False, False): (Row.BOUNDARY_ROOT, Row.BOUNDARY_EDGE),
}
"""By whether an operation gathers, and whether every micro-batch has it: the rows of one of the two edge units, and of
both."""

_OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce")

_ENDLESS = 2**60
"""So many elements that a transfer's latency does not count."""


_TIERS = [tuple(stage for stage in STAGES if stage.significance == tier) for tier in range(3)]


def _positions(values: Sequence[int]) -> Integers:
    """A table from each value to its position."""
    table = np.zeros(max(values) + 1, dtype=np.int64)
    table[list(values)] = np.arange(len(values))
    return table


def _distinct(keys: Integers) -> tuple[Integers, Integers]:
    """A number from 0 on for each key, equal for equal keys; and for each number, one place of it. Keys must be small
    enough to index by."""
    found = np.zeros(keys.max(initial=0) + 1, dtype=np.int64)
    found[keys] = 1
    used = np.flatnonzero(found)
    found[used] = np.arange(len(used))
    numbers, first = found[keys], np.zeros(len(used), dtype=np.int64)
    first[numbers] = np.arange(len(keys))
    return numbers, first
