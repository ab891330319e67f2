"""Stages and wires of a mesh axis: which of P, G and OS it shards, and in which dtypes it sends them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zeromesh.errors import InputError, NotationError, one_of
from zeromesh.wires import DTYPES, coded, spellings


class Stage(enum.Enum):
    """The ZeRO stage of one axis, or of the host. ``k`` keeps gathered parameters from forward to backward, and ``h``
    keeps them in the host's memory. The host's own stage says which shards lie there.

    ========  ============  ==============================  ==========================
    stage     sharded       every micro-batch               every step
    ========  ============  ==============================  ==========================
    ``0``     nothing       -                               all-reduce G
    ``1``     OS            -                               reduce-scatter G, all-gather P
    ``2``     G, OS         reduce-scatter G                all-gather P
    ``3``     P, G, OS      all-gather P, reduce-scatter G  -
    ``3d``    P, OS         all-gather P                    reduce-scatter G
    ========  ============  ==============================  ==========================
    """

    ZERO = "0"
    ONE = "1"
    TWO = "2"
    THREE = "3"
    THREE_KEPT = "3k"
    DEFERRED = "3d"
    DEFERRED_KEPT = "3dk"
    THREE_HOSTED = "3h"
    DEFERRED_HOSTED = "3dh"

    @classmethod
    def parse(cls, text: str) -> Stage:
        """The stage spelt `text`; raises NotationError for any other spelling."""
        try:
            return cls(text)
        except ValueError:
            raise NotationError(f"stage must be {one_of(text, [stage.value for stage in cls])}") from None

    @property
    def shards_params(self) -> bool:
        return self.value.startswith("3")

    @property
    def shards_grads(self) -> bool:
        """Whether gradients are reduced over this axis after every micro-batch."""
        return self.value in ("2", "3", "3k", "3h")

    @property
    def shards_states(self) -> bool:
        return self is not Stage.ZERO

    @property
    def deferred(self) -> bool:
        return self.value.startswith("3d")

    @property
    def kept(self) -> bool:
        return self.value.endswith(("k", "h"))

    @property
    def hosted(self) -> bool:
        """Whether its kept copy lies on the host."""
        return self.value.endswith("h")

    @property
    def significance(self) -> int:
        """Rank of this stage in the order in which buffers are chunked: 3 first, then 2 or 3d, then 1."""
        return 3 - self.shards_params - self.shards_grads - self.shards_states


HOST = "host"
"""The level below the device: its host's memory. It is no axis of the mesh and divides nothing."""

FLOAT_DTYPES = ("fp64", "fp32", "bf16", "fp16")
"""Dtypes of parameters, gradients and masters in memory."""

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype")
"""Names of the dtypes in plans, workloads and `zm.shard`."""

_TORCH_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def dtype_name(dtype: object, field: str) -> str | None:
    """Our name of a dtype, which is given as torch's object, by torch's name or by ours. None stays None.

    Raises:
        InputError: models do not compute in this dtype.

    >>> dtype_name("torch.bfloat16", "param_dtype"), dtype_name("fp32", "grad_dtype")
    ('bf16', 'fp32')
    """
    text = str(dtype).removeprefix("torch.")
    name = _TORCH_NAMES.get(text, text)
    if dtype is not None and name not in FLOAT_DTYPES:
        raise InputError(f"{field} must be {one_of(text, FLOAT_DTYPES)}")
    return None if dtype is None else name


_FEEDBACK = "+ef"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Dtypes on one axis's wire for parameters and for gradients; None is the engine's default (`param_dtype`,
    `reduce_dtype`). With `feedback` the rounding error of a quantised gradient is added to the next one."""

    param: str | None = None
    grad: str | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        for part in ("param", "grad"):
            dtype = getattr(self, part)
            if dtype is None:
                continue
            form = coded(dtype)
            if form is not None:
                object.__setattr__(self, part, str(form))  # int8[128] is int8
            elif dtype not in DTYPES:
                raise NotationError(f"a wire must be {one_of(dtype, spellings())}")
        if self.feedback and not coded(self.grad):
            raise NotationError(
                f"{_FEEDBACK} needs quantised gradients, as in @/int4{_FEEDBACK}; the gradients of this wire are "
                f"{self.grad or 'not quantised'}"
            )

    @classmethod
    def parse(cls, text: str) -> Wire:
        """Parses the text behind ``@``: ``P``, ``P/G``, ``P/`` or ``/G``; ``G+ef`` has error feedback."""
        text, plus, suffix = text.partition("+")
        if plus and plus + suffix != _FEEDBACK:
            raise NotationError(f"only {_FEEDBACK} may follow a wire's dtypes, as in @/int4+ef; got {plus + suffix!r}")
        param, _, grad = text.partition("/")
        if not param and not grad:
            raise NotationError(f"a wire must name at least one dtype, as in @int8 or @/int4; got '@{text}'")
        return cls(param=param or None, grad=grad or None, feedback=bool(plus))

    @property
    def quantised(self) -> bool:
        return any(coded(dtype) is not None for dtype in (self.param, self.grad))

    def __str__(self) -> str:
        return "" if self == DEFAULT_WIRE else f"@{self.param or ''}/{self.grad or ''}{_FEEDBACK * self.feedback}"


DEFAULT_WIRE = Wire()
