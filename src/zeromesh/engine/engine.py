"""What `zm.shard` leaves behind on a model: its shards, and the hooks that run the schedule.

The engine holds dicts of the modules' parameters, never the modules, and the hooks hold the engine weakly: deleting the
model frees everything at once.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeromesh.comm import Ticket
from zeromesh.engine.backend import DeviceBackend, UnitShards
from zeromesh.engine.control import Control
from zeromesh.engine.guard import SlotGuard
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.units import Precision
from zeromesh.engine.weights import StepWeights
from zeromesh.errors import MismatchError, ModelError, OptimizerError
from zeromesh.schedule import GradState, Interpreter, Schedule

_PRIME = 2**31 - 1

T = TypeVar("T")


class Engine:
    """Runs one model's schedule.

    Args:
        schedule: what to do where.
        backend: its shards on this rank, and the lanes.
        control: the ranks of the mesh.
        precision: dtypes.
        model: what was sharded.
        debug: look at what units compute with before and after every use.
    """

    def __init__(
        self,
        schedule: Schedule,
        backend: DeviceBackend,
        control: Control,
        precision: Precision,
        *,
        model: weakref.ref[nn.Module],
        debug: bool = False,
    ) -> None:
        self.backend = backend
        self.model = model
        self.control = control
        self.precision = precision
        self.interpreter: Interpreter[Ticket] = Interpreter(schedule=schedule, backend=backend)
        if debug:
            self.interpreter.backend = SlotGuard(backend, self.interpreter)
        self._weights = StepWeights(backend, control)
        self._task = -1  # autograd's number of the backward that runs
        self._ended: Callable[[], object] = lambda: None  # what it calls at its end, while it lives
        self._ordered = False
        self._depth = [0] * len(schedule.units)
        slots = schedule.memory.gather.slot_of
        self._shares_slot = [slot is not None and slots.count(slot) > 1 for slot in slots]
        self._stale: dict[int, int] = {}
        self._on_leaves: dict[tuple[int, int], RemovableHandle] = {}
        self._torn = False
        self._running = 0
        self._agreed: Ticket | None = None

    @property
    def schedule(self) -> Schedule:
        return self.interpreter.schedule

    @property
    def units(self) -> list[UnitShards]:
        return list(self.backend.units)

    def working_buffers(self) -> list[Tensor]:
        """Slots, staging and workspace."""
        views = [v for unit in self.backend.units for b in unit.buffers for v in (b.full, b.waiting) if v is not None]
        own = {b.params.untyped_storage().data_ptr() for unit in self.backend.units for b in unit.buffers}
        extra = [tensor for s in self.backend.scratch.values() for tensor in (s.staging, s.workspace)]
        return [tensor for tensor in (*views, *extra) if tensor.untyped_storage().data_ptr() not in own]

    def optimizer_params(self) -> Iterator[ShardedParameter]:
        """Every parameter of the model, in the order of units."""
        for unit in self.backend.units:
            for buffer in unit.buffers:
                yield from buffer.optimizer_params

    def added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters, by name, that came into the model after it was sharded."""
        model = self.model()
        for name, param in () if model is None else model.named_parameters():
            own = isinstance(param, ShardedParameter) or hasattr(param, "_zeromesh_leaf")
            if param.requires_grad and not own:
                yield name, param

    def require_own(self) -> None:
        """Raises ModelError for parameters that `added` finds: whoever saves the model would leave them out."""
        for name, _ in self.added():
            raise ModelError(
                f"{name} came into the model after zm.shard, which knows nothing of it, so it would not be saved: "
                f"change the model first, then shard it"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        raise ModelError(
            "a sharded model cannot be copied: its shards belong to one set of ranks; copy it before zm.shard"
        )

    # ---- points, from the hooks

    def pre_forward(self, unit: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._enter_backward()
        elif unit == 0 and self._running and not self._calls_itself():
            self._end_interrupted()
        self.recover()
        self._depth[unit] += 1
        self._running += 1
        self.interpreter.pre_forward(unit)

    def post_forward(self, unit: int, outputs: Iterable[Tensor] | None) -> None:
        """After a unit's forward; makes its outputs' gradients call `pre_backward`. None: not those of this module."""
        self._depth[unit] -= 1
        self._running -= 1
        try:
            if self._depth[unit] == 0:  # else it was a module of the unit that another one of it calls
                self._post_forward(unit, outputs)
        finally:
            if self._running == 0:
                self.interpreter.leave()

    def _post_forward(self, unit: int, outputs: Iterable[Tensor] | None) -> None:
        if outputs is None:
            self.interpreter.post_forward(unit, backward=torch.is_grad_enabled())
            return
        outputs = list(outputs)
        try:
            if outputs:  # else it may have raised, and that error is the one to be seen
                self.backend.require_in_place(unit)
            if self._shares_slot[unit]:
                self._require_outside(unit, outputs)
        except ModelError:
            self.interpreter.post_forward(unit, backward=False)
            if unit == 0:
                self.interpreter.end_forward(backward=False)
            raise
        # Of a recomputation too: reentrant checkpointing runs a backward of its own from there, and a segment longer
        # than the slots then has to gather its first units again. (Otherwise these hooks are never reached.)
        tensors = [t for t in outputs if t.requires_grad] if torch.is_grad_enabled() else []
        if tensors:
            hook = _OutputHook(weakref.ref(self), unit, self.interpreter.states[unit].generation)
            for tensor in tensors:
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it so
                # A unit that hands on what it was given has its output in common with the one before, and begins first.
                _put_first(tensor._backward_hooks or {}, handle.id)
                if tensor.grad_fn is None:  # a leaf outlives the graph, and so would the hook
                    self._replace_hook((unit, id(tensor)), handle)
        self.interpreter.post_forward(unit, backward=bool(tensors))
        if unit == 0:
            self.interpreter.end_forward(backward=bool(tensors))

    def _require_outside(self, unit: int, outputs: Iterable[Tensor]) -> None:
        """What is returned outlives the unit's turn in its slot."""
        slots = {buffer.full.untyped_storage().data_ptr() for buffer in self.backend.units[unit].buffers}
        if any(_storage(tensor) in slots for tensor in outputs):
            raise ModelError(
                f"unit {self.backend.units[unit].name!r} returns a parameter of its own, or a view of one, in memory "
                f"that other units' parameters will use: return a clone, or name the unit in zm.shard(resident=[...])"
            )

    def _replace_hook(self, key: tuple[int, int], handle: RemovableHandle) -> None:
        before = self._on_leaves.pop(key, None)
        if before is not None:
            before.remove()
        self._on_leaves[key] = handle

    def pre_backward(self, unit: int, generation: int) -> None:
        """The gradient has arrived of an output of `unit`, computed when its parameters were of `generation`."""
        # Gradient mode is on in a backward under create_graph=True alone.
        if torch.is_grad_enabled() and self.schedule.memory.gather.slot_of[unit] is not None:
            raise ModelError(
                f"a backward with create_graph=True through unit {self.backend.units[unit].name or '(root)'!r}: second "
                f"derivatives need parameters that stay gathered: use stages 0, 1 and 2 only"
            )
        self._enter_backward()
        if generation != self.interpreter.states[unit].generation:
            self._stale[unit] = min(generation, self._stale.get(unit, generation))
        self.interpreter.pre_backward(unit)

    def _require_unchanged(self, unit: int, index: int, position: int) -> None:
        """What autograd checks of tensors that it has saved, and cannot of views into buffers that are used again."""
        param = self.backend.units[unit].buffers[index].optimizer_params[position]
        if param.changed > self._stale[unit]:
            raise ModelError(
                f"{param.full_name} has changed since the forward whose backward runs now: run that before the "
                f"optimizer's step (or load, or zm.refresh), or run the forward again"
            )

    def grad_ready(self, unit: int, index: int, position: int) -> None:
        """Autograd has accumulated a leaf's gradient."""
        if self._task == -1:
            self._enter_backward()
        if unit in self._stale:
            self._require_unchanged(unit, index, position)
        if self._shares_slot[unit] and not self.interpreter.states[unit].in_use:
            raise ModelError(
                f"the backward of unit {self.backend.units[unit].name!r} began unseen, and so may have used another "
                f"unit's parameters: its forward must return tensors, or tuples, lists, mappings or dataclasses of them"
            )
        shards = self.backend.units[unit]
        if shards.target is None:  # settled at the unit's first gradient, unless its slot is still another's
            shards.collect_in(self.interpreter.begin_grads(unit))
        self.backend.collect(shards, index, position)
        shards.fires_again |= (index, position) in shards.fired
        shards.fired.add((index, position))
        # The rest of a unit's backward may use frozen parameters, and one whose gradient comes with each of several
        # reentrant checkpoints may have another: these have ended when an earlier unit begins.
        if len(shards.fired) == shards.num_leaves and not (shards.has_frozen or shards.fires_again):
            self.interpreter.post_backward(unit)

    def _enter_backward(self) -> None:
        """Once per backward: autograd tells when it has ended."""
        if self._task not in (-1, torch._C._current_graph_task_id()) and self._ended() is None:
            self._give_up_backward()  # else this one runs inside it
        if self._task == -1:
            self._require_whole_sums()
            self._weights.require_open()
            self._task = torch._C._current_graph_task_id()
            self._weights.begin_backward(last=self.interpreter.last)
            self.interpreter.begin_backward()
            shown = any(state.grad is GradState.REDUCED for state in self.interpreter.states)
            self._weights.require_weighable(last=self.interpreter.last, shown=shown)
            engine = weakref.ref(self)

            def ended() -> None:
                self = engine()
                if self is not None:
                    self._end_backward()

            self._ended = weakref.ref(ended)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _require_whole_sums(self) -> None:
        if self._torn:
            raise ModelError(
                "a backward raised and left part of its micro-batch in gradients that are being accumulated: drop them "
                "with zm.zero_grad(model), and begin the step again"
            )

    def recover(self) -> None:
        """After a backward that raised, and whose callback therefore never came: nothing is in use any more."""
        if self._task != -1 and torch._C._current_graph_task_id() == -1:
            self._give_up_backward()

    def _give_up_backward(self) -> None:
        self._task = -1
        self._abort()
        # A part of the micro-batch that raised is in sums that hold others.
        self._torn = any(state.grad is GradState.PARTIAL for state in self.interpreter.states)

    def _calls_itself(self) -> bool:
        """Whether a forward of the model is on the stack beside the one that begins."""
        model, calls = self.model(), 0
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        return calls > 1

    def _end_interrupted(self) -> None:
        """Where a forward was interrupted (Ctrl-C), which calls no hooks, not even those for exceptions."""
        if self._running:
            self._depth, self._running = [0] * len(self._depth), 0
            self._abort()

    def _abort(self) -> None:
        self._stale.clear()
        self.interpreter.abort()
        for unit, state in zip(self.backend.units, self.interpreter.states, strict=True):
            unit.abort()
            if state.grad is GradState.EMPTY:
                unit.rejected()
                unit.forget()  # what its accumulator has taken in of the backward that raised

    def _end_backward(self) -> None:
        self._task = -1
        self._weights.count_backward()
        self._stale.clear()
        self.interpreter.end_backward()
        if self.interpreter.last:
            self._weights.end_step()
            self._show_grads()

    # ---- accumulation

    @contextmanager
    def accumulate(self, last: bool, weight: float | None) -> Iterator[None]:
        """The micro-batch inside is (not) the last before the step; its gradient counts `weight` times."""
        interpreter, backend = self.interpreter, self.backend
        self.recover()
        self._require_whole_sums()
        partial = any(state.grad is GradState.PARTIAL for state in interpreter.states)
        weight = self._weights.open(weight, partial=partial)
        before = interpreter.last, backend.weight
        interpreter.last, backend.weight = last, weight
        try:
            yield
        except BaseException:
            self._weights.give_up()
            raise
        finally:
            interpreter.last, backend.weight = before
        self._weights.close()

    # ---- gradients

    def _show_grads(self) -> None:
        """Every rank agrees on which parameters had gradients, and shows those as `.grad`."""
        used = [flag for unit in self.backend.units for flags in unit.used for flag in flags]
        if self._ordered and not self.schedule.shards_params:
            self._assign(self._agree_beside(used))
            return
        order = zlib.crc32(repr(self.interpreter.seen).encode()) % _PRIME
        calls = self.interpreter.digest % _PRIME
        words = [*map(int, used), order, -order, calls, -calls]
        *flags, high_order, low_order, high_calls, low_calls = self.control.agree(words)
        self._learn_order(high_order == -low_order, high_calls == -low_calls)
        self._assign(flags)

    def _agree_beside(self, used: list[bool]) -> list[bool]:
        """Which parameters any rank has used. A rank that has used all knows, and does not wait for what the others
        say, where nothing else is to be compared: no gathers, and an order that all have learnt."""
        self.interpreter.digest = 0
        if self.control.group is None:
            return used
        if self._agreed is not None:
            self._agreed.wait()  # the last step's, long done; its words must live so long
        words = self.control.words(used, torch.int32)
        self._agreed = self.backend.agree(words)
        if all(used):
            return used
        self._agreed.wait()
        return [bool(word) for word in words.tolist()]

    def _learn_order(self, same_order: bool, same_gathers: bool) -> None:
        if self.schedule.shards_params and not (same_order and same_gathers):
            names = [self.backend.units[unit].name or "(root)" for unit in self.interpreter.seen]
            raise MismatchError(
                "all ranks must call the units in the same order while parameters are sharded; this step they did not: "
                f"on rank {self.control.rank} the order was {', '.join(names)}. Gradients of this step are not valid. "
                "Run every unit on every rank (on dummy data if need be), or shard no parameters (stages 0, 1, 2)"
            )
        if not self._ordered and same_order:
            self._ordered = True
            unseen = [unit for unit in self.schedule.order if unit not in self.interpreter.seen]
            self.interpreter.adopt([*self.interpreter.seen, *unseen])
        self.interpreter.digest = 0

    def _assign(self, flags: Sequence[int]) -> None:
        left = iter(flags)
        for unit in self.backend.units:
            unseen = True
            for buffer in (buffer for buffer in unit.buffers if buffer.spec.trainable):
                for param, grad in zip(buffer.optimizer_params, buffer.optimizer_grads, strict=True):
                    _require_own(param, grad)
                    grad.zeroed = False
                    used = next(left)
                    # As in plain torch, a gradient that was zeroed and not dropped stays, of zeros if it is not used.
                    param.grad = grad if used or param.grad is not None else None
                    unseen = unseen and not used
            if unseen:  # by any rank: no gradient is thrown away with what was sent, so what is still owed stays
                unit.accepted = True

    def discard_grads(self, *, set_to_none: bool = True) -> None:
        """Forgets all gradients, partial sums included."""
        self.recover()
        self.interpreter.discard_grads()
        self._weights.discard()
        self._torn = False
        for param in self.optimizer_params():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        for unit in self.backend.units:
            unit.rejected()
            unit.forget()

    # ---- optimizers

    def before_step(self, params: Sequence[ShardedParameter]) -> None:
        """Masters are about to change: nothing may still read them, and no partial sum may be left out."""
        self.recover()
        for unit in {param.unit for param in params}:
            if self.interpreter.states[unit].grad is GradState.PARTIAL:
                name = self.backend.units[unit].name
                raise OptimizerError(
                    f"unit {name!r} holds gradients of micro-batches that were not reduced: run "
                    f"the last backward before the step under zm.accumulate(model, last=True), or outside zm.accumulate"
                )
        self.interpreter.quiesce()

    def require_gradients(self, params: Sequence[ShardedParameter]) -> None:
        """Raises OptimizerError where a step of `params`, which have none, comes between a forward and its backward."""
        if any(self.interpreter.states[param.unit].calls for param in params):
            raise OptimizerError(
                f"no parameter of the optimizer has a gradient ({params[0].full_name}, say), though a forward of the "
                f"model waits for its backward: run that, without inputs=, since autograd does not know the parameters "
                f"that a sharded model shows; or run such a forward under torch.no_grad()"
            )

    def stepped(self, params: Sequence[ShardedParameter]) -> None:
        """An optimizer has changed `params`."""
        self.interpreter.stepped({param.unit for param in params})
        for unit in {param.unit for param in params}:
            self.backend.units[unit].accepted = True
        for param in params:
            param.changed = self.interpreter.states[param.unit].generation

    def settle(self) -> None:
        """Ends what was interrupted, and waits for what is under way: every module then shows this rank's slices."""
        self._end_interrupted()
        self.recover()
        self.interpreter.quiesce()

    def changed(self) -> None:
        """Masters were changed by hand or by a load."""
        self.settle()
        for unit in self.backend.units:
            unit.forget_owed()
        self.stepped(list(self.optimizer_params()))


def _storage(tensor: Tensor) -> int:
    """The address of what a tensor is a view of; 0 of one that has no memory of its own kind."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones, subclasses, those of torch.func
        return 0


def _require_own(param: ShardedParameter, grad: Tensor) -> None:
    """Plain PyTorch would add to what the user has put in `.grad`."""
    held = param.grad
    if held is not None and held is not grad and not held.zeroed and bool(held.local.any()):  # type: ignore[attr-defined]
        raise ModelError(
            f"{param.full_name}.grad was set by hand before this backward, which would replace it: set it after the "
            f"last backward, or add it to what `.grad` is then"
        )


def _put_first(entries: dict[int, T], key: int) -> None:
    """By taking the others out: autograd reads an ordered dict as a plain one, which `move_to_end` leaves as it is."""
    for other in [other for other in entries if other != key]:
        entries[other] = entries.pop(other)


@dataclass(slots=True)
class _OutputHook:
    """On each output of one call of a unit: reports the first gradient that arrives in a backward."""

    engine: weakref.ref[Engine]
    unit: int
    generation: int
    task: int = -1

    def __call__(self, grad: Tensor) -> None:
        engine, task = self.engine(), torch._C._current_graph_task_id()
        if engine is not None and task != self.task:
            self.task = task
            engine.pre_backward(self.unit, self.generation)
