"""Runs a module once on fake tensors: what each unit computes, and what autograd keeps for it. Imports torch."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zeromesh.errors import ModelError
from zeromesh.model.module_units import CutUnit, clean_name
from zeromesh.model.spec import UnitKind

aten = torch.ops.aten
_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # torch's counter knows the other three
_PACKED = "find_packed_sequence_indices"
_GROUPED = aten._grouped_mm  # [all experts' rows, inner] x [experts, inner, outer]; unknown to torch's counter


@dataclass(slots=True)
class Product:
    """One product of activations with a weight: [rows, inner] x [inner, outer], `count` of them at once."""

    name: str
    rows: float
    inner: int
    outer: int
    count: int
    output_bytes: int


@dataclass(slots=True)
class UnitTrace:
    """What one unit did in one forward and backward, in bytes and FLOPs of the whole batch."""

    products: list[Product] = field(default_factory=list)
    attention_heads: tuple[int, int, int] | None = None  # query heads, key heads, head size
    attention_fused: bool = True
    attention_flops: float = 0.0
    attention_output_bytes: int = 0
    forward_flops: float = 0.0
    saved_bytes: int = 0
    output_bytes: int = 0
    elementwise_bytes: int = 0
    backward_peak_bytes: int = 0


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Attributes every operation of the forward pass to the unit, and to the module, that runs it."""

    def __init__(self, module: nn.Module, units: Sequence[CutUnit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.traces: dict[str, UnitTrace] = {unit.name: UnitTrace() for unit in units}
        self._names = {id(part): clean_name(name) for name, part in module.named_modules()}
        self._units = {id(unit.module): unit for unit in units}
        self._weights = {_storage(p) for p in module.parameters()} | {_storage(b) for b in module.buffers()}
        self._weight_sizes = {p.numel() for p in module.parameters()}
        self._unit_stack: list[str] = [""]
        self._name_stack: list[str] = [""]
        self._saved: set[int] = set()
        self._pinned: list[Any] = []  # keeps saved storages alive, so that none is counted under a reused address
        self._live: dict[int, int] = {}
        self._in_backward = False
        self._baseline = 0
        self._after_head = ""

    @property
    def trace(self) -> UnitTrace:
        """The running unit's; what the root does after the head has run is the loss, and the head's."""
        return self.traces.setdefault(self._unit_stack[-1] or self._after_head, UnitTrace())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note_live(out)
        if not self._in_backward:
            self._note_forward(func.overloadpacket, args, kwargs or {}, out)
        return out

    # Forward --------------------------------------------------------------------------------------------------------

    def _note_forward(self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        trace = self.trace
        if packet is _CPU_ATTENTION:
            trace.forward_flops += _attention_flops(args)
        elif packet is _GROUPED:
            trace.forward_flops += 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[2]
            experts, inner, outer = args[1].shape
            self._add_product(args[0].shape[0] / experts, inner, outer, experts, out)
        elif packet in flop_registry:
            trace.forward_flops += flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            trace.elementwise_bytes += _traffic(args, out)
        if packet in _ATTENTION:
            self._note_attention(args, out)
        elif packet in _PRODUCTS:
            self._note_product(packet, args, out)

    def _note_attention(self, args: tuple[Any, ...], out: Any) -> None:
        query, key = args[0], args[1]
        self.trace.attention_heads = (query.shape[1], key.shape[1], query.shape[-1])
        self.trace.attention_flops += _attention_flops(args)
        self.trace.attention_output_bytes += sum(_nbytes(tensor) for tensor in _tensors(out))

    def _note_product(self, packet: Any, args: tuple[Any, ...], out: Tensor) -> None:
        left, right = args[-2:] if packet in (aten.addmm, aten.baddbmm) else args[:2]
        count = left.shape[0] if left.ndim == 3 else 1
        rows, inner, outer = left.shape[-2], left.shape[-1], right.shape[-1]
        if _storage(left) in self._weights or _storage(right) in self._weights:
            self._add_product(rows, inner, outer, count, out)
        else:  # two activations: attention written out
            self.trace.attention_fused = False
            self.trace.attention_flops += 2.0 * count * rows * inner * outer
            self.trace.attention_heads = self.trace.attention_heads or (count, count, inner)

    def _add_product(self, rows: float, inner: int, outer: int, count: int, out: Tensor) -> None:
        name = self._name_stack[-1].removeprefix(self._unit_stack[-1]).lstrip(".")
        product = Product(name=name, rows=rows, inner=inner, outer=outer, count=count, output_bytes=_nbytes(out))
        self.trace.products.append(product)

    def note_result(self, output: Any) -> None:
        """What the module returns stays alive until its backward, saved or not: the logits above all."""
        for tensor in _tensors(output):
            self.pack(tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts what autograd saves, each storage once, for the unit that saved it first."""
        key = _storage(tensor)
        if key not in self._saved and key not in self._weights:
            self._saved.add(key)
            self._pinned.append(tensor.untyped_storage())
            self.trace.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    # Backward -------------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        self._in_backward = True
        self._pinned.clear()
        self._baseline = sum(self._live.values())

    def enter_backward(self, unit: str) -> None:
        self._unit_stack = [unit]
        self._baseline = sum(self._live.values())

    def _note_live(self, out: Any) -> None:
        for tensor in _tensors(out):
            key = _storage(tensor)
            if key in self._live or key in self._weights or (self._in_backward and self._is_weight_gradient(tensor)):
                continue
            self._live[key] = tensor.untyped_storage().nbytes()
            weakref.finalize(tensor.untyped_storage(), self._live.pop, key, None)
        if self._in_backward:
            trace = self.trace
            trace.backward_peak_bytes = max(trace.backward_peak_bytes, sum(self._live.values()) - self._baseline)

    def _is_weight_gradient(self, tensor: Tensor) -> bool:
        return tensor.numel() in self._weight_sizes

    # Hooks ----------------------------------------------------------------------------------------------------------

    def hook(self, module: nn.Module, stack: ExitStack) -> None:
        """Follows which unit and which module is running until `stack` closes."""
        for part in module.modules():
            handles = [part.register_forward_pre_hook(self._enter), part.register_forward_hook(self._leave)]
            for handle in handles:
                stack.callback(handle.remove)

    def _enter(self, part: nn.Module, args: Any) -> None:
        self._name_stack.append(self._names[id(part)])
        if id(part) in self._units:
            self._unit_stack.append(self._units[id(part)].name)

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self._name_stack.pop()
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
                tensor.register_hook(self._entering(unit.name))  # type: ignore[no-untyped-call]  # torch's

    def _entering(self, name: str) -> Callable[[Tensor], None]:
        def enter(gradient: Tensor) -> None:
            self.enter_backward(name)

        return enter


def trace(module: nn.Module, units: Sequence[CutUnit], inputs: Mapping[str, Any]) -> dict[str, UnitTrace]:
    """One forward and backward of `module` on `inputs`, inside a FakeTensorMode.

    Raises:
        ModelError: the module cannot run on fake tensors, or gives nothing that a loss could be made of.
    """
    tracer = Tracer(module, units)
    with ExitStack() as stack:
        tracer.hook(module, stack)
        stack.enter_context(_as_on_an_accelerator())
        stack.enter_context(tracer)
        with torch.autograd.graph.saved_tensors_hooks(tracer.pack, lambda tensor: tensor):
            output = _run(module, inputs)
            tracer.note_result(output)
            loss = _loss(output)
        tracer.start_backward()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook
                handle = hook(_drop_gradient)  # type: ignore[no-untyped-call]  # torch's
                stack.callback(handle.remove)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
    return tracer.traces


class _NoAttentionDropout(TorchFunctionMode):
    """The CPU's fused attention has no dropout and falls back to scores; an accelerator's keeps a seed alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            given["dropout_p"] = 0.0
        return func(*args, **given)


@contextmanager
def _as_on_an_accelerator() -> Iterator[None]:
    """transformers cannot see in fake tensors that a batch holds no packed sequences, and would build a causal mask
    that a real run leaves out; so it is told."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, _PACKED, None)
    if original is not None:
        setattr(masking, _PACKED, lambda position_ids: None)
    try:
        with _NoAttentionDropout():
            yield
    finally:
        if original is not None:
            setattr(masking, _PACKED, original)


def _attention_flops(args: Sequence[Any]) -> float:
    shapes = [tuple(tensor.shape) for tensor in args[:3]]
    return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]  # torch's


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _run(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        positional = inputs.get("*", ())
        return module(*positional, **{key: value for key, value in inputs.items() if key != "*"})
    except Exception as error:  # anything: it is the user's module that runs
        raise ModelError(
            f"{type(module).__name__} does not run on fake tensors of this shape ({type(error).__name__}: {error}). "
            "Let the function return (module, inputs) with inputs as a tuple or a dictionary of tensors; a module "
            "whose shapes depend on data, as experts with a varying number of tokens, needs a config.json instead"
        ) from error


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


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _traffic(args: Sequence[Any], out: Any) -> int:
    """Bytes that an operation reads and writes; 0 for one that only makes a view."""
    outputs, inputs = _tensors(out), _tensors(args)
    storages: defaultdict[int, int] = defaultdict(int)
    for tensor in inputs:
        storages[_storage(tensor)] += _nbytes(tensor)
    if all(_storage(tensor) in storages for tensor in outputs):
        return 0
    return sum(storages.values()) + sum(_nbytes(tensor) for tensor in outputs)
