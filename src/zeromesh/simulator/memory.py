"""Device memory over a step: fixed allocations, and activations as they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from zeromesh.model.spec import Recomputation, UnitKind, UnitSpec
from zeromesh.schedule.buffer_layout import STREAMED_ELEMENTS, BufferLayout
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.unit import ITEM_BYTES

MOMENTS = 2
"""AdamW's moments (arXiv 1412.6980) per element of the master, in the master's dtype as in torch.optim.AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Peak memory of one device by purpose; `overhead` is context, communicators and allocator."""

    params: float
    grads: float
    optimizer: float
    buffers: float
    activations: float
    overhead: float

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optimizer + self.buffers + self.activations + self.overhead

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def optimizer_bytes(schedule: Schedule, *, on_host: bool = False) -> float:
    """Bytes of the master copy, if it is not the compute copy, and of two moments, on one device or its host."""
    states = 0.0
    for placed in (placed for unit in schedule.placed for placed in unit):
        dtype = placed.buffer.master_dtype
        if dtype is not None and ("master" in placed.on_host_kinds) == on_host:
            states += MOMENTS * placed.numel(placed.layout.significant) * ITEM_BYTES[dtype]
    plan = schedule.memory.host if on_host else schedule.memory
    return states + (0 if plan is None else plan.master_bytes)


def host_bytes(schedule: Schedule) -> float:
    """Bytes of everything that one rank keeps in its host's memory."""
    plan = schedule.memory.host
    return 0.0 if plan is None else plan.total_bytes - plan.master_bytes + optimizer_bytes(schedule, on_host=True)


def state_elements(schedule: Schedule) -> float:
    """Number of trained elements that one device steps on."""
    trained = [placed for unit in schedule.placed for placed in unit if placed.buffer.trainable]
    return sum(placed.padded / placed.layout.degree(placed.layout.significant) for placed in trained)


def streamed_bytes(schedule: Schedule) -> float:
    """Device memory for states that come from the host for a step: a piece of a buffer for each of two units, one of
    even and one of odd number."""

    def piece_bytes(placed: BufferLayout) -> float:
        share = min(1.0, STREAMED_ELEMENTS / max(1, placed.numel(placed.layout.significant)))
        return share * sum(copy.sent_bytes for copy in placed.stream(MOMENTS) if copy.operation == "up")

    units = [max(map(piece_bytes, unit), default=0.0) for unit in schedule.placed]
    return max(units[::2], default=0.0) + max(units[1::2], default=0.0)


def unreduced_bytes(schedule: Schedule, specs: Sequence[Sequence[UnitSpec]], *, planned: bool) -> tuple[float, ...]:
    """Returns, by unit, the gradients alive during its backward that are in no buffer.

    If `planned`, autograd leaves the unit's gradients, which are then copied into existing memory. If not, each is
    added to temporary reduce buffers: the unit's own, and one more in flight.
    """
    if planned:
        return tuple(
            float(sum(b.numel * ITEM_BYTES[b.param_dtype] for b in unit.buffers if b.trainable))
            for unit in schedule.units
        )
    slots = schedule.memory.reduce
    own = [0.0 if slot is None else float(slots.slot_bytes[slot]) for slot in slots.slot_of]
    block = max((own[i] for i in range(len(own)) if not schedule.resident(i)), default=0.0)
    found = []
    for index, (unit, held) in enumerate(zip(schedule.units, specs, strict=True)):
        item = max((ITEM_BYTES[b.param_dtype] for b in unit.buffers if b.trainable), default=0)
        largest = max((t.num_elements for spec in held for t in spec.tensors if t.trainable), default=0) * item
        found.append(largest + own[index] + (0.0 if schedule.resident(index) else block))
    return tuple(found)


@dataclass(slots=True)
class Activations:
    """Bytes of activations at each moment of a micro-batch.

    A unit's forward leaves saved tensors. Its backward holds these, recomputed ones, its working memory and the
    gradients that autograd makes before they are copied to where they are reduced; then all are freed. The root's last
    norm runs between blocks and head. So its saved tensors are freed when the head's backward ends, although in the
    schedule the root encloses all other units and starts its backward first.
    """

    specs: tuple[UnitSpec, ...]
    tokens: int
    seq_len: int
    recomputation: Recomputation
    gradients: tuple[float, ...]  # by part: those of its unit, during its backward
    now: float = 0.0
    peak: float = 0.0
    record: bool = False
    changes: list[tuple[float, float]] = field(default_factory=list)
    _freed: list[float] = field(init=False)  # by unit, when its backward has ended

    def __post_init__(self) -> None:
        self._freed = [self._saved(unit) for unit in range(len(self.specs))]
        kinds = [spec.kind for spec in self.specs]
        if UnitKind.ROOT in kinds and UnitKind.HEAD in kinds:
            root, head = kinds.index(UnitKind.ROOT), kinds.index(UnitKind.HEAD)
            self._freed[head] += self._freed[root]
            self._freed[root] = 0.0

    def forward(self, unit: int, at_s: float) -> None:
        """Notes that the unit's forward has ended."""
        self._set(self.now + self._saved(unit), at_s)

    def enter_backward(self, unit: int, at_s: float) -> None:
        """Notes that the unit's backward (or the recomputation before it) starts."""
        spec = self.specs[unit]
        extra = self.tokens * spec.backward_peak_bytes(self.seq_len, self.recomputation) - self._saved(unit)
        self._set(self.now + extra + self.gradients[unit], at_s)

    def leave_backward(self, unit: int, before: float, at_s: float) -> None:
        """Notes that the unit's backward has ended; `before` is `now` as it was at its start."""
        self._set(before - self._freed[unit], at_s)

    def pass_through(self) -> None:
        """Runs one micro-batch in the order of `zeromesh.schedule.step`, without times."""
        root, *inner = range(len(self.specs))
        for unit in (*inner, root):
            self.forward(unit, 0.0)
        for unit in (root, *reversed(inner)):
            if self.specs[unit].returned or unit == root:
                before = self.now
                self.enter_backward(unit, 0.0)
                self.leave_backward(unit, before, 0.0)

    def _saved(self, unit: int) -> float:
        return self.tokens * self.specs[unit].saved_bytes(self.seq_len, self.recomputation)

    def _set(self, value: float, at_s: float) -> None:
        self.now = value
        self.peak = max(self.peak, value)
        if self.record:
            self.changes.append((at_s, value))
