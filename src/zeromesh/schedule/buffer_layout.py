"""A flat buffer under a layout: the shards that each rank holds, and the transfers, in order. Both follow from the
notation and are decided here once; simulator and engine read the same lists.

[Note: Bytes] Let F be a buffer's padded length and n_a the size of axis a. A collective over a works on a region of
B_a = F / (product of the sizes of the axes more significant than a) elements (stage 0: of all sharded axes, and of the
axes of stage 0 inside of a). One rank sends (n_a-1)/n_a * B_a per all-gather or reduce-scatter and twice that per
all-reduce.

[Note: By level] Of several axes of stage 0 only the outermost is summed over in place. On the way there each inner axis
scatters, and gathers on the way back. That sends as many bytes on the inner axes as sums over the whole region would,
and divides those of the outer ones by the inner ones' sizes. Where a collective takes two levels at once the outermost
scatters and gathers too: the same bytes, in pairs. Where an inner axis is quantised, which sums as a whole, all axes
are summed over one after the other, and with `collective=flat` all of them as one.

[Note: Order] A gather goes from the least significant axis to the most, so each step's region lies inside the next
one's; a reduction goes the other way. Where stages fall from inner to outer axis the slow link carries the small
pieces.

[Note: Host] The host is a level below the device that cuts nothing. A lane whose source lies there begins with a copy
up, one whose target lies there ends with a copy down, and nothing is copied where both ends are one tensor:
docs/decisions/0042 lists them.

[Note: Alone] In a step of one micro-batch nothing is added to the gradient, so it need not be as wide as a sum. If its
first reduction starts from the accumulator, on a wire of the compute dtype, the gradient is copied into the
accumulator's memory in that dtype and sent from there. The bits are the same, and two casts are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from types import MappingProxyType

from zeromesh.schedule.transfer import GATHERS, HOST_AXIS, Copying, Operation, RouteKind, Transfer, axes_of, wire_bytes
from zeromesh.schedule.unit import FROZEN_BYTES, ITEM_BYTES, FlatBuffer, Role, Unit
from zeromesh.strategy import Axis, Layout, Stage
from zeromesh.wires import coded

ALIGN_BYTES = 64
"""Each flat buffer starts on a cache line inside its slot, so that vector loads of any dtype are aligned."""

SlotPart = tuple[int, str | None]
"""Elements in a slot, and their dtype; None for a part that is not there."""

STREAMED_ELEMENTS = 1 << 24
"""Elements of a state shard that come from the host at a time for a step on the device: longer copies are no faster."""

FEEDBACK_DTYPE = "fp32"
"""Dtype of rounding errors that are owed: with it, the message and the error add up to the gradient within fp32's
rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The transfers of one buffer and kind, and the copies between it and the host: [Note: Host]."""

    held: str  # dtype of the region that it works on
    steps: tuple[Transfer, ...] = ()  # in order; the layout's collective may carry out two neighbours at once
    copied: Axis | None = None  # the axis over which a gather fills memory of its own, the kept copy
    up: Transfer | None = None  # the copy to the device that comes first
    down: Transfer | None = None  # the copy to the host that comes last
    passing: int = 0  # elements of device memory for a region that otherwise lies on the host

    @property
    def all_steps(self) -> tuple[Transfer, ...]:
        """With the copies."""
        return tuple(step for step in (self.up, *self.steps, self.down) if step is not None)

    @property
    def staged(self) -> tuple[Transfer, ...]:
        """The steps whose region is cast on its way to a lossless wire."""
        return tuple(step for step in self.steps if step.wire in ITEM_BYTES and step.wire != self.held)

    @property
    def passing_bytes(self) -> int:
        return self.passing * ITEM_BYTES[self.held]

    def staging_bytes(self, step: Transfer) -> int:
        """Memory of the lane that one of the steps takes."""
        return self.passing_bytes + (step.numel * ITEM_BYTES[step.wire] if step in self.staged else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistent:
    """Bytes of one flat buffer's persistent shards in one place; 0 for a shard that does not exist, aliases another one
    or lies elsewhere."""

    params: int = 0  # the parameter shard, which is the compute copy
    master: int = 0  # the state shard, which is the optimizer's copy; 0 where it is a part of the parameter shard
    grads: int = 0  # the accumulated gradient shard
    kept: int = 0  # the copy that stays gathered over the kept axes from forward to backward
    feedback: int = 0  # rounding errors that quantised reductions with error feedback still owe
    shown: int = 0  # on the host, the gradient of the state shard where it was accumulated on the device
    cast: int = 0  # on the host, the state shard's compute copy on its way to the device

    def only(self, kinds: AbstractSet[str]) -> Persistent:
        """These kinds, and none of the others."""
        return Persistent(**{each.name: getattr(self, each.name) for each in fields(self) if each.name in kinds})


KINDS = frozenset(each.name for each in fields(Persistent))


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """A flat buffer of a unit under a layout; the same on every rank but for the ranges."""

    layout: Layout
    buffer: FlatBuffer
    role: Role
    stays: bool  # its unit stays gathered from forward to backward, in a slot of its own
    padded: int = field(compare=False)  # the buffer's length: [Note: Padding] of the layout
    routes: Mapping[RouteKind, Route] = field(compare=False, repr=False)
    from_kept: Route = field(compare=False, repr=False)  # `unshard` where the kept copy is there
    # Its gather fills the kept copy. None if no axis is kept, or if the unit stays gathered: then its slot is the copy.
    kept_axis: Axis | None = field(compare=False, repr=False)
    # By the axis of a reduction with error feedback, its part of the buffer's residuals.
    feedback: Mapping[str, slice] = field(compare=False, repr=False)
    on_host_kinds: AbstractSet[str] = field(compare=False, repr=False)  # persistent shards that lie on the host

    @classmethod
    def of(
        cls, layout: Layout, buffer: FlatBuffer, role: Role = Role.BLOCK, *, beside: Iterable[Layout] = ()
    ) -> BufferLayout:
        """The layout of one buffer. `beside` has the layouts of its unit's other buffers."""
        param = buffer.param_dtype
        padded = layout.padded(buffer.numel, ITEM_BYTES[param])
        stays = role is Role.RESIDENT or all(map(_keeps_all, (layout, *beside)))
        # The last of the kept axes to be gathered.
        kept = next((axis for axis in layout.param_axes if axis.stage.kept and axis.size > 1 and not stays), None)
        copied = None if kept is None or kept.stage.hosted else kept
        refresh, gathers = (
            _over(layout, padded, param, "all_gather", reversed(axes_of(layout, lane))) for lane in GATHERS
        )
        rest = [step for step in gathers if kept is None or not step.axis.stage.kept]
        host, trained = _host(layout, buffer), buffer.trainable
        micro, boundary = _reductions(layout, padded, buffer.reduce_dtype) if trained else ([], [])
        routes: dict[RouteKind, Route] = {
            "refresh": Route(held=param, steps=tuple(refresh if trained else ())),
            "unshard": Route(held=param, steps=tuple(gathers), copied=copied),
            "reduce": Route(held=_slot_dtype(buffer, micro), steps=tuple(micro)),
            "boundary": Route(held=buffer.grad_dtype, steps=tuple(boundary)),
            "up": Route(held=buffer.grad_dtype),
            "down": Route(held=buffer.grad_dtype),
        }
        on_host = {
            "params": host.shards_params,
            "grads": host.shards_grads and trained,
            **dict.fromkeys(("master", "shown", "cast"), host.shards_states and trained),
            "kept": kept is not None and kept.stage.hosted,
        }
        made = cls(
            layout=layout,
            buffer=buffer,
            role=role,
            stays=stays,
            padded=padded,
            routes=routes,
            from_kept=Route(held=param, steps=tuple(rest)),
            kept_axis=kept,
            feedback=_feedback([*micro, *boundary]),
            on_host_kinds=frozenset(kind for kind, there in on_host.items() if there),
        )
        return made._with_copies() if made.on_host_kinds else made

    def _with_copies(self) -> BufferLayout:
        """[Note: Host]."""
        layout, buffer, host, on_host = self.layout, self.buffer, self.host, self.on_host_kinds
        params, states = self.numel(layout.param_axes), self.numel(layout.significant)
        routes, from_kept = dict(self.routes), self.from_kept
        if "params" in on_host:
            routes["unshard"] = replace(routes["unshard"], up=_copy("up", params, buffer.param_dtype))
        if "kept" in on_host:
            kept = self.sizes.kept // ITEM_BYTES[buffer.param_dtype]
            routes["unshard"] = replace(routes["unshard"], down=_copy("down", kept, buffer.param_dtype))
            from_kept = replace(from_kept, up=_copy("up", kept, buffer.param_dtype))
        elif "params" in on_host and self.kept_axis is None:
            from_kept = replace(from_kept, up=_copy("up", params, buffer.param_dtype))
        if "master" in on_host:
            grads, dtype = self.numel(layout.grad_axes), buffer.grad_dtype
            up = _copy("up", states, buffer.param_dtype)
            if host.shards_params and routes["refresh"].steps:
                down = _copy("down", params, buffer.param_dtype)
                routes["refresh"] = replace(routes["refresh"], up=up, down=down, passing=params)
            elif not (host.shards_params or self.streamed):
                routes["refresh"] = replace(routes["refresh"], up=up)
            if host.shards_grads or not self.streamed:
                routes["boundary"] = replace(routes["boundary"], down=_copy("down", states, dtype))
            if host.shards_grads:
                routes["reduce"] = replace(routes["reduce"], down=_copy("down", grads, dtype))
                # Into the slot of the gradient that has been reduced by then, if it is as long.
                fits = self.waits and grads * ITEM_BYTES[dtype] <= self.padded * ITEM_BYTES[self.slot_dtype]
                routes["up"] = Route(held=dtype, up=_copy("up", grads, dtype), passing=0 if fits else grads)
        return replace(self, routes=routes, from_kept=from_kept)

    def grad_steps(self, *, micro: bool, accumulate: bool, boundary: bool) -> tuple[Transfer, ...]:
        """The transfers of one reduction, as `zeromesh.schedule.state.Reduction` describes it."""
        early, late, up = self.routes["reduce"], self.routes["boundary"], self.routes["up"].up
        away, further = early.down is not None, boundary and bool(late.steps)
        if away and not (micro or further):
            return ()  # sums stay on the host
        steps = [*(early.steps if micro else ()), *([up] if up is not None and accumulate else [])]
        down = early.down if away and not further else late.down if boundary else None
        return (*steps, *(late.steps if boundary else ()), *([] if down is None else [down]))

    @property
    def gathered(self) -> bool:
        """Whether its unit computes with a slot. If not, the parameter shard is all of the buffer."""
        return self.layout.degree(self.layout.param_axes) > 1 or "params" in self.on_host_kinds

    @property
    def gather_part(self) -> SlotPart:
        return self.padded, self.buffer.param_dtype if self.gathered else None

    @property
    def reduce_parts(self) -> tuple[SlotPart, SlotPart]:
        """Its parts of its unit's reduce slot: a gradient that waits, and the gradient shard if that lies on the host
        otherwise."""
        grads = self.buffer.grad_dtype if "grads" in self.on_host_kinds else None
        return (self.padded, self.slot_dtype if self.waits else None), (self.numel(self.layout.grad_axes), grads)

    @property
    def waits(self) -> bool:
        """Whether a micro-batch's gradient waits in a slot; else it is added where it stays (no stage 2 or 3)."""
        return self.buffer.trainable and self.layout.degree(self.layout.grad_axes) > 1

    def numel(self, axes: Sequence[Axis]) -> int:
        """Elements of one rank's shard over `axes`."""
        return self.padded // self.layout.degree(axes)

    def region(self, step: Transfer, coordinates: dict[str, int]) -> slice:
        """The range of the buffer that a rank's gather works on."""
        return self.layout.shard(self.padded, self.layout.above(step.axis), coordinates)

    @property
    def slot_dtype(self) -> str:
        """Dtype of a gradient that waits in its reduce slot."""
        return self.routes["reduce"].held

    def collected_dtype(self, *, alone: bool) -> str:
        """Dtype into which autograd's gradient is copied; `alone`: [Note: Alone]."""
        made, held = self.buffer.param_dtype, self.slot_dtype if self.waits else self.buffer.grad_dtype
        stays = not self.waits and "grads" not in self.on_host_kinds
        sent = [step.wire for step in self.routes["boundary"].steps[:1] if alone and stays]
        return made if sent == [made] and ITEM_BYTES[made] < ITEM_BYTES[held] else held

    @property
    def host(self) -> Stage:
        return _host(self.layout, self.buffer)

    @property
    def stepped_on_host(self) -> bool:
        """Whether the state shard lies on the host, and the optimizer steps on it there."""
        return self.host.shards_states and self.buffer.trainable and not self.streamed

    @property
    def streamed(self) -> bool:
        """Whether the state shard lies on the host and comes to the device for each step of the optimizer."""
        return self.host.shards_states and self.buffer.trainable and self.layout.strategy.step == "device"

    def stream(self, moments: int) -> tuple[Transfer, ...]:
        """The copies of one such step: master and so many states up and down; gradients up and the compute copy down
        where these lie on the host."""
        master, on_host = self.buffer.master_dtype, self.on_host_kinds
        if not self.streamed or master is None:
            return ()
        up = [master] * (1 + moments) + [self.buffer.grad_dtype] * ("grads" in on_host)
        down = [master] * (1 + moments) + [self.buffer.param_dtype] * (
            "params" in on_host and not self.master_in_params
        )
        states = self.numel(self.layout.significant)
        return (*(_copy("up", states, dtype) for dtype in up), *(_copy("down", states, dtype) for dtype in down))

    @property
    def master_in_params(self) -> bool:
        """Whether the optimizer's copy is this rank's part of the compute copy: both have one dtype, and no wire of the
        refresh rounds. Where one does, all ranks compute with the rounded values, this one included."""
        param, host = self.buffer.param_dtype, self.host
        if self.buffer.master_dtype != param or host.shards_states != host.shards_params:
            return False
        return all(step.wire == param for step in self.routes["refresh"].steps)

    @property
    def kept_wire(self) -> str:
        """The format of the kept copy: that of the wire of the last gather that fills it. On the host it holds values,
        since messages would take memory of the device on their way."""
        dtype = self.buffer.param_dtype
        return dtype if self.kept_axis is None or self.kept_axis.stage.hosted else _param_wire(self.kept_axis, dtype)

    @property
    def keeps_messages(self) -> bool:
        return coded(self.kept_wire) is not None

    @property
    def persistent(self) -> Persistent:
        """Bytes on the device."""
        return self.sizes.only(KINDS - self.on_host_kinds) if self.on_host_kinds else self.sizes

    @property
    def on_host(self) -> Persistent:
        """Bytes in the host's memory."""
        return self.sizes.only(self.on_host_kinds)

    @property
    def sizes(self) -> Persistent:
        """Bytes, wherever the shards lie."""
        layout, buffer, host = self.layout, self.buffer, self.host
        states, master = self.numel(layout.significant), 0
        grads = kept = shown = cast = 0
        if buffer.master_dtype is not None:
            grads = self.numel(layout.grad_axes) * ITEM_BYTES[buffer.grad_dtype]
            if self.stepped_on_host and not host.shards_grads:
                shown = states * ITEM_BYTES[buffer.grad_dtype]
            if self.stepped_on_host and not host.shards_params and buffer.master_dtype != buffer.param_dtype:
                cast = states * ITEM_BYTES[buffer.param_dtype]
            if not self.master_in_params:
                master = states * ITEM_BYTES[buffer.master_dtype]
        if self.kept_axis is not None:  # a quantised one is the messages of all ranks of its axis, scales and all
            size, others = self.kept_axis.size, [axis for axis in layout.param_axes if not axis.stage.kept]
            kept = size * wire_bytes(self.numel(others) // size, self.kept_wire)
        owed = max((part.stop for part in self.feedback.values()), default=0)
        return Persistent(
            params=self.numel(layout.param_axes) * ITEM_BYTES[buffer.param_dtype],
            master=master,
            grads=grads,
            kept=kept,
            feedback=owed * ITEM_BYTES[FEEDBACK_DTYPE],
            shown=shown,
            cast=cast,
        )


def place(
    layout: Layout, units: Iterable[Unit], parts: Mapping[str, Layout] = MappingProxyType({})
) -> tuple[tuple[BufferLayout, ...], ...]:
    """The buffers of each unit; equal ones, as a model's blocks have, are one value."""
    layouts = {"": layout, **parts}

    @cache
    def placed(role: Role, buffer: FlatBuffer, beside: frozenset[str]) -> BufferLayout:
        return BufferLayout.of(layouts[buffer.part], buffer, role, beside=[layouts[part] for part in beside])

    own = [(unit, frozenset(buffer.part for buffer in unit.buffers)) for unit in units]
    return tuple(tuple(placed(unit.role, buffer, beside) for buffer in unit.buffers) for unit, beside in own)


def slot_bytes(part: SlotPart) -> int:
    numel, dtype = part
    return 0 if dtype is None else -(-numel * ITEM_BYTES[dtype] // ALIGN_BYTES) * ALIGN_BYTES


def _host(layout: Layout, buffer: FlatBuffer) -> Stage:
    return Stage.ZERO if buffer.on_device else layout.strategy.host


def _copy(operation: Copying, numel: int, dtype: str) -> Transfer:
    return Transfer(operation=operation, axis=HOST_AXIS, numel=numel, wire=dtype)


def _keeps_all(layout: Layout) -> bool:
    """Whether all parameters gathered under this layout are kept on the device from forward to backward."""
    axes = [axis for axis in layout.param_axes if axis.size > 1]
    return all(axis.stage.kept and not axis.stage.hosted for axis in axes) if axes else not layout.gathers


def _over(layout: Layout, padded: int, dtype: str, operation: Operation, axes: Iterable[Axis]) -> list[Transfer]:
    """One transfer for each axis of several ranks."""
    return [
        Transfer(
            operation=operation,
            axis=axis,
            numel=padded // layout.degree(layout.above(axis)),
            wire=_param_wire(axis, dtype) if operation == "all_gather" else axis.wire.grad or dtype,
        )
        for axis in axes
        if axis.size > 1
    ]


def _param_wire(axis: Axis, dtype: str) -> str:
    """How values of `dtype` are gathered over an axis."""
    return dtype if dtype in FROZEN_BYTES else axis.wire.param or dtype


def _reductions(layout: Layout, padded: int, dtype: str) -> tuple[list[Transfer], list[Transfer]]:
    """The reductions of one micro-batch's gradient into the gradient shard (stages 2 and 3), and of the accumulated one
    into the state shard: scatter (1, 3d), then all-reduce (0)."""
    over, inner = partial(_over, layout, padded, dtype), layout.scattered_replicas
    scatters = over("reduce_scatter", [axis for axis in layout.significant if axis not in layout.grad_axes])
    sums = over("all_reduce", [axis for axis in layout.replica_axes if axis not in inner])
    for scatter in reversed(over("reduce_scatter", inner)):
        parts = [replace(step, numel=step.numel // scatter.axis.size) for step in sums]
        sums = [scatter, *parts, replace(scatter, operation="all_gather")]
    return over("reduce_scatter", layout.grad_axes), [*scatters, *sums]


def _slot_dtype(buffer: FlatBuffer, steps: Sequence[Transfer]) -> str:
    """Dtype of a gradient that waits for these reductions, and of their sums in place. It holds the values of every
    lossless wire on the way. If such a sum is quantised it is fp32, so that the sum is rounded once."""
    held = {step.wire for step in steps} & set(ITEM_BYTES) or {buffer.reduce_dtype}
    if len(held) > 1 or any(coded(step.wire) for step in steps[1:]):
        held |= {"fp32"}
    return max(held, key=ITEM_BYTES.__getitem__)


def _feedback(steps: Iterable[Transfer]) -> dict[str, slice]:
    parts, start = {}, 0
    for step in steps:
        if step.axis.wire.feedback:
            parts[step.axis.name] = slice(start, start + step.numel)
            start += step.numel
    return parts
