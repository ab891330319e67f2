"""Every buffer that the engine allocates, in bytes, decided before anything is allocated.

The engine allocates exactly these, once; the planner adds them up. Lengths are padded ([Note: Padding] of layouts);
without padding the sums are those of `zeromesh.planner.memory_bound`. Each lane also has a workspace for its
collectives: it does one job at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from zeromesh.schedule.buffer_layout import BufferLayout, Persistent, slot_bytes
from zeromesh.schedule.lanes import Lanes
from zeromesh.schedule.transfer import Transfer
from zeromesh.schedule.unit import Role

Buffers = Sequence[Sequence[BufferLayout]]
"""The buffers of each unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Which slot each unit uses, and how long the slots are."""

    slot_of: tuple[int | None, ...] = ()  # by unit; None for those that need none
    slot_bytes: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.slot_bytes)


def plan_gather_slots(placed: Buffers, prefetch: int) -> SlotPlan:
    """prefetch + 1 slots of the largest block, one more for each unit that stays gathered; of buffers that are gathered
    at all. A unit always lands in the same slot, since tensors that autograd saved point into it."""
    sizes = [sum(slot_bytes(p.gather_part) for p in unit) for unit in placed]
    return _plan_slots([any(p.stays for p in unit) for unit in placed], sizes, prefetch + 1)


def reduce_slots(prefetch: int) -> int:
    """Blocks whose gradients are reduced at once, beside those that autograd leaves of the unit whose backward runs.
    One keeps a single axis at work; with two, each of two axes can reduce another block's."""
    return max(1, prefetch)


def _plan_slots(own: Sequence[bool], sizes: Sequence[int], shared: int) -> SlotPlan:
    sharing = [index for index, size in enumerate(sizes) if size and not own[index]]
    shared = min(shared, len(sharing))
    slot_bytes = [max((sizes[index] for index in sharing), default=0)] * shared
    slot_of: list[int | None] = [None] * len(sizes)
    for position, index in enumerate(sharing):
        slot_of[index] = position % shared
    for index, size in enumerate(sizes):
        if size and own[index]:
            slot_of[index] = len(slot_bytes)
            slot_bytes.append(size)
    return SlotPlan(slot_of=tuple(slot_of), slot_bytes=tuple(slot_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device of everything the engine allocates."""

    persistent: tuple[tuple[Persistent, ...], ...]
    gather: SlotPlan = SlotPlan()
    reduce: SlotPlan = SlotPlan()
    lanes: Lanes = field(default_factory=Lanes)
    # Bytes by lane: for the longest region that is cast for a wire, and for the collectives' own working memory.
    staging: Mapping[str, int] = field(default_factory=dict)
    workspace: Mapping[str, int] = field(default_factory=dict)
    host: MemoryPlan | None = None  # the host's memory, where anything lies there

    @classmethod
    def of(
        cls,
        placed: Buffers,
        prefetch: int,
        messages: bool | None = None,
        *,
        triton: bool = True,
        lent: Mapping[str, str] = MappingProxyType({}),
    ) -> MemoryPlan:
        """The plan of these buffers; the other arguments are those of `Schedule.of`."""
        each = {id(buffer): buffer for unit in placed for buffer in unit}  # a model's blocks share theirs

        def by_unit(shards: Callable[[BufferLayout], Persistent]) -> tuple[tuple[Persistent, ...], ...]:
            found = {key: shards(buffer) for key, buffer in each.items()}
            return tuple(tuple(found[id(buffer)] for buffer in unit) for unit in placed)

        lanes = Lanes.of(each.values(), lent)
        staging, workspace = dict.fromkeys(lanes.names, 0), dict.fromkeys(lanes.names, 0)
        for buffer in each.values():
            for kind, route in buffer.routes.items():
                for step in route.steps:
                    lane = lanes.lane(step.direction, step.axis.name)
                    staging[lane] = max(staging[lane], route.staging_bytes(step))
                    workspace[lane] = max(workspace[lane], _workspace_bytes(step, messages, triton))
                if route.passing and not route.steps:
                    staging[kind] = max(staging.get(kind, 0), route.passing_bytes)

        hosted = any(buffer.on_host_kinds for buffer in each.values())
        resident = [any(p.role is Role.RESIDENT for p in unit) for unit in placed]
        waiting = [[part for p in unit for part in p.reduce_parts] for unit in placed]
        return cls(
            persistent=by_unit(lambda buffer: buffer.persistent),
            gather=plan_gather_slots(placed, prefetch),
            # One more for each resident unit; of gradients that wait at all.
            reduce=_plan_slots(resident, [sum(map(slot_bytes, parts)) for parts in waiting], reduce_slots(prefetch)),
            lanes=lanes,
            staging=staging,
            workspace=workspace,
            host=cls(persistent=by_unit(lambda buffer: buffer.on_host)) if hosted else None,
        )

    def keeps(self, unit: int) -> bool:
        """Whether the unit has a kept copy, with which its backward's gather may begin."""
        own = any(buffer.kept for buffer in self.persistent[unit])
        return own or (self.host is not None and self.host.keeps(unit))

    @property
    def params_bytes(self) -> int:
        return sum(buffer.params for unit in self.persistent for buffer in unit)

    @property
    def master_bytes(self) -> int:
        return sum(buffer.master for unit in self.persistent for buffer in unit)

    @property
    def grads_bytes(self) -> int:
        return sum(buffer.grads + buffer.shown for unit in self.persistent for buffer in unit)

    @property
    def buffers_bytes(self) -> int:
        """Slots, kept copies, residuals, copies on their way up, staging and workspace."""
        kept = sum(buffer.kept + buffer.feedback + buffer.cast for unit in self.persistent for buffer in unit)
        lanes = sum(self.staging.values()) + sum(self.workspace.values())
        return self.gather.total_bytes + self.reduce.total_bytes + kept + lanes

    @property
    def total_bytes(self) -> int:
        return self.params_bytes + self.master_bytes + self.grads_bytes + self.buffers_bytes


MESSAGES_BYTES = 8 << 20
"""Room for pieces of 1 MiB from one peer and of half a MiB from three."""

ROUNDS = 2
"""Most exchanges in which a device sends one coded region. The host launches up to four kernels for each. So a unit
takes some ten launches on an axis and in a direction, and the host keeps ahead of the device. More rounds would need
less room, which here holds messages of half a chunk from every rank."""

ALIGN = 64
"""Parts begin at multiples of this many elements, so that vector loads of any dtype are aligned."""


def _workspace_bytes(step: Transfer, messages: bool | None, triton: bool) -> int:
    """Bytes that one step needs; a lossless gather works in place, and so do a backend's own sums."""
    form, gathers = step.form, step.operation == "all_gather"
    if messages is None or (form is None and (gathers or not messages)):
        return 0
    if messages or form is None:
        return MESSAGES_BYTES
    directions, multiple = 1 if gathers else 2, 8 * form.granule
    part = -(-step.chunk_numel // (ROUNDS * multiple)) * multiple  # elements of a chunk that one of `ROUNDS` takes
    codec = 0 if form.kernels and triton else form.memory_bytes(part)
    return codec + directions * step.axis.size * form.message_bytes(part)


def part_numel(workspace_bytes: int, item_bytes: int, wide_bytes: int, *, terms: int, longest_bytes: int) -> int:
    """Elements of the parts in which a sum is formed: at most `longest_bytes` long, and so that the workspace has room
    for the received `terms` of a part, those in flight included, and for two of it as wide as sums are. An element has
    `item_bytes` on the wire and `wide_bytes` while it is summed."""
    each = 2 * wide_bytes + terms * item_bytes
    return min(longest_bytes // item_bytes, workspace_bytes // each) // ALIGN * ALIGN
