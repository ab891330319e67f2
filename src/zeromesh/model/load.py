"""One entry point for all ways to name a model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zeromesh.errors import ModelError
from zeromesh.files.users import parse_json, read_text
from zeromesh.model.huggingface import read_config
from zeromesh.model.presets import preset
from zeromesh.model.shape import EAGER, Kernels
from zeromesh.model.spec import ModelSpec, PerToken, UnitKind, UnitSpec
from zeromesh.model.trainable import with_trainable
from zeromesh.model.transformer import build, in_products

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_model(
    text: str, *, seq_len: int | None = None, trainable: str = "all", dtype: str = "bf16", kernels: Kernels = EAGER
) -> ModelSpec:
    """Returns the model that `text` names.

    Args:
        text: a preset, the path of a Hugging Face `config.json`, a directory that holds one or PEFT's adapters, which
            train beside their base, or `package.module:function` returning an `nn.Module`. The last kind, and configs
            of architectures without a reader here, import torch.
        seq_len: tokens in a sequence. Those two kinds need it, since they run on fake tensors of this length.
        trainable: see `with_trainable`.
        dtype: dtype of compute and activations.
        kernels: see `with_kernels`.

    Raises:
        ModelError: no such model, an invalid file, trainable quantised weights, or a sequence longer than the model's
            table of positions.
    """
    folder = Path(text)
    if folder.is_dir() and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base, rank = _adapter(folder)
        text, trainable = base, trainable if trainable != "all" else f"lora:{rank}"
    model = with_kernels(with_trainable(_read(text, seq_len, dtype), trainable), kernels)
    if any(tensor.dtype and tensor.trainable for unit in model.units for tensor in unit.tensors):
        raise ModelError(
            f"model {model.name} has a quantization_config: its weights are codes, which do not train. Give "
            "--trainable lora:16 for adapters beside them, or the config.json of the model that it was made of"
        )
    if seq_len is not None and model.max_seq_len is not None and seq_len > model.max_seq_len:
        raise ModelError(
            f"model {model.name} has {model.max_seq_len} positions, and the sequence has {seq_len} tokens; "
            f"use --seq-len {model.max_seq_len} or less, or a config with more positions"
        )
    return model


def with_kernels(model: ModelSpec, kernels: Kernels) -> ModelSpec:
    """Returns `model` with other kernels than eager ones.

    A transformer of `zeromesh.model.transformer` is built again. A module that was read by a run has its own kernels.
    Fused ones then read and write once the values that autograd keeps; memory stays as it was read.
    """
    if kernels == EAGER:
        return model
    if (built := model.built_from) is not None:
        return with_trainable(build(built.shape, dtype=model.dtype, kernels=kernels), built.trainable)
    return replace(model, units=tuple(_fused(unit, kernels) for unit in model.units))


def _fused(unit: UnitSpec, kernels: Kernels) -> UnitSpec:
    moved, kept = unit.activations.elementwise, unit.activations.saved_none
    if kernels.fused_norm:
        once = PerToken(
            constant=min(moved.constant, 2 * kept.constant), per_context=min(moved.per_context, 2 * kept.per_context)
        )
        unit = replace(unit, activations=replace(unit.activations, elementwise=once))
    return in_products(unit, kernels.products) if unit.kind is UnitKind.BLOCK else unit


def _adapter(folder: Path) -> tuple[str, int]:
    """Returns the path of the base of PEFT's adapters, and their rank."""
    path = folder / "adapter_config.json"
    text = read_text(path, kind="an adapter_config.json", error=ModelError)
    found = parse_json(text, where=str(path), error=ModelError)
    base, rank = (found.get(key) if isinstance(found, dict) else None for key in ("base_model_name_or_path", "r"))
    here = [each for each in (Path(str(base)), folder / str(base)) if base and (each / "config.json").is_file()]
    if not here:
        raise ModelError(
            f"{folder} holds adapters of {base or 'a base that it does not name'}, whose config.json is not here: give "
            f"that model's config.json or directory, with --trainable lora:{rank or 'RANK'}"
        )
    return str(here[0]), rank if isinstance(rank, int) else 0


def _read(text: str, seq_len: int | None, dtype: str) -> ModelSpec:
    if text.endswith(".json") or Path(text).is_file():
        return read_config(Path(text), seq_len=seq_len, dtype=dtype)
    if Path(text).is_dir():
        return read_config(Path(text) / "config.json", seq_len=seq_len, dtype=dtype)
    if _FACTORY.fullmatch(text):
        from zeromesh.model.from_module import from_factory  # imports torch, which only a module needs

        return from_factory(text, seq_len=seq_len, dtype=dtype)
    return preset(text, dtype=dtype)
