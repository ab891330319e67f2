"""Runs a module once on fake tensors, and notes units' operations and tensors that autograd keeps. Imports torch."""

from __future__ import annotations

import math
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from zeromesh.errors import ModelError
from zeromesh.model.module_calls import as_on_an_accelerator
from zeromesh.model.module_units import CutUnit
from zeromesh.model.module_values import KnownValues, named_arguments, place_of
from zeromesh.model.spec import UnitKind
from zeromesh.modules import clean_name

aten = torch.ops.aten
_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_GROUPED = aten._grouped_mm  # [all experts' rows, inner] x [experts, inner, outer]


@dataclass(slots=True)
class Product:
    """One product of activations with a weight, [rows, inner] x [inner, outer], done `count` times at once."""

    name: str
    rows: float
    inner: int
    outer: int
    count: int
    output_bytes: int
    weight: int  # the storage of the parameter or buffer that it comes from
    backward_flops: float = 0.0

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outer * self.count


@dataclass(slots=True)
class AttentionTrace:
    """Products of activations with each other, in FLOPs of the whole batch."""

    heads: tuple[int, int, int] | None = None  # of the first one: query heads, key heads, head size
    flops: float = 0.0
    causal_flops: float = 0.0  # part of `flops` where a kernel may skip scores that a causal mask hides
    backward_flops: float = 0.0
    output_bytes: int = 0


class StepByStep(Exception):  # asks for a shorter sequence; not an error
    """A module computes one token after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """Limits on the operations of a forward; more raise StepByStep. None: no limit."""

    every: int  # for all modules
    own: int | None = None  # for one call of a module, without its children's


@dataclass(slots=True)
class UnitTrace:
    """Bytes and FLOPs of one unit in one forward and backward of the whole batch."""

    products: list[Product] = field(default_factory=list)
    fused: AttentionTrace = field(default_factory=AttentionTrace)
    written: AttentionTrace = field(default_factory=AttentionTrace)  # written out in operations
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0
    output_bytes: int = 0
    elementwise_bytes: int = 0
    backward_peak_bytes: int = 0


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Attributes every operation of the forward pass to the unit and to the module that run it."""

    def __init__(self, module: nn.Module, units: Sequence[CutUnit], values: KnownValues, most: Most | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.values = values
        self._most = most
        self._own = [0]  # operations of each running module, without its children's
        self._every = 0
        self.traces: dict[str, UnitTrace] = {unit.name: UnitTrace() for unit in units}
        self._names = {id(part): clean_name(name) for name, part in module.named_modules()}
        self._units = {id(unit.module): unit for unit in units}
        self._held = [*module.parameters(), *module.buffers()]  # so that a replaced tensor's address is not reused
        self._weights = {storage_of(tensor) for tensor in self._held}
        self._origins = {storage: storage for storage in self._weights}
        dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        self.dtype = next(dtypes, torch.float32)
        self._weight_sizes = {p.numel() for p in module.parameters()}
        self._unit_stack: list[str] = [""]
        self._name_stack: list[str] = [""]
        self._saved: set[int] = set()
        self._pinned: list[Any] = []  # keeps saved storages alive, so that no address is reused
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._nodes: dict[int, tuple[UnitTrace, Product | AttentionTrace | None]] = {}  # by autograd node
        self._in_backward = False
        self._baseline = 0
        self._after_head = ""

    @property
    def trace(self) -> UnitTrace:
        """The running unit's trace. The root's work after the head is the loss, and counts as the head's."""
        return self.traces.setdefault(self._unit_stack[-1] or self._after_head, UnitTrace())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is _GROUPED:
            out = _grouped(**named_arguments(func, args, kwargs or {}))
        else:
            out = self.values.run(func, args, kwargs or {})
        self._every += 1
        self._note_live(out)
        flops = flops_of(func, args, kwargs or {}, out)
        if self._in_backward:
            self._note_backward(flops or 0.0)
            return out
        self._note_origin(args, out)
        if flops is None:
            self.trace.elementwise_bytes += _traffic(args, out)
        else:
            self._note_forward(func, args, kwargs or {}, out, flops)
        return out

    def count(self) -> None:
        """Counts one more operation of the running module; before it, since raising inside may abort."""
        self._own[-1] += 1
        most = self._most
        if most is None or self._in_backward:
            return
        if self._every > most.every or (most.own is not None and self._own[-1] > most.own):
            raise StepByStep(self._name_stack[-1])

    # Forward --------------------------------------------------------------------------------------------------------

    def _note_origin(self, args: tuple[Any, ...], out: Any) -> None:
        """Treats tensors computed from weights only, such as casts, as weights in matrix products."""
        given = [storage_of(tensor) for tensor in _tensors(args)]
        if not given or not all(storage in self._origins for storage in given):
            return
        for tensor in _tensors(out):
            key = storage_of(tensor)
            if key not in self._origins:
                self._origins[key] = self._origins[given[0]]
                weakref.finalize(tensor.untyped_storage(), self._origins.pop, key, None)

    def _note_forward(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, flops: float
    ) -> None:
        trace, packet = self.trace, func.overloadpacket
        trace.forward_flops += flops
        part: Product | AttentionTrace | None = None
        if packet in _ATTENTION:
            part = self._note_attention(named_arguments(func, args, kwargs), out, flops)
        elif packet is _GROUPED:
            experts, inner, outer = args[1].shape
            part = self._add_product(args[0].shape[0] / experts, inner, outer, experts, out, args[1])
        elif packet in _PRODUCTS:
            part = self._note_product(packet, args, out, flops)
        # autograd has made the node, and given it the last number. Without gradients that number is another
        # operation's, except inside a function with its own backward.
        node = torch._C._autograd._get_sequence_nr() - 1
        self._nodes.setdefault(node, (trace, part if torch.is_grad_enabled() else None))

    def _note_attention(self, given: Mapping[str, Any], out: Any, flops: float) -> AttentionTrace:
        query, key = given["query"], given["key"]
        found = self.trace.fused
        found.heads = found.heads or (query.shape[1], key.shape[1], query.shape[-1])
        found.flops += flops
        found.causal_flops += flops if given.get("is_causal") else 0.0
        found.output_bytes += sum(_nbytes(tensor) for tensor in _tensors(out))
        return found

    def _note_product(self, packet: Any, args: tuple[Any, ...], out: Tensor, flops: float) -> Product | AttentionTrace:
        left, right = args[-2:] if packet in (aten.addmm, aten.baddbmm) else args[:2]
        count = left.shape[0] if left.ndim == 3 else 1
        rows, inner, outer = left.shape[-2], left.shape[-1], right.shape[-1]
        weight = next((one for one in (right, left) if storage_of(one) in self._origins), None)
        if weight is not None:
            return self._add_product(rows, inner, outer, count, out, weight)
        found = self.trace.written
        found.heads = found.heads or (count, count, inner)
        found.flops += flops
        return found

    def _add_product(self, rows: float, inner: int, outer: int, count: int, out: Tensor, weight: Tensor) -> Product:
        product = Product(
            name=self._name_stack[-1].removeprefix(self._unit_stack[-1]).lstrip("."),
            rows=rows,
            inner=inner,
            outer=outer,
            count=count,
            output_bytes=_nbytes(out),
            weight=self._origins[storage_of(weight)],
        )
        self.trace.products.append(product)
        return product

    def faked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `inputs` as fake tensors. Values of real tensors stay known."""

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                return value
            made = torch.empty_like(value)
            if not value.is_floating_point():
                self.values.learn(made, value)
            return made

        return tree_map(fake, dict(inputs))  # type: ignore[no-any-return]  # torch's

    def note_result(self, output: Any) -> None:
        """Counts a module's output, above all the logits: it stays alive until its backward, saved or not."""
        for tensor in _tensors(output):
            self.pack(tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts the tensors that autograd saves, each storage once, for the unit that saved it first."""
        key = storage_of(tensor)
        if key not in self._saved and key not in self._weights:
            self._saved.add(key)
            self._pinned.append(tensor.untyped_storage())
            self.trace.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    # Backward -------------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        self._in_backward = True
        self._pinned.clear()
        self._baseline = self._live_bytes

    def enter_backward(self, unit: str) -> None:
        self._unit_stack = [unit]
        self._baseline = self._live_bytes

    def _note_backward(self, flops: float) -> None:
        node: Any = torch._C._current_autograd_node()
        if not flops or node is None:
            return
        trace, part = self._nodes.get(node._sequence_nr(), (self.trace, None))
        trace.backward_flops += flops
        if part is not None:
            part.backward_flops += flops

    def _note_live(self, out: Any) -> None:
        for tensor in _tensors(out):
            key = storage_of(tensor)
            of_weight = self._in_backward and tensor.numel() in self._weight_sizes
            if of_weight or key in self._live or key in self._weights:
                continue
            self._live[key] = tensor.untyped_storage().nbytes()
            self._live_bytes += self._live[key]
            weakref.finalize(tensor.untyped_storage(), self._release, key)
        if self._in_backward:
            trace = self.trace
            trace.backward_peak_bytes = max(trace.backward_peak_bytes, self._live_bytes - self._baseline)

    def _release(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def hook(self, module: nn.Module, stack: ExitStack) -> None:
        """Tracks which unit and which module is running until `stack` closes."""
        for part in module.modules():
            handles = [part.register_forward_pre_hook(self._enter), part.register_forward_hook(self._leave)]
            for handle in handles:
                stack.callback(handle.remove)

    def _enter(self, part: nn.Module, args: Any) -> None:
        self._name_stack.append(self._names[id(part)])
        self._own.append(0)
        if id(part) in self._units:
            self._unit_stack.append(self._units[id(part)].name)

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self._name_stack.pop()
        self._own.pop()
        if id(part) not in self._units:
            return
        self._unit_stack.pop()
        unit = self._units[id(part)]
        if unit.kind is UnitKind.HEAD:
            self._after_head = unit.name
        tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
        self.traces[unit.name].output_bytes = sum(_nbytes(tensor) for tensor in tensors[:1])
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda _, name=unit.name: self.enter_backward(name))  # type: ignore[no-untyped-call]  # torch's


def trace(
    module: nn.Module,
    units: Sequence[CutUnit],
    values: KnownValues,
    inputs: Mapping[str, Any],
    most: Most | None = None,
) -> dict[str, UnitTrace]:
    """Runs one forward and backward of `module` on `inputs`, inside a FakeTensorMode.

    Inputs are by keyword; "*" is a tuple of positional ones. `values` learns the values of inputs that are not fake,
    and of results. Without `most`, any number of operations may run. Raises ModelError if the module cannot run on fake
    tensors, or returns nothing to make a loss from; StepByStep beyond `most`.
    """
    tracer = Tracer(module, units, values, most)
    with ExitStack() as stack:
        tracer.hook(module, stack)
        stack.enter_context(as_on_an_accelerator(tracer.values, tracer.dtype, tracer.count))
        stack.enter_context(tracer)
        with torch.autograd.graph.saved_tensors_hooks(tracer.pack, lambda tensor: tensor), _told(module):
            given = tracer.faked(inputs)
            positional = given.pop("*", ())
            output = module(*positional, **given)
            tracer.note_result(output)
            loss = _loss(output)
        tracer.start_backward()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook
                handle = hook(_drop_gradient)  # type: ignore[no-untyped-call]  # torch's
                stack.callback(handle.remove)
        if loss.requires_grad:
            with _told(module):
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
    return tracer.traces


@contextmanager
def _told(module: nn.Module) -> Iterator[None]:
    """Translates errors of the user's module into ModelError."""
    try:
        yield
    except (ModelError, StepByStep):
        raise
    except Exception as error:  # the user's module may raise anything
        what = f"does not run on fake tensors of this shape ({type(error).__name__}: {error})"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            where = place_of(traceback.extract_tb(error.__traceback__))
            what = f"asks for numbers that its weights compute, and nothing says which, at {where}"
        raise ModelError(
            f"{type(module).__name__} {what}. Give package.module:function that returns (module, inputs), with inputs "
            "that it runs on as a tuple or a dictionary of tensors"
        ) from error


def _grouped(self: Tensor, mat2: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Returns the shape of a grouped product for any dtype and alignment; torch's fake kernel has a device's limits."""
    last = mat2.shape[-1]
    if self.ndim == 2 and mat2.ndim == 2 and offs is not None:
        return self.new_empty(offs.shape[0], self.shape[0], last)
    return self.new_empty(*(self.shape[:-1] if self.ndim == 2 or mat2.ndim == 3 else self.shape[1:-1]), last)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if not tensors:
        raise ModelError(f"the module returned {type(output).__name__} without a floating-point tensor")
    return tensors[0].sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def storage_of(tensor: Tensor) -> int:
    """The identity of the tensor's storage, which views share."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _traffic(args: Sequence[Any], out: Any) -> int:
    """Bytes that an operation reads and writes; 0 if it only makes a view."""
    outputs, inputs = _tensors(out), _tensors(args)
    storages: defaultdict[int, int] = defaultdict(int)
    for tensor in inputs:
        storages[storage_of(tensor)] += _nbytes(tensor)
    if all(storage_of(tensor) in storages for tensor in outputs):
        return 0
    return sum(storages.values()) + sum(_nbytes(tensor) for tensor in outputs)


# FLOPs ----------------------------------------------------------------------------------------------------------------


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float | None:
    """FLOPs of one operation, forward or backward: torch's own count, or ours for kernels that torch does not know;
    None for operations without matrix products."""
    packet = func.overloadpacket
    if packet in _OURS:
        return _OURS[packet](args)
    return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else None


def _attention_flops(args: Sequence[Any]) -> float:
    """FLOPs of both products in a forward."""
    return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]  # torch's


def _grouped_flops(args: Sequence[Any]) -> float:
    """FLOPs of a grouped product: [rows, inner] and [experts, inner, outer] or, in a backward, [inner, rows] and
    [rows, outer]."""
    left, right = args[0].shape, args[1].shape
    return float(2 * math.prod(left if len(left) == len(right) == 3 else left[-2:]) * right[-1])


def _convolution_flops(args: Sequence[Any]) -> float:
    """FLOPs of a convolution's backward. torch's own count of it ignores that groups need fewer products."""
    gradient, x, weight = (tensor.shape for tensor in args[:3])
    transposed, wanted = args[7], args[10]
    return float(sum(wanted[:2]) * conv_flop_count(x, weight, gradient, transposed=transposed))


_OURS: dict[Any, Callable[[Sequence[Any]], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: 2.5 * _attention_flops(args[1:]),
    aten._grouped_mm: _grouped_flops,
    aten.convolution_backward: _convolution_flops,
}
