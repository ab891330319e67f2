"""Turns the schedule's transfers into work for the network, with an engine's mechanics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Literal

from zeromesh.collectives import ByLevel
from zeromesh.cost.collective import CollectiveCost, Operation, costs_of, one_after_another
from zeromesh.cost.group import ring_steps
from zeromesh.cost.transfer import TransferModel
from zeromesh.schedule.bucket import Shipment
from zeromesh.schedule.buffer_layout import BufferLayout, Route
from zeromesh.schedule.lanes import in_lanes, side_by_side
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.transfer import COPIES, GATHERS, Copying, RouteKind, Transfer, wire_bytes
from zeromesh.simulator.mechanics import Mechanics
from zeromesh.simulator.network import Work
from zeromesh.strategy import Axis, Collective
from zeromesh.strategy.stage import HOST
from zeromesh.trace import GATHER_BACK
from zeromesh.wires import coded

ByLane = tuple[tuple[str, tuple[Work, ...]], ...]
"""The work of a chain by lane. Each part follows the one before."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Builds the chain of each operation of each unit. Equal units share their chains."""

    schedule: Schedule
    mechanics: Mechanics
    model: TransferModel
    _built: dict[tuple[object, ...], ByLane] = field(default_factory=dict, repr=False)

    def chain(self, kind: RouteKind | Literal["from_kept"], unit: int) -> ByLane:
        """Returns a unit's transfers of a kind. "from_kept" is "unshard" from a kept copy."""
        placed = self.schedule.placed[unit]
        key = (kind, *map(id, placed))  # equal units have the same key
        if key not in self._built:
            own: RouteKind = "unshard" if kind == "from_kept" else kind

            def lane(work: Work) -> str:
                return self.lane(own, work.axes[0], back=work.name == GATHER_BACK)

            parts = side_by_side(in_lanes(self._build(kind, buffer), lane, "") for buffer in placed)
            self._built[key] = tuple((name, tuple(works)) for name, works in parts)
        return self._built[key]

    def lane(self, kind: RouteKind, axis: str, *, back: bool = False) -> str:
        """The lane of a transfer of a kind over an axis. `back`: it gathers a sum that was scattered."""
        return self.mechanics.lane(kind, "gather" if back or kind in GATHERS else "reduce", axis, self.schedule.lanes)

    def copied(self, kind: str, steps: Iterable[Transfer | None]) -> dict[Copying, ByLane]:
        """Returns the copies to and from the host among `steps`, by direction; `kind` is the chain's."""
        found: dict[Copying, tuple[Work, ...]] = {"up": (), "down": ()}
        for step in steps:
            if step is not None and step.operation in COPIES:
                operation = step.operation
                seconds = step.sent_bytes / self.model.constants.host_copy_bytes_per_s
                work = Work(f"{kind} {operation}", (HOST,), CollectiveCost(seconds=seconds), (float(step.sent_bytes),))
                found[operation] = (*found[operation], work)
        queues = dict(self.mechanics.queues)
        return {way: ((queues.get(way, way), works),) if works else () for way, works in found.items()}

    def shipped(self, kind: RouteKind, shipments: Sequence[Shipment]) -> ByLane:
        """Returns the work of sending to the owners of whole tensors, or back, in the lanes of a kind."""
        works = []
        for shipment in shipments:
            axis = shipment.axis
            region = -(-shipment.numel * axis.size // (axis.size - 1))  # a rank sends all of it except its own part
            cost = self.model.joint((axis,), "all_to_all", region, shipment.wire)
            work = Work("owners all_to_all", (axis.name,), cost, (float(shipment.sent_bytes),))
            works.append((self.lane(kind, axis.name), (work,)))
        return tuple(works)

    def _build(self, kind: RouteKind | Literal["from_kept"], placed: BufferLayout) -> list[Work]:
        match kind:
            case "from_kept":
                return self._works(placed.from_kept, "unshard")
            case "refresh":
                return self._refresh(placed.routes[kind])
            case "unshard":
                return self._works(placed.routes[kind], kind)
            case "reduce":
                return self._accumulated(self._works(placed.routes[kind], kind), placed)
            case "boundary":
                return self._boundary(placed.routes[kind])
            case "up" | "down":
                return []

    def _works(self, route: Route, kind: str) -> list[Work]:
        collective = self._collective
        if isinstance(collective, ByLevel) and not self.mechanics.joint:
            grouped = collective.grouped(route, messages=self.model.cluster.messages)
            return [self._together(steps, kind) for steps in grouped]
        works: list[Work] = []
        for (operation, wire), same in groupby(route.steps, key=lambda step: (step.operation, step.wire)):
            steps = list(same)
            # A quantised reduction is an all-to-all, and goes level by level (qgZ, arXiv 2306.10209). In a flat one,
            # every rank would send to every other through the node's links.
            by_level = operation != "all_gather" and coded(wire) is not None
            if len(steps) > 1 and not by_level:
                works.append(self._joined([s.axis for s in steps], operation, max(s.numel for s in steps), wire, kind))
            else:
                works += [self._single(step, kind) for step in steps]
        return works

    def _accumulated(self, works: list[Work], placed: BufferLayout) -> list[Work]:
        """Adds the kernel that adds a sum to the accumulator."""
        steps = placed.routes["reduce"].steps
        adds = self.mechanics.adds(self.model.cluster.messages)
        if not steps or not adds or steps[-1].form is not None or steps[-1].operation != "reduce_scatter":
            return works
        moved = wire_bytes(steps[-1].chunk_numel, steps[-1].wire) + 2 * placed.persistent.grads
        return [*works[:-1], replace(works[-1], cost=self.model.with_kernels(works[-1].cost, moved))]

    @property
    def _collective(self) -> Collective:
        return self.schedule.layout.collective

    def _together(self, steps: Sequence[Transfer], kind: str) -> Work:
        """The work of one step, or of two that the strategy's collective carries out at once."""
        if len(steps) == 1:
            return self._single(steps[0], kind)
        one, other = steps
        first, last = (self._single(step, kind) for step in steps)
        cost = costs_of(self._collective).pair_cost(first.cost, last.cost, (one, other))
        place = self.schedule.axes.index
        inner, outer = (first, last) if place(one.axis) < place(other.axis) else (last, first)
        return Work(first.name, (*inner.axes, *outer.axes), cost, (*inner.sent_bytes, *outer.sent_bytes))

    def _single(self, step: Transfer, kind: str) -> Work:
        pieces = self._pieces(step.numel, kind)
        piece = self.model.cost(replace(step, numel=-(-step.numel // pieces)))
        cost = self._with_copies(self._in_pieces(piece, pieces, kind), step.numel, step.wire)
        return Work(f"{kind} {step.operation}", (step.axis.name,), cost, (float(step.sent_bytes),))

    def _joined(self, axes: Sequence[Axis], operation: Operation, numel: int, wire: str, kind: str) -> Work:
        inner_first = [axis for axis in self.schedule.axes if axis in axes]
        pieces = self._pieces(numel, kind)
        piece = self.model.joint(inner_first, operation, -(-numel // pieces), wire, self._collective.name)
        cost = self._with_copies(self._in_pieces(piece, pieces, kind), numel, wire)
        sizes = [axis.size for axis in inner_first]
        *inner, outermost = ring_steps(sizes)
        # On average, a rank sends on an axis in proportion to the ring's edges there; the last edge closes the ring.
        sent = tuple(cost.sent_bytes * (edges / prod(sizes)) for edges in (*inner, outermost + 1))
        return Work(f"{kind} {operation}", tuple(axis.name for axis in inner_first), cost, sent)

    def _pieces(self, numel: int, kind: str) -> int:
        """The number of collectives that carry out one of the schedule's."""
        most = self.mechanics.gather_numel
        return max(1, -(-numel // most)) if most and kind == "unshard" else 1

    def _in_pieces(self, piece: CollectiveCost, pieces: int, kind: str) -> CollectiveCost:
        whole = one_after_another(*[piece] * pieces) if pieces > 1 else piece
        waits = pieces * self.mechanics.host_gather_s if kind == "unshard" else 0.0
        return replace(whole, seconds=whole.seconds + waits) if waits else whole

    def _with_copies(self, cost: CollectiveCost, numel: int, wire: str) -> CollectiveCost:
        """Adds the time of copies. Their load on the computation is in its rates, fitted with such copies running."""
        if not self.mechanics.copies:
            return cost
        moved = 2 * self.mechanics.copies * wire_bytes(numel, wire)
        return replace(cost, seconds=cost.seconds + self.model.compute.memory(moved))

    def _boundary(self, route: Route) -> list[Work]:
        if self.mechanics.owners != "broadcast" or not route.steps:
            return self._works(route, "reduce")
        # Every rank gets the whole sum, and drops the parts that it does not own.
        first = route.steps[0]
        return [self._joined([step.axis for step in route.steps], "all_reduce", first.numel, first.wire, "reduce")]

    def _refresh(self, route: Route) -> list[Work]:
        if self.mechanics.owners != "broadcast" or not route.steps:
            return self._works(route, "refresh")
        axes, last = [step.axis for step in route.steps], route.steps[-1]
        whole = self._joined(axes, "broadcast", last.numel, last.wire, "refresh")
        # There is one broadcast per owner and step. If there are more owners than units, each unit has several.
        per_unit = max(1.0, prod(axis.size for axis in axes) / len(self.schedule.units))
        cost = replace(
            whole.cost,
            seconds=whole.cost.seconds + (per_unit - 1) * whole.cost.latency_s,
            busy_latency_s=per_unit * whole.cost.busy_latency_s,
        )
        return [replace(whole, cost=cost)]
