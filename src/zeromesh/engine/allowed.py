"""Which of torch's functions may act on slices of tensors: [Note: Slices] of `zeromesh.engine.param`.

A name stands for all spellings that torch has of it: function, method, the one in place, operators and foreach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]

_SPELLINGS = ("{}", "{}_", "__{}__", "__r{}__", "__i{}__", "_foreach_{}", "_foreach_{}_")


def spelt(names: str, spellings: Iterable[str] = ("{}",)) -> frozenset[Function]:
    """The functions, of `torch`, `torch.Tensor` and `torch.linalg`, that have one of these names, however spelt."""
    spaces = torch, Tensor, torch.linalg
    every = [getattr(s, how.format(name), None) for how in spellings for name in names.split() for s in spaces]
    # Slots of every Python object are not torch's.
    return frozenset(f for f in every if callable(f) and f is not getattr(object, f.__name__, None))


def _writes(function: Function) -> bool:
    name = function.__name__
    return name.startswith("__i") and name != "__invert__" if name.endswith("__") else name.endswith("_")


# An element of their result depends on the same element of each argument, and on no other.
_elementwise = spelt(
    """
    abs absolute neg negative positive sign sgn signbit add sub subtract rsub mul multiply div divide true_divide
    truediv floor_divide floordiv fmod remainder mod pow square sqrt rsqrt reciprocal exp exp2 expm1 log log1p log2
    log10 logaddexp sin cos tan sinh cosh tanh atan atan2 arctan2 hypot erf sigmoid relu round floor ceil trunc frac
    clamp clamp_min clamp_max clip maximum minimum fmax fmin lerp addcmul addcdiv nan_to_num copysign heaviside
    xlogy isnan isinf isfinite isclose eq ne lt le gt ge greater greater_equal less less_equal not_equal and or xor
    invert logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where
    masked_fill copy fill zero
    """,
    _SPELLINGS,
)
# Steps of torch.optim, which write their first arguments.
_fused = spelt("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")
IN_PLACE = frozenset({nn.init.constant_, *filter(_writes, _elementwise), *_fused})
OUT_OF_PLACE = _elementwise - IN_PLACE
ZEROING = spelt("zero_ _foreach_zero_")
# Copies and new tensors with an element for each of the slice's.
COPIES = spelt(
    "clone to type type_as float double half bfloat16 cpu cuda contiguous zeros_like ones_like empty_like full_like"
)
RANDOM = spelt("rand_like randn_like")
# Tensors of a size that is given.
SIZED = spelt("new_zeros new_ones new_empty new_full new_tensor")
# One value for the elements that an index chooses.
CHOOSING = spelt("__setitem__ index_fill index_fill_")
# Numbers of the whole tensor, over all ranks: `zeromesh.engine.reductions`.
NUMBERS = frozenset({"item", "__float__", "__int__", "__bool__", "__index__", "is_nonzero"})
REDUCTIONS = spelt(f"sum mean amax max amin min count_nonzero any all dot vdot equal allclose {' '.join(NUMBERS)}")
NORMS = spelt("norm vector_norm linalg_vector_norm linalg_norm _foreach_norm")
UNSCALING = spelt("_amp_foreach_non_finite_check_and_unscale_")
# The same for the whole tensor as for a slice of it. Properties of this rank's memory (stride, data_ptr,
# untyped_storage ...) are not among them.
_ATTRIBUTES = """
    device dtype layout itemsize requires_grad is_leaf grad_fn _grad_fn grad grad_dtype output_nr retains_grad name
    names volatile _version _base _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_xpu is_xla is_ipu
    is_mps is_mtia is_maia is_meta is_nested is_mkldnn is_quantized is_sparse is_sparse_csr is_vulkan
    _python_dispatch _cdata _has_grad_dtype_override
"""
PROPERTIES = spelt(
    """
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_pinned is_shared is_contiguous
    element_size get_device has_names retain_grad result_type _is_view _has_grad_dtype_override
    """
) | frozenset(
    getattr(getattr(Tensor, name), slot)
    for name in _ATTRIBUTES.split()
    for slot in ("__get__", "__set__")
    if hasattr(getattr(Tensor, name, None), slot)
)
