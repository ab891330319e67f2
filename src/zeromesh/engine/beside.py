"""Steps of torch's optimizers on slices in the host's memory, there or on the device, beside the next forward.

[Note: Beside] Torch's elementwise optimizers keep all that they know of a parameter in its group, its state and its
gradient. So an optimizer of the same class steps on one unit at a time, over plain tensors of the same memory, in a
lane of the host. Units go in the order of the forward, and the refresh of each follows its step. The groups are copies:
a scheduler may go on to the next rate at once.

A clip leaves its factor to the step, whose kernels multiply by it in passing. Its norm has been found on the device, of
gradients on their way down. Gradients and states stay at their places meanwhile. Whoever looks at a slice's values, a
gradient's or a state comes after the steps (`settle`), and so does the first backward after them, which writes to the
gradients' memory. A plain tensor of such memory that somebody has kept from before knows nothing of it.

Torch's fused kernels are chosen for the host where the user has chosen none: without them one Python thread would issue
each operation of each parameter. States that torch has made on the device (`;step=device`) go to the host's memory,
together for each name and buffer; those that a load has made are copied there. The rest is in docs/decisions/0042.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeromesh.comm.host import HostArena, HostLink, free_bytes
from zeromesh.engine.flat import FlatShards, HostStates, inside
from zeromesh.engine.param import MARKED, ShardedParameter, settle
from zeromesh.errors import ModelError
from zeromesh.schedule.buffer_layout import STREAMED_ELEMENTS

_Step = Callable[[Any], object]

_Given = tuple[int, Tensor, Tensor, dict[str, Any] | None]
"""A plain tensor to be stepped on: its group's index before it, then its gradient and its state."""


def _settled(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def called(self: Any, *args: Any) -> Any:
        settle(self)
        return method(self, *args)

    return called


_LOOKS = ("__getitem__", "__iter__", "__reduce__", "copy", "get", "items", "pop", "popitem", "setdefault", "values")
_CHANGES = ("__delitem__", "__setitem__", "clear", "update")

States: Any = type("States", (defaultdict,), {name: _settled(name) for name in (*_LOOKS, *_CHANGES)})
"""An optimizer's states: whoever looks at one, or puts others there, comes after the steps under way."""


def step_beside(step: _Step, optimizer: Optimizer) -> bool:
    """Hands `step`, an elementwise optimizer's without its hooks, to lanes where it is on slices that lie on the host.
    Their gradients have come. Returns whether it did; if not, nothing lies there, or the step has to run here."""
    if any(group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups):
        return False
    if type(optimizer.state) is not States:
        optimizer.state = States(dict, optimizer.state)
    own = dict(vars(optimizer))
    if own.get("found_inf") is not None:
        own["found_inf"] = own["found_inf"].clamp(max=1)  # GradScaler adds up devices; kernels skip a step for 1 alone
    clips = _clips_of(optimizer)
    own_of: dict[type[_Part], dict[str, Any]] = {}
    parts: dict[tuple[Any, int, type[_Part]], _Part] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if (grad := param.grad) is None:
                continue
            key = _HERE
            if isinstance(param, ShardedParameter) and param.on_host:
                key = param.engine(), param.unit, _Streamed if param.streamed else _OnHost
            if key not in parts:
                engine, unit, kind = key
                if kind not in own_of:
                    own_of[kind] = {name: kind.number(value) for name, value in own.items()}
                parts[key] = kind(optimizer, own_of[kind], None if engine is None else engine.backend, unit)
                if kind is _OnHost and engine in clips:
                    parts[key].factor = clips[engine].factor
            if not parts[key].take(index, param, grad):
                for clip in clips.values():
                    clip.wait()
                return False
    first = any(part.first for part in parts.values())
    here, later = parts.pop(_HERE, None), sum(part.fresh for part in parts.values())
    for (engine, unit, kind), part in sorted(
        parts.items(), key=lambda item: item[0][0].schedule.order.index(item[0][1])
    ):
        later -= part.fresh
        job = partial(_run, part, step, engine.backend.host, later)
        engine.backend.beside().step(unit, job, streamed=kind is _Streamed)
    if here is not None:
        here.run(step)
    for engine in dict.fromkeys(engine for engine, _, _ in parts) if first else ():
        left = "Some of its units have been stepped on"
        engine.control.together(engine.backend.settle, call="the first optimizer.step", left=left)
    return True


def _run(part: _Part, step: _Step, host: HostLink, later: int) -> None:
    """Steps on a unit's slices in the host's memory.

    Raises:
        ModelError: the states that the first step will make of `later` elements do not fit beside those that it made.
    """
    part.run(step)
    wanted = part.made_bytes * later // max(1, part.fresh) * host.ranks
    if wanted and (free := free_bytes(host.device)) is not None and wanted > free:
        raise ModelError(
            f"{host.ranks} rank(s) of this machine need {wanted / 1e9:.1f} GB more of its memory for the optimizer's "
            f"states, but only {free / 1e9:.1f} GB are free (MemAvailable, memory.max): keep a lower share on the host "
            f"(host[50%]=...), or use more machines"
        )


class _Clip:
    """A clip of gradients in the host's memory that has not been applied. `grads` has their memory at the time, by
    slice; it keeps the slices, since another one could take the id of one that is gone."""

    error = None  # as a ticket that has not failed

    def __init__(self, grads: dict[Tensor, Tensor], factor: Tensor) -> None:
        self.grads, self.factor = grads, factor

    def wait(self) -> None:
        """Multiplies them, for one who looks."""
        grads, self.grads = [*self.grads.values()], {}
        torch._foreach_mul_(grads, self.factor)


def leave_to_step(
    backend: Any, params: Sequence[ShardedParameter], grads: list[Tensor], factor: Tensor
) -> list[Tensor]:
    """Leaves the clip of gradients in the host's memory to the step that reads them, whose kernels multiply in passing.
    Returns the other ones of `grads`, which are those of `params`."""
    there = {cast(Tensor, p.grad): grad for p, grad in zip(params, grads, strict=True) if p.steps_there}
    if {grad.dtype for grad in there.values()} != {torch.float32}:  # in which kernels take a factor
        return grads
    if (
        float(own := factor.to("cpu", torch.float32)) != 1
        and (before := backend.beside().owe(_Clip(there, own))) is not None
    ):
        before.wait()  # of the same model, which has been given twice
    return [grad for param, grad in zip(params, grads, strict=True) if not param.steps_there]


def _clips_of(optimizer: Optimizer) -> dict[Any, _Clip]:
    """By engine: those of just the gradients that the optimizer steps on in the host's memory. Others are done now."""
    there, found = defaultdict[Any, set[Tensor]](set), dict[Any, _Clip]()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, ShardedParameter) and param.steps_there and param.grad is not None:
            there[param.engine()].add(param.grad)
    for engine, grads in there.items():
        if (clip := engine.backend.beside().owe()) is not None and clip.grads.keys() == grads:
            found[engine] = clip
        elif clip is not None:
            clip.wait()
    return found


class _Part:
    """Some parameters of an optimizer, to be stepped on by themselves. This class is for those that lie here.

    `attributes` are the optimizer's own, a GradScaler's numbers among them. `backend` is that of the engine of slices,
    which are all of one `unit`; None for other parameters."""

    factor: Tensor | None = None  # of a clip, that the gradients are still to be multiplied by
    # Whether the step makes a state; elements of parameters that have none before it; bytes of states made for them.
    first, fresh, made_bytes = False, 0, 0

    def __init__(self, optimizer: Optimizer, attributes: Mapping[str, Any], backend: Any, unit: int) -> None:
        self._kind, self._whole, self._attributes = type(optimizer), optimizer.state, attributes
        self._given = optimizer.param_groups
        self._groups: dict[int, dict[str, Any]] = {}
        self._taken: list[tuple[int, Any, Tensor, Tensor]] = []

    @staticmethod
    def number(value: Any) -> Any:
        """An option or a GradScaler's number, as the step takes it."""
        return value

    def group(self, options: dict[str, Any]) -> dict[str, Any]:
        """A group without parameters, as the step takes it."""
        return {key: self.number(value) for key, value in options.items() if key != "params"}

    def take(self, index: int, param: Any, grad: Any) -> bool:
        """A parameter of the group of this index; whether its gradient is of its dtype, as torch wants it."""
        plain = param
        if isinstance(param, ShardedParameter):
            plain, grad = param.local, grad.local
            if grad.dtype != plain.dtype:
                return False
        if index not in self._groups:
            self._groups[index] = self.group(self._given[index])
        self._taken.append((index, param, plain, grad))
        if not dict.__contains__(self._whole, param):
            self.first, self.fresh = True, self.fresh + plain.numel()
        return True

    def run(self, step: _Step) -> None:
        states = [dict.get(self._whole, param) for _, param, _, _ in self._taken]
        taken = zip(self._taken, states, strict=True)
        after = self._stepped(step, [(index, plain, grad, state) for (index, _, plain, grad), state in taken])
        for (_, param, plain, _), before, state in zip(self._taken, states, after, strict=True):
            if state is not None and state is not before:
                dict.__setitem__(self._whole, param, state)
                for value in state.values() if plain is not param else ():
                    if _alike(value, plain):
                        MARKED[value] = param.elements
                        self.made_bytes += value.nbytes

    def _stepped(self, step: _Step, given: Sequence[_Given]) -> list[dict[str, Any] | None]:
        """The states after a step on plain tensors."""
        groups = {index: {**self._groups[index], "params": []} for index, *_ in given}
        own: Any = object.__new__(self._kind)
        vars(own).update(self._attributes, state=defaultdict(dict), param_groups=[*groups.values()])
        for index, plain, grad, state in given:
            plain.grad = grad
            groups[index]["params"].append(plain)
            if state is not None:
                own.state[plain] = state
        step(own)
        return [own.state.get(plain) for _, plain, *_ in given]


class _OnHost(_Part):
    """Slices of a unit in the host's memory, stepped on there."""

    @staticmethod
    def number(value: Any) -> Any:
        """A copy of a number that the device may hold and others may change. It is there on return: torch's kernels
        there would have it copied without waiting, and read at once."""
        return value.to("cpu", copy=True) if isinstance(value, Tensor) else value

    def group(self, options: dict[str, Any]) -> dict[str, Any]:
        group = super().group(options)
        # Not SGD's, which wants momenta of all parameters or of none.
        fused = "momentum" not in group and group.get("fused", False) is group.get("foreach") is None
        return {**group, "fused": True} if fused else group

    def run(self, step: _Step) -> None:
        if self.factor is not None:
            torchs = self._kind.__module__.startswith("torch.optim.")  # others may look at gradients first
            skips = self._attributes.get("found_inf")  # then kernels multiply nothing
            if torchs and not skips and all(group.get("fused") for group in self._groups.values()):
                scale = self._attributes.get("grad_scale")
                scale = float((1 if scale is None else scale) / self.factor)
                # In the gradients' memory: torch copies it there else, and a rehearsal's host would wait for that.
                self._attributes = {**self._attributes, "grad_scale": self._taken[0][3].new_full((), scale)}
            else:
                torch._foreach_mul_([grad for *_, grad in self._taken], self.factor)
        super().run(step)


class _Streamed(_Part):
    """Slices of a unit in the host's memory, stepped on here: whole flat buffers come and go, in pieces."""

    def __init__(self, optimizer: Optimizer, attributes: Mapping[str, Any], backend: Any, unit: int) -> None:
        super().__init__(optimizer, attributes, backend, unit)
        buffers = (buffer for buffer in backend.units[unit].buffers if buffer.placed.streamed)
        self._buffer_of = {id(param): buffer for buffer in buffers for param in buffer.optimizer_params}
        self._states: dict[int, tuple[FlatShards, HostStates]] = {}  # of the taken parameters' buffers, by their id
        self._optimizer, self._link = weakref.ref(optimizer), backend.host

    @staticmethod
    def number(value: Any) -> Any:
        """A copy of a number that others may change before the step."""
        return value.clone() if isinstance(value, Tensor) else value

    def take(self, index: int, param: Any, grad: Any) -> bool:
        if not super().take(index, param, grad):
            return False
        buffer, plain, state = self._buffer_of[id(param)], param.local, dict.get(self._whole, param, {})
        self._states[id(buffer)] = buffer, buffer.states.setdefault(self._optimizer(), {})
        buffer.step_here()
        for key, value in state.items():
            if _alike(value, plain) and (own := self._state(param, plain, key, value)).data_ptr() != value.data_ptr():
                settle(self._whole)  # others' copies may be on their way there
                state[key] = own.copy_(value)
                MARKED[own] = param.elements
        return True

    def run(self, step: _Step) -> None:
        states = [{**dict.get(self._whole, param, {})} for _, param, *_ in self._taken]
        held = {key: [flat for _, flat in states.values()] for key, (_, states) in self._states.items()}
        for key, (buffer, _) in self._states.items():
            for piece in _pieces_of(buffer):
                self._step_on(step, buffer, piece, held[key], states)

    def _step_on(
        self, step: _Step, buffer: FlatShards, piece: slice, held: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> None:
        """Steps on a piece of a state shard: torch's optimizers treat each element by itself. Numbers in a parameter's
        state change once, with its last piece."""
        link, master = self._link, buffer.optimizer_shard[0]
        flats = [master, *held, *([] if buffer.host_grads is None else [buffer.shown])]
        brought: list[tuple[Tensor, Tensor]] = [(flat[piece], link.brought(flat[piece])) for flat in flats]

        def here(value: Tensor) -> Tensor:
            for flat, own in brought:
                if (part := _part(value, flat)) is not None:
                    return own[part]
            brings = value.device != link.device  # a gradient that somebody has assigned
            return cast(Tensor, link.brought(value)) if brings else value

        cut, given = list[tuple[Any, Tensor, slice, bool]](), list[_Given]()
        for (index, param, plain, grad), state in zip(self._taken, states, strict=True):
            if self._buffer_of[id(param)] is not buffer:
                continue
            part = cast(slice, _part(plain, master))
            own = slice(max(piece.start - part.start, 0), min(piece.stop, part.stop) - part.start)
            last = part.stop <= piece.stop
            if own.start < own.stop or plain.numel() == piece.start == 0:  # one without elements has numbers too
                cut.append((param, plain, own, last))
                brings = {
                    key: here(value[own]) if _alike(value, plain) else value if last else self.number(value)
                    for key, value in state.items()
                }
                given.append((index, here(plain[own]), here(grad[own]), brings or None))
        after = self._stepped(step, [(*rest, state and {**state}) for (*rest, state) in given])  # type: ignore[misc]
        unscaled = self._attributes.get("grad_scale") is not None  # in place, by kernels
        for flat, own_flat in brought if unscaled else brought[: 1 + len(held)]:
            link.copy("down", flat, own_flat)
        _show_master(buffer, brought[0][1], piece, link)
        for (param, plain, own, last), (*_, had), found in zip(cut, given, after, strict=True):
            for key, value in (found or {}).items():
                kept = dict.setdefault(self._whole, param, {})
                if not _alike(value, plain[own]):
                    kept[key] = value if last else kept.get(key, value)
                elif had is None or value is not had.get(key):  # made in this step
                    kept[key] = self._state(param, plain, key, value)
                    link.copy("down", kept[key][own], value)
                    MARKED[kept[key]] = param.elements
                    self.made_bytes += value.nbytes

    def _state(self, param: Any, plain: Tensor, key: str, like: Tensor) -> Tensor:
        """The host's memory for a state of a parameter, whose slice is `plain`."""
        buffer, states = self._states[id(self._buffer_of[id(param)])]
        master = buffer.optimizer_shard[0]
        if key not in states:
            arena = HostArena(max(1, num_bytes := master.numel() * like.itemsize), self._link.device)
            states[key] = arena, arena.take(num_bytes, like.dtype)
        return states[key][1][_part(plain, master)]


def bring(buffers: Iterable[FlatShards], host: HostLink | None) -> None:
    """Fills the compute copies of masters that lie on the host and are stepped on here."""
    assert host is not None
    for shards in buffers:
        for piece in _pieces_of(shards):
            _show_master(shards, host.brought(shards.optimizer_shard[0][piece]), piece, host)


def _pieces_of(shards: FlatShards) -> Iterator[slice]:
    """The pieces of a state shard that come to the device one after the other."""
    numel = shards.optimizer_shard[0].numel()
    for start in range(0, max(1, numel), STREAMED_ELEMENTS):
        yield slice(start, min(start + STREAMED_ELEMENTS, numel))


def _show_master(shards: FlatShards, master: Tensor, piece: slice, host: HostLink) -> None:
    """Fills a piece of the compute copy of the state shard from the master's, which is here on the device."""
    compute = inside(shards.params.data, shards.param_range, shards.state_range)[piece]
    if "params" not in shards.placed.on_host_kinds:
        compute.copy_(master)
    elif not shards.master_in_params:  # else it goes down as the master
        host.copy("down", compute, master.to(compute.dtype))


_HERE: tuple[Any, int, type[_Part]] = (None, -1, _Part)


def _alike(value: Any, plain: Tensor) -> bool:
    """Whether it is a state of each element."""
    return type(value) is Tensor and value.shape == plain.shape


def _part(view: Tensor, flat: Tensor) -> slice | None:
    """The elements of a flat tensor that a view shows; None if it is of another one's."""
    if not view.numel():
        return slice(0, 0)
    start = (view.data_ptr() - flat.data_ptr()) // flat.element_size()
    inside = view.dtype == flat.dtype and 0 <= start <= flat.numel() - view.numel()
    return slice(start, start + view.numel()) if inside else None
