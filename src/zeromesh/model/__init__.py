"""Parameters, FLOPs and activation bytes of a model, per unit. Torch-free except `from_module`."""

from zeromesh.model.load import load_model
from zeromesh.model.presets import preset, preset_names
from zeromesh.model.spec import (
    ActivationSpec,
    AttentionSpec,
    MatmulSpec,
    ModelSpec,
    PerToken,
    Recomputation,
    TensorSpec,
    UnitKind,
    UnitSpec,
)
from zeromesh.model.trainable import with_trainable

__all__ = [
    "ActivationSpec",
    "AttentionSpec",
    "MatmulSpec",
    "ModelSpec",
    "PerToken",
    "Recomputation",
    "TensorSpec",
    "UnitKind",
    "UnitSpec",
    "load_model",
    "preset",
    "preset_names",
    "with_trainable",
]
