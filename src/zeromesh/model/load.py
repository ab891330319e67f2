"""One entrance for every way to name a model."""

from __future__ import annotations

import re
from pathlib import Path

from zeromesh.errors import ModelError
from zeromesh.model.huggingface import read_config
from zeromesh.model.presets import preset
from zeromesh.model.shape import EAGER, Kernels
from zeromesh.model.spec import ModelSpec
from zeromesh.model.trainable import with_trainable

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_model(
    text: str, *, seq_len: int | None = None, trainable: str = "all", dtype: str = "bf16", kernels: Kernels = EAGER
) -> ModelSpec:
    """The model that `text` names.

    Args:
        text: a preset, the path of a Hugging Face `config.json`, or `package.module:function` returning an
            `nn.Module`. The last, and configs of architectures that have no reader of their own, import torch.
        seq_len: tokens in a sequence; those two are run on fake tensors of that length, and need it.
        trainable: see `with_trainable`.
        dtype: of compute and activations.
        kernels: which operations are fused, for presets and configs; a module shows it itself.

    Raises:
        ModelError: no such model, an invalid file, or a sequence longer than the model's learned positions.
    """
    model = with_trainable(_read(text, seq_len, dtype, kernels), trainable)
    if seq_len is not None and model.max_seq_len is not None and seq_len > model.max_seq_len:
        raise ModelError(
            f"model {model.name} has {model.max_seq_len} learned positions, and the sequence has {seq_len} tokens; "
            f"use --seq-len {model.max_seq_len} or less, or a config with more positions"
        )
    return model


def _read(text: str, seq_len: int | None, dtype: str, kernels: Kernels) -> ModelSpec:
    if text.endswith(".json") or Path(text).is_file():
        return read_config(Path(text), seq_len=seq_len, dtype=dtype, kernels=kernels)
    if Path(text).is_dir():
        return read_config(Path(text) / "config.json", seq_len=seq_len, dtype=dtype, kernels=kernels)
    if _FACTORY.fullmatch(text):
        from zeromesh.model.from_module import from_factory  # imports torch: only for a module

        return from_factory(text, seq_len=seq_len, dtype=dtype)
    return preset(text, dtype=dtype, kernels=kernels)
