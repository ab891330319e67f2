"""Reads any `nn.Module` by running it on fake tensors, twice, since some terms grow with the sequence. Imports torch.

FLOPs are torch's own count of each operation (torch.utils.flop_counter). Activation bytes are those that autograd's
saved-tensor hooks see, each storage once. FakeTensorMode runs on shapes only; `module_values` provides the small values
that a model asks for.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from zeromesh.errors import ModelError
from zeromesh.model.module_trace import AttentionTrace, Most, Product, StepByStep, UnitTrace, storage_of, trace
from zeromesh.model.module_units import CutUnit, cut, without_recomputation
from zeromesh.model.module_values import KnownValues, Recording
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
from zeromesh.modules import DTYPE_NAMES, DTYPES, FROZEN_DTYPES, is_sharded

_CODES = {dtype: name for name, dtype in FROZEN_DTYPES.items()}

Measured = dict[str, UnitTrace]

SHORT = ((61, 31), (17, 7), (3, 2))
"""Sequence lengths for modules that compute one token after another; the first pair that takes few enough operations is
used. They are primes for the reason in `_prime`. A part that does not grow with the tokens (the padding of a
convolution) counts in full for each 61, 17 or 3 tokens."""

OWN_OPERATIONS = 300
"""Most operations of one call, without its children's. A module with more, and with more than two per token, is a scan.
A loop over as many experts also counts as one; its work per token is the same in short sequences."""

ALL_OPERATIONS = 100_000
"""Most operations of a forward: 12 s on one processor (November 2026). With more, the model counts as a scan."""


def from_factory(text: str, *, seq_len: int | None, dtype: str = "bf16") -> ModelSpec:
    """Reads the model that `package.module:function` returns: builds it and runs it on fake tensors, with computation
    and activations in `dtype`.

    The function takes no argument. It returns a module, or (module, inputs) with inputs a tuple or dictionary of
    tensors of shape [1, seq_len, ...]. Raises ModelError if it cannot be imported, called or run, or its inputs have
    another length.
    """
    seq_len = required(seq_len)
    function = _find(text)
    values = KnownValues()
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            with Recording(values):
                built = function()
        except Exception as error:
            raise ModelError(f"{text} raised {type(error).__name__}: {error}") from error
        if isinstance(built, tuple) and len(built) != 2:
            raise ModelError(f"{text} must return an nn.Module or (module, inputs), got a tuple of {len(built)}")
        module, inputs = built if isinstance(built, tuple) else (built, None)
        if not isinstance(module, nn.Module):
            raise ModelError(f"{text} must return an nn.Module or (module, inputs), got {type(module).__name__}")
        fake = _fake_copy(module, DTYPES[dtype])
        return _read(fake, values, name=text, inputs=inputs, seq_len=seq_len, dtype=dtype)


def from_module(
    module: nn.Module, *, seq_len: int, dtype: str = "bf16", inputs: Any = None, name: str | None = None
) -> ModelSpec:
    """Describes an existing module; its parameters are neither read nor changed. `inputs` are a tuple or dictionary of
    tensors [1, seq_len, ...]. Default: token ids, and labels if the module takes them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = _fake_copy(module, DTYPES[dtype])
        name = name or type(module).__name__
        return _read(fake, KnownValues(), name=name, inputs=inputs, seq_len=seq_len, dtype=dtype)


def required(seq_len: int | None) -> int:
    """Returns the sequence length to run a module on. Raises ModelError if the user gave none, since nothing else
    defines it."""
    if seq_len is None:
        raise ModelError("seq_len is required, the tokens of a sequence: this model is read by a run on that many")
    return seq_len


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
    """Copies a module with fake tensors. Tied parameters stay tied, since the memo holds each once."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        fake = torch.empty(tensor.shape, dtype=dtype if tensor.dtype in DTYPE_NAMES else tensor.dtype)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # the user's module may hold anything
        raise ModelError(
            f"{type(module).__name__} cannot be copied without its values ({type(error).__name__}: {error}): give a "
            "module that has not run, and holds nothing but parameters, buffers and plain values"
        ) from error


def _read(module: nn.Module, values: KnownValues, *, name: str, inputs: Any, seq_len: int, dtype: str) -> ModelSpec:
    module = without_recomputation(module)  # recomputation is added to the spec instead
    module.train()
    values.assumed.clear()  # forgets those of the module's construction
    units = cut(module)
    if inputs is None:
        runs = _token_runs(module, units, values, seq_len)
    else:
        runs = [(seq_len, trace(module, units, values, _given_inputs(inputs, name, seq_len)))]
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
        assumed=tuple(values.assumed),
    )


def _token_runs(
    module: nn.Module, units: Sequence[CutUnit], values: KnownValues, seq_len: int
) -> list[tuple[int, Measured]]:
    """Runs two lengths: the sequence's and half of it. A module that computes one token after another (a scan without
    its kernel) runs short ones instead, since its work is proportional to the tokens.

    Primes come first. If the module accepts none, or needs fewer operations with the very lengths (chunks), it runs
    these, or only the first.
    """

    def run(lengths: Sequence[int], most: Most | None) -> list[tuple[int, Measured]]:
        values.assumed.clear()
        return [(length, trace(module, units, values, token_inputs(module, length), most)) for length in lengths]

    asked = seq_len, max(2, seq_len // 2)
    primes = _prime(asked[0]), _prime(asked[1])
    most = Most(own=max(OWN_OPERATIONS, 2 * seq_len), every=ALL_OPERATIONS) if seq_len > SHORT[0][0] else None
    failed: ModelError | None = None
    for lengths in (primes, asked, asked[:1]):
        try:
            return run(lengths, most)
        except ModelError as error:
            failed = error
        except StepByStep:
            if lengths == asked:
                break
    else:
        assert failed is not None
        raise failed
    for lengths in SHORT[:-1]:
        with suppress(StepByStep):
            return run(lengths, Most(every=ALL_OPERATIONS))
    return run(SHORT[-1], None)


def token_inputs(module: nn.Module, seq_len: int) -> Mapping[str, Any]:
    """Returns default inputs of a module: ids of one ordinary token, also as labels."""
    config = getattr(module, "config", None)
    with unset_fake_temporarily():
        ids = torch.full((1, seq_len), _plain_token(module, config))
    if config is None or not hasattr(module, "_no_split_modules"):
        return {"*": (ids,)}
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}  # a transformers model
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids  # else it would shift the labels by special tokens, which few configs name
    return inputs


def _plain_token(module: nn.Module, config: Any) -> int:
    """Returns an id without special meaning, since padding, for example, would be masked."""
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    special = {value for key, value in fields.items() if key.endswith("token_id") and isinstance(value, int)}
    return next((token for token in range(_vocab(module) - 1) if token not in special), 0)


def _prime(limit: int) -> int:
    """The largest prime up to `limit`. With primes no activation is as large as a weight: the trace finds weight
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
    return inputs if isinstance(inputs, Mapping) else {"*": tuple(values)}


# From traces to specs -----------------------------------------------------------------------------------------------


def _unit(unit: CutUnit, runs: Sequence[tuple[int, Measured]]) -> UnitSpec:
    seq_len, measured = runs[0]
    found = measured[unit.name]
    products = sum(product.forward_flops for product in found.products)
    frozen = {storage_of(p) for p in unit.module.parameters() if not p.requires_grad}
    frozen |= {storage_of(buffer) for buffer in unit.module.buffers()}
    attention = _attention(unit.name, runs)
    grows = attention.forward_flops(seq_len) * seq_len if attention else 0.0
    matmuls = tuple(_matmul(product, seq_len, frozen) for product in found.products)
    told = sum(matmul.backward_flops for matmul in matmuls) + (attention.backward_flops(seq_len) if attention else 0.0)
    return UnitSpec(
        name=unit.name,
        kind=unit.kind,
        tensors=tuple(
            _tensor(key, parameter, unit, found.products, seq_len)
            for key, parameter in unit.parameters
            if parameter.numel()
        ),
        matmuls=matmuls,
        attention=attention,
        activations=_activations(unit, runs),
        other_forward_flops=max(0.0, found.forward_flops - products - grows) / seq_len,
        other_backward_flops=max(0.0, found.backward_flops / seq_len - told),
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
    """The share of the parameter's elements that one token uses: less than 1 for a stack of experts' weights."""
    met = [p.rows * p.count * p.inner * p.outer for p in products if p.weight == storage_of(parameter)]
    return min(1.0, sum(met) / tokens / parameter.numel()) if met else 1.0


def _is_head(unit: CutUnit, key: str) -> bool:
    """Whether a lookup table is tied to a layer that multiplies with it."""
    weight = unit.module.get_parameter(key)
    others = (part for part in unit.module.modules() if isinstance(part, nn.Linear))
    return any(part.weight is weight for part in others)


def _matmul(product: Product, tokens: int, frozen: set[int]) -> MatmulSpec:
    trainable_share = 0.0 if product.weight in frozen else 1.0
    return MatmulSpec(
        name=product.name or "linear",
        inner=product.inner,
        outer=product.outer,
        rows_per_token=product.rows / tokens,
        count=product.count,
        trainable_share=trainable_share,
        returned=min(1.0, product.backward_flops / max(1.0, product.forward_flops * (1.0 + trainable_share))),
    )


def _attention(name: str, runs: Sequence[tuple[int, Measured]]) -> AttentionSpec | None:
    """Returns one term for products of activations with each other whose FLOPs per token grow with the sequence. Other
    such products (windows, linear attention) grow in proportion to the sequence, and so, nearly, do those written out
    beside fused ones."""
    seq_len, measured = runs[0]
    kind = "fused" if measured[name].fused.heads else "written"
    found: AttentionTrace = getattr(measured[name], kind)
    per_token = [(length, getattr(traces[name], kind).flops / length) for length, traces in runs]
    growth = _line(per_token)[1] if len(runs) > 1 else found.flops / seq_len**2
    if found.heads is None or growth <= 0.0:
        return None
    heads, kv_heads, head_dim = found.heads
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        fused=kind == "fused",
        causal=found.causal_flops / found.flops,
        layers=growth / (4.0 * heads * head_dim),
        returned=found.backward_flops / (found.flops * (2.5 if kind == "fused" else 2.0)),
    )


def _activations(unit: CutUnit, runs: Sequence[tuple[int, Measured]]) -> ActivationSpec:
    seq_len, measured = runs[0]
    found = measured[unit.name]
    saved = _per_token([(length, traces[unit.name].saved_bytes) for length, traces in runs])
    peak = _per_token([(length, traces[unit.name].backward_peak_bytes) for length, traces in runs])
    output = found.output_bytes / seq_len
    kept = sum(product.output_bytes for product in found.products[0::2]) + found.fused.output_bytes
    block = unit.kind is UnitKind.BLOCK
    return ActivationSpec(
        output=output,
        saved_none=saved,
        saved_selective=PerToken(constant=kept / seq_len) if block else saved,
        saved_full=PerToken() if block else saved,
        # the gradient that arrives at a block existed before its peak was noted
        working=peak + PerToken(constant=output) if block else peak,
        elementwise=_per_token([(length, traces[unit.name].elementwise_bytes) for length, traces in runs]),
    )


def _per_token(points: Sequence[tuple[int, float]]) -> PerToken:
    """Fits a line through bytes per token at one or two sequence lengths."""
    constant, slope = _line([(length, total / length) for length, total in points])
    return PerToken(constant=constant, per_context=slope)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns height and slope of the line through one or two points; the slope is never negative."""
    (long, at_long), *rest = points
    if not rest or rest[0][0] == long:
        return at_long, 0.0
    short, at_short = rest[0]
    slope = max(0.0, (at_long - at_short) / (long - short))
    return at_long - slope * long, slope


def _with_inputs(specs: list[UnitSpec]) -> list[UnitSpec]:
    """Adds to each block its input, which it keeps if it recomputes: the output of the unit before it."""
    done = specs[:1]
    for before, unit in pairwise(specs):
        if unit.kind is UnitKind.BLOCK:
            given = (before if before.kind is not UnitKind.ROOT else unit).activations.output
            boundary, acts = PerToken(constant=given), unit.activations
            selective, full = acts.saved_selective + boundary, acts.saved_full + boundary
            unit = replace(unit, activations=replace(acts, saved_selective=selective, saved_full=full))
        done.append(unit)
    return done


def _grouped(specs: list[UnitSpec]) -> list[UnitSpec]:
    """Merges equal consecutive blocks into one spec. A first block with extra work (rotary tables) stays separate."""
    groups: list[list[UnitSpec]] = []
    for spec in specs:
        if groups and _alike(groups[-1][-1], spec):
            groups[-1].append(spec)
        else:
            groups.append([spec])
    # The last one is typical. The first also holds tensors that all share.
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
