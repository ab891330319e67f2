"""Which parameters train: all, a fraction of each, or low-rank adapters with frozen weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from zeromesh.errors import ModelError
from zeromesh.model.spec import DTYPE_BYTES, MatmulSpec, ModelSpec, PerToken, TensorSpec, UnitKind, UnitSpec


def with_trainable(model: ModelSpec, choice: str) -> ModelSpec:
    """Returns `model` with another choice of trained parameters. Raises ModelError if `choice` is none of these:

    - `all`;
    - a fraction in (0, 1] of the rows of every tensor, or of every expert in a stack of experts. PaRO's
      partial-parameter training enters its formulas like this (arXiv 2310.06003);
    - `lora:RANK`, adapters of that rank on every linear layer of the blocks, all else frozen (arXiv 2106.09685).
    """
    if choice == "all":
        return model
    if model.built_from is not None:
        model = replace(model, built_from=replace(model.built_from, trainable=choice))
    if choice.startswith("lora:"):
        rank = _rank(choice)
        return replace(model, units=tuple(_with_adapters(unit, rank, model.dtype) for unit in model.units))
    fraction = _fraction(choice)
    if fraction == 1.0:
        return model
    return replace(model, units=tuple(_with_fraction(unit, fraction) for unit in model.units))


def _rank(choice: str) -> int:
    text = choice.removeprefix("lora:")
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise ModelError(f"trainable: lora needs a rank of at least 1, as in lora:16, got {choice!r}")
    return int(text)


def _fraction(choice: str) -> float:
    try:
        fraction = float(choice)
    except ValueError:
        fraction = math.nan
    if not 0.0 < fraction <= 1.0:
        raise ModelError(f"trainable: all, a fraction in (0, 1] or lora:RANK is required, got {choice!r}")
    return fraction


def _with_fraction(unit: UnitSpec, fraction: float) -> UnitSpec:
    return replace(
        unit,
        tensors=tuple(part for tensor in unit.tensors for part in _split_rows(tensor, fraction)),
        matmuls=tuple(replace(matmul, trainable_share=fraction) for matmul in unit.matmuls),
    )


def _split_rows(tensor: TensorSpec, fraction: float) -> Iterable[TensorSpec]:
    """Yields the leading rows, at least one, which train; and the rest as a separate frozen tensor."""
    dim = 1 if len(tensor.shape) == 3 else 0  # the first dimension of a stack is the number of experts
    before, count, after = tensor.shape[:dim], tensor.shape[dim], tensor.shape[dim + 1 :]
    rows = max(1, round(fraction * count))
    yield replace(tensor, shape=(*before, rows, *after))
    if rows < count:
        rest = (*before, count - rows, *after)
        yield replace(tensor, name=f"{tensor.name}[frozen]", shape=rest, trainable=False)


def _with_adapters(unit: UnitSpec, rank: int, dtype: str) -> UnitSpec:
    frozen = replace(
        unit,
        tensors=tuple(replace(tensor, trainable=False) for tensor in unit.tensors),
        matmuls=tuple(replace(matmul, trainable_share=0.0) for matmul in unit.matmuls),
    )
    if unit.kind is not UnitKind.BLOCK:
        return frozen
    adapters = tuple(pair for matmul in unit.matmuls for pair in _adapter_matmuls(matmul, rank))
    inner = DTYPE_BYTES[dtype] * sum(m.outer * m.rows_per_token * m.count for m in adapters[0::2])
    # Inner activations, of the adapters' rank, are products, so selective recomputation keeps them as well.
    kept, acts = PerToken(constant=inner), unit.activations
    return replace(
        frozen,
        tensors=(*frozen.tensors, *(t for m in unit.matmuls for t in _adapter_tensors(m, rank))),
        matmuls=(*frozen.matmuls, *adapters),
        activations=replace(acts, saved_none=acts.saved_none + kept, saved_selective=acts.saved_selective + kept),
    )


def _adapter_matmuls(matmul: MatmulSpec, rank: int) -> tuple[MatmulSpec, MatmulSpec]:
    return (
        replace(matmul, name=f"{matmul.name}.lora_A", outer=rank, trainable_share=1.0),
        replace(matmul, name=f"{matmul.name}.lora_B", inner=rank, trainable_share=1.0),
    )


def _adapter_tensors(matmul: MatmulSpec, rank: int) -> tuple[TensorSpec, TensorSpec]:
    lead = (matmul.count,) if matmul.count > 1 else ()
    share = matmul.rows_per_token if matmul.count > 1 else 1.0
    return (
        TensorSpec(name=f"{matmul.name}.lora_A.weight", shape=(*lead, rank, matmul.inner), active_share=share),
        TensorSpec(name=f"{matmul.name}.lora_B.weight", shape=(*lead, matmul.outer, rank), active_share=share),
    )
