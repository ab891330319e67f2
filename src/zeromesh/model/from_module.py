"""Reads any `nn.Module`: run on fake tensors, twice, since some terms grow with the sequence. Imports torch.

FLOPs are torch's own count of each operation (torch.utils.flop_counter); activation bytes are what autograd's
saved-tensor hooks see, each storage once. Nothing is allocated: FakeTensorMode runs on shapes alone.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeromesh.errors import ModelError
from zeromesh.model.module_trace import Product, UnitTrace, trace
from zeromesh.model.module_units import (
    DTYPE_NAMES,
    DTYPES,
    FROZEN_DTYPES,
    CutUnit,
    cut,
    is_sharded,
    without_recomputation,
)
from zeromesh.model.spec import (
    ActivationSpec,
    AttentionSpec,
    MatmulSpec,
    ModelSpec,
    PerToken,
    TensorSpec,
    UnitKind,
    UnitSpec,
)

_CODES = {dtype: name for name, dtype in FROZEN_DTYPES.items()}

Measured = dict[str, UnitTrace]


def from_factory(text: str, *, seq_len: int, dtype: str = "bf16") -> ModelSpec:
    """The model that `package.module:function` returns, built and run on fake tensors.

    Args:
        text: the function takes no argument and returns a module, or (module, inputs) with inputs a tuple or a
            dictionary of tensors of shape [1, seq_len, ...].
        seq_len: tokens in the sequence.
        dtype: of compute and activations.

    Raises:
        ModelError: it cannot be imported, called, or run, or its inputs have another length.
    """
    function = _find(text)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            built = function()
        except Exception as error:
            raise ModelError(f"{text} raised {type(error).__name__}: {error}") from error
        if isinstance(built, tuple) and len(built) != 2:
            raise ModelError(f"{text} must return an nn.Module or (module, inputs), got a tuple of {len(built)}")
        module, inputs = built if isinstance(built, tuple) else (built, None)
        if not isinstance(module, nn.Module):
            raise ModelError(f"{text} must return an nn.Module or (module, inputs), got {type(module).__name__}")
        return _read(_fake_copy(module, DTYPES[dtype]), name=text, inputs=inputs, seq_len=seq_len, dtype=dtype)


def from_module(
    module: nn.Module, *, seq_len: int, dtype: str = "bf16", inputs: Any = None, name: str | None = None
) -> ModelSpec:
    """The description of a module that exists; its parameters are neither read nor changed.

    Args:
        inputs: a tuple or dictionary of tensors [1, seq_len, ...]; default: token ids, and labels where the module
            takes them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = _fake_copy(module, DTYPES[dtype])
        return _read(fake, name=name or type(module).__name__, inputs=inputs, seq_len=seq_len, dtype=dtype)


def _find(text: str) -> Any:
    where, _, what = text.partition(":")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:  # a console script's path begins where it is installed
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model {text!r}: {error}; package.module:function must be importable from where you are"
        ) from error


def _fake_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A structural copy whose tensors are fake; tied parameters stay tied, since the memo holds each once."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        fake = torch.empty(tensor.shape, dtype=dtype if tensor.dtype in DTYPE_NAMES else tensor.dtype)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(module, memo)


def _read(module: nn.Module, *, name: str, inputs: Any, seq_len: int, dtype: str) -> ModelSpec:
    module = without_recomputation(module)  # what it saves and costs is added to this
    module.train()
    units = cut(module)
    if inputs is None:
        lengths = [_prime(seq_len), _prime(max(2, seq_len // 2))]
        runs = [(length, trace(module, units, _token_inputs(module, length))) for length in lengths]
    else:
        runs = [(seq_len, trace(module, units, _given_inputs(inputs, name, seq_len)))]
    specs = [_unit(unit, runs) for unit in units]
    blocks = [spec for spec in specs if spec.kind is UnitKind.BLOCK]
    return ModelSpec(
        name=name,
        units=tuple(_grouped(_with_inputs(specs))),
        hidden=_hidden(module, blocks or specs, dtype),
        num_layers=len(blocks) or 1,
        vocab=_vocab(module),
        whole_bytes=sum(float(p.numel() * p.element_size()) for p in module.parameters() if not is_sharded(p)),
        dtype=dtype,
        source="read from the module on fake tensors",
    )


def _token_inputs(module: nn.Module, seq_len: int) -> Mapping[str, Any]:
    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    if hasattr(module, "config") and hasattr(module, "_no_split_modules"):  # a transformers model
        return {"input_ids": ids, "labels": ids, "use_cache": False}
    return {"*": (ids,)}


def _prime(limit: int) -> int:
    """The largest prime up to `limit`, so that no activation has as many elements as a weight: the trace knows weight
    gradients by their size."""
    return next((n for n in range(limit, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1))), 1)


def _given_inputs(inputs: Any, name: str, seq_len: int) -> Mapping[str, Any]:
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    values = values if isinstance(values, tuple | list) else (values,)
    shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), None)
    if shape is None or shape[:2] != (1, seq_len):
        raise ModelError(
            f"{name}: the first tensor of its inputs must be of shape (1, {seq_len}, ...), one sequence as long as "
            f"--seq-len, since FLOPs and bytes are counted for each token of it; got {shape or 'no tensor'}: return "
            "inputs of that length, or give theirs as --seq-len"
        )
    if isinstance(inputs, Mapping):
        return {key: _fake(value) for key, value in inputs.items()}
    return {"*": tuple(_fake(value) for value in values)}


def _fake(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


# From traces to specs -----------------------------------------------------------------------------------------------


def _unit(unit: CutUnit, runs: Sequence[tuple[int, Measured]]) -> UnitSpec:
    seq_len, measured = runs[0]
    found = measured[unit.name]
    products = sum(2.0 * p.rows * p.inner * p.outer * p.count for p in found.products)
    trainable = {key.rpartition(".")[0] for key, parameter in unit.parameters if parameter.requires_grad}
    return UnitSpec(
        name=unit.name,
        kind=unit.kind,
        tensors=tuple(
            _tensor(key, parameter, unit, found.products, seq_len)
            for key, parameter in unit.parameters
            if parameter.numel()
        ),
        matmuls=tuple(_matmul(product, seq_len, trainable) for product in found.products),
        attention=_attention(found, seq_len),
        activations=_activations(unit, runs),
        other_forward_flops=max(0.0, found.forward_flops - products - found.attention_flops) / seq_len,
    )


def _tensor(key: str, parameter: nn.Parameter, unit: CutUnit, products: Sequence[Product], seq_len: int) -> TensorSpec:
    owner = unit.module.get_submodule(key.rpartition(".")[0])
    return TensorSpec(
        name=key,
        shape=tuple(parameter.shape) or (1,),
        trainable=parameter.requires_grad,
        dtype=_CODES.get(parameter.dtype),
        lookup=isinstance(owner, nn.Embedding) and not _is_head(unit, key),
        active_share=_active_share(parameter, products, seq_len),
    )


def _active_share(parameter: nn.Parameter, products: Sequence[Product], tokens: int) -> float:
    """Of a stack of experts' weights, the share that one token meets: rows of one expert's product per token."""
    for product in products:
        if product.count > 1 and parameter.numel() == product.count * product.inner * product.outer:
            return min(1.0, product.rows / tokens)
    return 1.0


def _is_head(unit: CutUnit, key: str) -> bool:
    """Whether a lookup table is tied to a layer that multiplies with it."""
    weight = unit.module.get_parameter(key)
    others = (part for part in unit.module.modules() if isinstance(part, nn.Linear))
    return any(part.weight is weight for part in others)


def _matmul(product: Product, tokens: int, trainable: set[str]) -> MatmulSpec:
    return MatmulSpec(
        name=product.name or "linear",
        inner=product.inner,
        outer=product.outer,
        rows_per_token=product.rows / tokens,
        count=product.count,
        trainable_share=1.0 if product.name in trainable or not product.name else 0.0,
    )


def _attention(found: UnitTrace, seq_len: int) -> AttentionSpec | None:
    """One term for all attention of the unit: heads are scaled where a unit has more than one layer of it."""
    if found.attention_heads is None:
        return None
    heads, kv_heads, head_dim = found.attention_heads
    layers = round(found.attention_flops / (4.0 * heads * head_dim * seq_len * seq_len)) or 1
    return AttentionSpec(
        heads=heads * layers, kv_heads=kv_heads * layers, head_dim=head_dim, fused=found.attention_fused
    )


def _activations(unit: CutUnit, runs: Sequence[tuple[int, Measured]]) -> ActivationSpec:
    seq_len, measured = runs[0]
    found = measured[unit.name]
    saved = _per_token([(length, traces[unit.name].saved_bytes) for length, traces in runs])
    peak = _per_token([(length, traces[unit.name].backward_peak_bytes) for length, traces in runs])
    output = found.output_bytes / seq_len
    kept = sum(product.output_bytes for product in found.products[0::2]) + found.attention_output_bytes
    block = unit.kind is UnitKind.BLOCK
    return ActivationSpec(
        output=output,
        saved_none=saved,
        saved_selective=PerToken(constant=kept / seq_len) if block else saved,
        saved_full=PerToken() if block else saved,
        # the gradient that arrives at a block was there before its peak was noted
        working=peak + PerToken(constant=output) if block else peak,
        elementwise=PerToken(constant=found.elementwise_bytes / seq_len),
    )


def _per_token(points: Sequence[tuple[int, float]]) -> PerToken:
    """The line through bytes per token at one or two sequence lengths."""
    (long, at_long), *rest = [(length, total / length) for length, total in points]
    if not rest or rest[0][0] == long:
        return PerToken(constant=at_long)
    short, at_short = rest[0]
    slope = max(0.0, (at_long - at_short) / (long - short))
    return PerToken(constant=at_long - slope * long, per_context=slope)


def _with_inputs(specs: list[UnitSpec]) -> list[UnitSpec]:
    """A block that recomputes keeps its input, which is the output of the unit before it."""
    done = specs[:1]
    for before, unit in pairwise(specs):
        if unit.kind is UnitKind.BLOCK:
            given = (before if before.kind is not UnitKind.ROOT else unit).activations.output
            boundary = PerToken(constant=given)
            kept = unit.activations
            unit = replace(
                unit,
                activations=replace(
                    kept,
                    saved_selective=kept.saved_selective + boundary,
                    saved_full=kept.saved_full + boundary,
                ),
            )
        done.append(unit)
    return done


def _grouped(specs: list[UnitSpec]) -> list[UnitSpec]:
    """Equal blocks that follow one another as one spec; what only the first of a row does (rotary tables) is kept."""
    groups: list[list[UnitSpec]] = []
    for spec in specs:
        if groups and _alike(groups[-1][-1], spec):
            groups[-1].append(spec)
        else:
            groups.append([spec])
    # The last one is the typical one: the first also holds what all share.
    return [replace(group[-1], name=group[0].name, count=len(group)) for group in groups]


def _alike(left: UnitSpec, right: UnitSpec) -> bool:
    same = replace(left, name="", activations=right.activations) == replace(right, name="")
    return same and left.kind is UnitKind.BLOCK


def _hidden(module: nn.Module, blocks: Sequence[UnitSpec], dtype: str) -> int:
    hidden = getattr(getattr(module, "config", None), "hidden_size", None)
    if isinstance(hidden, int):
        return hidden
    return max(1, round(blocks[-1].activations.output / DTYPES[dtype].itemsize))


def _vocab(module: nn.Module) -> int:
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return max(sizes, default=1)
