"""Known models by name; the shapes are data in `presets.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from zeromesh.errors import ModelError, nearest
from zeromesh.model.shape import EAGER, Kernels, TransformerShape
from zeromesh.model.spec import ModelSpec
from zeromesh.model.transformer import build


@cache
def preset_shapes() -> dict[str, TransformerShape]:
    known = tomllib.loads(resources.files("zeromesh.model").joinpath("presets.toml").read_text())
    models = {name: {"family": "llama"} | fields for name, fields in known["models"].items()}
    bases = {name: known["families"].get(fields["family"], {}) for name, fields in models.items()}
    return {name: TransformerShape(name=name, **(bases[name] | fields)) for name, fields in models.items()}


def preset_names() -> tuple[str, ...]:
    return tuple(preset_shapes())


def preset_shape(name: str) -> TransformerShape:
    """Returns the shape of a preset. Raises ModelError, which names the nearest, if there is no such preset."""
    shapes = preset_shapes()
    if name not in shapes:
        raise ModelError(
            f"unknown model {name!r}, neither a preset nor the path of a Hugging Face config.json nor "
            f"package.module:function returning an nn.Module; {nearest(name, shapes)}"
        )
    return shapes[name]


def preset(name: str, *, dtype: str = "bf16", kernels: Kernels = EAGER) -> ModelSpec:
    """Returns the `ModelSpec` of a preset.

    >>> preset("llama-7b").num_params
    6738415616
    """
    return build(preset_shape(name), dtype=dtype, kernels=kernels)
