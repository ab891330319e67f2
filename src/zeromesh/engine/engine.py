"""The engine that `zm.shard` attaches to a model: its shards, and the hooks that run the schedule.

The engine holds dicts of the modules' parameters, never the modules, and the hooks hold the engine weakly: deleting the
model frees everything at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from zeromesh.comm.lane import Ticket
from zeromesh.engine.backend import DeviceBackend, UnitShards
from zeromesh.engine.calls import OutputHook, as_python, tensors_of
from zeromesh.engine.control import reduce_over
from zeromesh.engine.elements import Agree, Home
from zeromesh.engine.leaf import Leaf
from zeromesh.engine.lifecycle import Agreement, Changes, Step, Weight
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.units import Precision
from zeromesh.errors import ModelError, OptimizerError
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.state import Backward, Call, Forward, GradState
from zeromesh.strategy import Axis

if TYPE_CHECKING:
    from zeromesh.schedule.bucket import Bucket


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """State shared by the engines of one rank's pipeline stages."""

    group: dist.ProcessGroup  # the ranks that have the other stages, one of each place on the stages' own meshes
    stages: dict[int, weakref.ref[Engine]]  # this rank's, by index
    norm_dtype: torch.dtype  # of joint norms: the widest of all stages' gradients, also where a stage has none
    idle: tuple[int, ...]  # ranks of the group whose stages are all frozen

    def agree_max(self, values: Tensor) -> None:
        """Replaces `values` by their maximum over all stages."""
        if self.idle:
            raise OptimizerError(
                f"a GradScaler needs a gradient on each rank of a pipeline, but all stages of rank "
                f"{', '.join(map(str, self.idle))} of the pipeline's group are frozen: cut the model into other stages"
            )
        reduce_over(self.group, values, dist.ReduceOp.MAX)


class Engine:
    """Runs one model's schedule."""

    def __init__(
        self,
        schedule: Schedule,
        backend: DeviceBackend,  # its shards on this rank, and the lanes
        homes: Mapping[str, Home],  # where each layout is, the model's under ""
        precision: Precision,
        *,
        model: weakref.ref[nn.Module],
        debug: bool = False,  # compare the parameters of units before and after every use
    ) -> None:
        self.backend = backend
        self.whole: Any = None  # steps on whole tensors, which one that raised may leave under way: `zeromesh.owners`
        self.model = model
        self.called = weakref.WeakSet[nn.Module]()  # modules with hooks: their forwards are calls of units
        self.homes = homes
        self.control = homes[""].control
        self.precision = precision
        if debug:
            from zeromesh.engine.guard import SlotGuard  # slow, and asked for by name

            guard = SlotGuard(backend)
            self.interpreter: Interpreter[Ticket] = Interpreter(schedule=schedule, backend=guard)
            guard.follow(self.interpreter)
        else:
            self.interpreter = Interpreter(schedule=schedule, backend=backend)
        self.last = True  # whether the optimizer steps after the running micro-batch
        self.weight = Weight(None)  # of the running micro-batch
        self._step = Step.SHOWN
        self._weighted: bool | None = None  # whether this step's micro-batches have weights; None before the first
        self._halves: list[Backward] | None = None  # where backwards for inputs only are listed, while one may run
        self.pipeline: Pipeline | None = None  # that the model is a stage of
        self.changes = Changes(self.interpreter, backend.units)
        # Must stay the last attribute that refers to the lanes: attributes go in order, and the lanes must end before
        # the words do that they may still be at work on.
        self._agreement = Agreement(self.interpreter, backend, self.control)
        # Hooks on outputs that are leaves, by unit and id of the leaf: they must go when their forward is over.
        self._on_leaves: dict[tuple[int, int], tuple[weakref.ref[Forward], RemovableHandle]] = {}
        self._watched: set[int] = set()  # units that announce a backward by gradients of their own parameters
        self._outside: set[ShardedParameter] = set()  # last read outside of any autograd.Function

    @property
    def schedule(self) -> Schedule:
        return self.interpreter.schedule

    @property
    def units(self) -> list[UnitShards]:
        return list(self.backend.units)

    def optimizer_params(self) -> Iterator[ShardedParameter]:
        for unit in self.backend.units:
            for buffer in unit.buffers:
                yield from buffer.optimizer_params

    def added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters, by name, that were added to the model after it was sharded."""
        model = self.model()
        for name, param in () if model is None else model.named_parameters():
            if param.requires_grad and not isinstance(param, ShardedParameter | Leaf):
                yield name, param

    def require_one_of_a_name(self) -> None:
        """As `zeromesh.engine.parts` has it."""
        if len(self.homes) > 1:
            from zeromesh.engine.parts import require_one_of_a_name  # of parts=

            require_one_of_a_name(self.homes)

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        raise ModelError(
            "a sharded model cannot be copied: its shards belong to one set of ranks; copy it before zm.shard"
        )

    # ---- points, from the hooks

    def pre_forward(self, unit: int, *, read: bool = False) -> None:
        """Before a unit's forward; `read`: see there."""
        if torch._C._current_graph_task_id() != -1:
            self._enter_backward()
        else:
            self._recover()
            if (work := self.backend.work) is not None and work.away:
                work.require_here()
            self.changes.apply()
        self.interpreter.pre_forward(unit, read=read)

    def post_forward(self, unit: int, outputs: Iterable[Tensor] | None) -> None:
        """After a unit's forward; makes its outputs' gradients call `pre_backward`. None: it has raised."""
        outputs = None if outputs is None else list(outputs)
        forward = self.interpreter.forward
        reads = forward.reads_until(unit) if forward is not None else iter(())
        try:
            for each in reads:
                self.post_forward(each, outputs)
            if outputs:
                self.backend.require_usable(unit, outputs)
            if outputs is not None and self.interpreter.forward is not None:
                self.backend.require_in_place(unit, outermost=len(self.interpreter.forward.running) == 1)
        except ModelError:
            for each in (*reads, unit):
                self.interpreter.post_forward(each, backward=False)
            raise
        # In a recomputation too: reentrant checkpointing runs a backward of its own there, and a segment longer than
        # the slots then has to gather its first units again. (Otherwise these hooks are never reached.)
        traced = torch.is_grad_enabled() and outputs is not None
        tensors = [each for t in outputs or () for each in _announcing(t)] if traced else []
        hidden = traced and not outputs and self.schedule.units[unit].trainable
        untraced = outputs is not None and not traced and _in_function()
        call = self.interpreter.post_forward(unit, backward=bool(tensors), hidden=hidden, untraced=untraced)
        if self.interpreter.forward is None:
            self.backend.launch()
        if call is not None:
            self._watch_outputs(call, tensors)
        elif traced and unit not in self._watched:
            self._watch_leaves(unit)

    def runs(self) -> bool:
        """Whether a forward of the model or of a unit runs, or one is repeated in the backward: on all ranks alike."""
        if self.interpreter.backward is not None and torch._C._current_graph_task_id() != -1:
            return True
        if self.interpreter.forward is not None:
            self._recover()  # of a repetition in a backward that raised
        return self.interpreter.forward is not None

    def read(self, param: ShardedParameter) -> Tensor:
        """A parameter as a forward finds it in a module of a unit that is not open: [Note: Reads] of
        `zeromesh.engine.hooks`."""
        if self.schedule.shares_slot(param.unit):
            (self._outside.discard if _in_function() else self._outside.add)(param)
            return param
        if self.interpreter.forward is None or not self.runs():
            return param
        self.pre_forward(param.unit, read=True)
        return self.backend.units[param.unit].leaf_of[param]

    def on_demand(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `function` with whole parameters in the place of their slices, as a call of their units."""
        units = dict[int, None]()

        def leaf(param: ShardedParameter) -> Tensor:
            if param.engine() is not self:
                return param
            if param.unit not in units:
                self._require_traced(param)
                units[param.unit] = None
                self.pre_forward(param.unit)
            found: Tensor = self.backend.units[param.unit].leaf_of[param]
            return found

        def outlasting(tensor: Tensor) -> Tensor:
            """Views into a slot do not outlast this call."""
            return tensor.clone() if any(self.backend.in_shared_slot(unit, tensor) for unit in units) else tensor

        outputs: list[Tensor] | None = None
        try:
            args, kwargs = tree_map_only(ShardedParameter, leaf, (args, kwargs))
            result = tree_map_only(Tensor, outlasting, function(*args, **kwargs))
            outputs = list(tensors_of(result))
        finally:
            for unit in reversed(units):
                self.post_forward(unit, outputs)
        return result

    def _require_traced(self, param: ShardedParameter) -> None:
        """Raises ModelError where an autograd.Function computes with a slice that was read before it: autograd would
        send the gradient to the slice."""
        if param.requires_grad and param in self._outside and _in_function():
            raise ModelError(
                f"an autograd.Function is given {param.full_name}, whose unit shares its gather slot with others and "
                f"is not open here: give that unit a slot of its own, zm.shard(resident=[...]), or name in "
                f"zm.shard(units=[...]) a class around both the parameter and the forward that uses it"
            )

    def _watch_outputs(self, call: Call, tensors: Iterable[Tensor]) -> None:
        hook = OutputHook(weakref.ref(self), call)
        for tensor in tensors:
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it so
            # A unit that hands on its input has its output in common with the unit before, and its backward begins
            # first. Autograd reads an ordered dict as a plain one, so the others are taken out, and put behind it.
            hooks = tensor._backward_hooks or {}
            for other in [other for other in hooks if other != handle.id]:
                hooks[other] = hooks.pop(other)
            if tensor.grad_fn is None:  # a leaf outlives the graph, and so would the hook
                before = self._on_leaves.pop((call.unit, id(tensor)), None)
                if before is not None:
                    before[1].remove()
                self._on_leaves[call.unit, id(tensor)] = weakref.ref(call.forward), handle

    def _unhook_leaves(self) -> None:
        """Removes hooks of forwards that are over, so that gradients of other forwards do not call them."""
        for key, (forward, handle) in list(self._on_leaves.items()):
            if (found := forward()) is None or found.over:
                handle.remove()
                del self._on_leaves[key]

    def _watch_leaves(self, unit: int) -> None:
        """Watches the gradients of a unit's own parameters, if none of its outputs announces its backward."""
        arrived = self._weakly(Engine._enter_backward)
        self._watched.add(unit)
        for leaf in [leaf for buffer in self.backend.units[unit].trained for leaf in buffer.leaves]:
            with torch._C.DisableTorchFunctionSubclass():  # it may be closed by now
                leaf.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]  # torch leaves it so

    def pre_backward(self, call: Call) -> None:
        """The gradient has arrived of an output of `call`."""
        unit = call.unit
        running = self.interpreter.backward
        if running is not None and running.task == -1:
            return  # `run_weights` knows where it is
        # Gradient mode is on in a backward under create_graph=True alone. Hooks do not see the next after torch.func's.
        slot = self.schedule.memory.gather.slot_of[unit]
        if torch.is_grad_enabled() and (slot is not None or torch._C._functorch.peek_interpreter_stack() is not None):
            raise ModelError(
                f"a backward with create_graph=True through unit {self.backend.units[unit].name or '(root)'!r}: second "
                f"derivatives need gathered parameters, so stages 0, 1 and 2 only, of the host too, and no torch.func"
            )
        if torch.is_grad_enabled() and unit not in self._watched:
            self._watch_leaves(unit)  # a loss of derivatives alone may not depend on any output
        self._enter_backward()
        self.interpreter.pre_backward(call)
        if self._halves is None:
            self._add_in_place(unit)

    def _add_in_place(self, unit: int) -> None:
        running = self.interpreter.backward
        assert running is not None
        plain = running.scale is None and unit not in running.stale and not torch.is_grad_enabled()  # else sums are new
        if plain and self.interpreter.states[unit].grad is GradState.PARTIAL:
            self.backend.add_in_place(unit)

    def _enter_backward(self) -> None:
        """In the backward that runs; once in each, autograd is asked to tell when it has ended."""
        backward, task = self.interpreter.backward, torch._C._current_graph_task_id()
        if backward is not None and (backward.task == task or backward.ended() is not None):
            return  # in the second case this one runs inside it
        if backward is not None:
            self.fail()
        if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
            raise ModelError("compiled autograd does not tell when a backward ends: leave it off, and compile blocks")
        ended = self._weakly(Engine._end_backward)
        self._begin_backward(self._backward(task, weakref.ref(ended)))
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _weakly(self, method: Callable[[Engine], None]) -> Callable[..., None]:
        """A function for autograd to call, which does not keep the engine."""
        engine = weakref.ref(self)

        @as_python
        def called(*_: Tensor) -> None:
            if (found := engine()) is not None:
                method(found)

        return called

    def _backward(self, task: int, ended: Callable[[], object], **half: Any) -> Backward:
        inputs_only = self._halves is not None
        retains = task != -1 and torch._C._autograd._get_current_graph_task_keep_graph()
        return Backward(task, ended, self.last, self.weight.of_grads, inputs_only=inputs_only, retains=retains, **half)

    def _begin_backward(self, running: Backward) -> None:
        self.changes.apply()
        self._require_whole()
        if not running.inputs_only:  # else nothing comes to the step yet
            weighted = self.weight.scale is not None
            if weighted and not self.weight.in_loss and len(self.homes) > 1:
                from zeromesh.engine.parts import require_own_tokens  # of parts=

                require_own_tokens(self.homes)
            if self._step is Step.SHOWN:
                self.backend.settle()  # it is still at the gradients whose memory the next ones take
                self._begin_step()
            if self._weighted not in (None, weighted):
                raise ModelError(
                    "either every micro-batch of a step has a weight or none, and its backward runs inside its "
                    "zm.accumulate(model, weight=...); this step has some with and some without"
                )
            self._weighted = weighted
        self.interpreter.begin_backward(running)

    def _end_backward(self) -> None:
        backward = self.interpreter.begin_backward()
        self.interpreter.end_backward()
        self._unhook_leaves()
        self.backend.drop_leaf_grads(added=True)
        if self._halves is not None:
            self._halves.append(backward)
            return
        self._step = Step.HELD
        if backward.last:
            self._show_grads()

    # ---- pipelines

    def agree_max(self, values: Tensor) -> Agree | None:
        """Replaces `values` by their maximum over the model's ranks; returns the agreement over all stages."""
        self.control.reduce_all(values, dist.ReduceOp.MAX)
        return None if self.pipeline is None else self.pipeline.agree_max

    def join(self, pipeline: Pipeline) -> None:
        """The model is a stage of one."""
        self.pipeline = pipeline

    @contextmanager
    def inputs_only(self) -> Iterator[list[Backward]]:
        """The backward inside asks for the gradients of inputs alone; yields a list for `run_weights`."""
        self._halves = halves = list[Backward]()
        try:
            yield halves
        finally:
            self._halves = None

    def run_weights(self, halves: Sequence[Backward], bring: Callable[[int], None]) -> None:
        """The backward for the gradients of parameters that those for inputs, `halves`, have left out. `bring` leaves
        the gradients of a unit, whose parameters are there, on its leaves; of -1, all others."""
        self._recover()

        def bring_of(unit: int) -> None:
            self._add_in_place(unit)
            bring(unit)

        forwards, stale = list[Forward](), dict[int, int]()
        for half in halves:
            forwards += half.reached
            stale.update(half.stale)
        # It has not ended while it runs, so backwards that `bring` starts run inside of it.
        self._begin_backward(self._backward(-1, lambda: True, stale=stale, bring=bring_of))
        try:
            self.interpreter.back_through(forwards)
            bring(-1)
        except BaseException:
            self.fail()
            raise
        self._end_backward()

    # ---- endings: [Note: Lifetimes]

    def _begin_step(self) -> None:
        """Gradients that are still shown are set aside, to be added to the next."""
        self._step, self._weighted = Step.BEGUN, None
        self.interpreter.begin_step()
        for unit in self.backend.units:
            unit.begin_step()

    def _require_whole(self) -> None:
        if self._step is Step.TORN:
            raise ModelError(
                "a backward raised and left part of its micro-batch in gradients that are being accumulated: drop them "
                "with zm.zero_grad(model), and begin the step again"
            )

    def fail(self) -> None:
        """The running forward or backward has not ended and will not."""
        backward = self.interpreter.backward
        self.interpreter.abort()
        self.backend.drop_leaf_grads()
        if backward is not None and self._step is not Step.SHOWN:
            self._step = Step.SHOWN if self._step is Step.BEGUN else Step.TORN  # sums of others are whole no more

    def _recover(self) -> None:
        """After a backward that raised, and whose callback therefore never came."""
        if self.interpreter.backward is not None and torch._C._current_graph_task_id() == -1:
            self.fail()

    # ---- accumulation

    @contextmanager
    def accumulate(self, last: bool, weight: Weight) -> Iterator[Weight]:
        """The micro-batch inside is (not) the last before the step, and counts by `weight`."""
        self._recover()
        self._require_whole()
        before = self.last, self.weight
        self.last, self.weight = last, weight
        try:
            yield weight
        finally:
            self.last, self.weight = before

    # ---- gradients

    def _show_grads(self) -> None:
        self.changes.began()
        self.backend.land()
        left = iter(self._agreement.used())
        self._step = Step.SHOWN  # parameters no longer show zeros in the place of sums
        for unit, state in zip(self.backend.units, self.interpreter.states, strict=True):
            unit.show_grads(left, reduced=state.grad is GradState.REDUCED)
        if self.backend.work is not None:
            self.backend.work.show_norms()

    def require_stepped(self, call: str) -> None:
        shown = any(param.grad is not None for param in self.optimizer_params())
        if shown or self._step is not Step.SHOWN or self.interpreter.forward is not None:
            raise ModelError(f"{call} between a forward and the step after it: step first, and drop the gradients")

    @property
    def holds_sums(self) -> bool:
        """Whether gradients of micro-batches are summed that `.grad` does not show yet."""
        return self._step in (Step.HELD, Step.TORN)

    def forget_sum(self, param: ShardedParameter, *, zeros: bool = False) -> None:
        """A parameter's gradient was dropped, or made `zeros`: the sum that it does not show yet goes too."""
        if self.interpreter.states[param.unit].grad is GradState.PARTIAL:
            self.interpreter.quiesce()
            self.backend.land()
            self.backend.units[param.unit].forget_sum(param, zeros=zeros)

    def discard_grads(self) -> None:
        """Forgets all gradients, partial sums included."""
        self._recover()
        self.interpreter.begin_step()  # before anything is written where a lane may be at work
        self.backend.land()
        for param in self.optimizer_params():
            param.grad = None
        self._begin_step()
        self._step = Step.SHOWN

    # ---- optimizers

    def own(self, buckets: Sequence[Bucket], beyond: Sequence[Axis], whole: Any) -> int:
        """Adds an optimizer's buckets of whole tensors to the schedule, and returns its number there. They also cross
        the axes `beyond`. `whole` runs the steps of all such optimizers."""
        self.whole = whole
        self.interpreter.adopt(self.schedule.with_owned(buckets, beyond))
        return len(self.schedule.buckets) - 1

    def before_step(self, params: Sequence[ShardedParameter]) -> None:
        """Masters are about to change: nothing may still read them, and no partial sum may be left out."""
        work = self.backend.work
        clip = None if work is None else work.owe()
        try:
            self.at_rest()
        finally:
            if work is not None:
                work.owe(clip)
        self._require_whole()
        for unit in {param.unit for param in params}:
            name = self.backend.units[unit].name
            if self.backend.has_grads(unit):
                raise OptimizerError(
                    f"gradients reached unit {name!r} in a backward that zeromesh did not see: its forward must return "
                    f"the tensors that get gradients, also inside lists, dicts and dataclasses"
                )
            if self.interpreter.states[unit].grad is GradState.PARTIAL:
                raise OptimizerError(
                    f"unit {name!r} holds gradients of micro-batches that were not reduced: run "
                    f"the last backward before the step under zm.accumulate(model, last=True), or outside zm.accumulate"
                )

    def require_gradients(self, params: Sequence[ShardedParameter]) -> None:
        """Raises OptimizerError where a step of `params`, which have none, comes between a forward and its backward."""
        if not self.interpreter.awaited.isdisjoint(param.unit for param in params):
            raise OptimizerError(
                f"no parameter of the optimizer has a gradient ({params[0].full_name}, say), though a forward of the "
                f"model waits for its backward: run that, without inputs=, since autograd does not know the parameters "
                f"that a sharded model shows; or run such a forward under torch.no_grad()"
            )

    def changing(self, param: ShardedParameter) -> None:
        """A function is about to write to `param`, in an optimizer's step or without one."""
        if not self.changes.by_hand:  # else nothing has begun to read masters since
            self.at_rest()
            if self.interpreter.forward is not None or self.interpreter.backward is not None:
                raise ModelError(
                    f"{param.full_name} is written to inside a forward or backward of its model, which computes with a "
                    f"copy of it: change parameters between steps"
                )
        self.changes.by_hand.add(param)

    def at_rest(self, *, follow: bool = False) -> None:
        """Ends an interrupted forward or backward, and waits for all traffic: modules then show this rank's slices.
        With `follow` it first brings copies up to date with their masters; all ranks then call it together."""
        self._recover()
        if follow:
            self.changes.apply()
            self.interpreter.catch_up()
        self.interpreter.quiesce()
        self.backend.land()
        self.backend.settle()
        if self.whole is not None:
            self.whole.settle()

    def changed(self) -> None:
        """Masters were changed by hand or by a load; all ranks call this together."""
        self.at_rest()
        self.changes.loaded(list(self.optimizer_params()))


def _in_function() -> bool:
    """Whether the forward of an autograd.Function runs: torch then does without forward mode too, also where that
    computes under `enable_grad`."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _announcing(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors whose gradients announce a backward through `tensor`: itself, those that `torch.func` wraps in
    it, and tangents. A wrapper of `torch.vmap` itself requires no gradient."""
    for layer in _layers(tensor):
        if layer.requires_grad:
            yield layer
        if forward_ad._current_level >= 0 and not torch._C._functorch.is_batchedtensor(layer):
            tangent = forward_ad.unpack_dual(layer).tangent  # type: ignore[no-untyped-call]  # torch leaves it so
            yield from (each for each in _layers(tangent) if each.requires_grad)


def _layers(tensor: Tensor | None) -> Iterator[Tensor]:
    """A tensor, and those that `torch.func` wraps in it."""
    while tensor is not None:
        yield tensor
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        tensor = torch._C._functorch.get_unwrapped(tensor) if wrapped else None
