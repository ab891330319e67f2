"""Stages and wires of a mesh axis: which of P, G and OS it shards, and in which dtypes it sends them; and well-known
systems, each a line of the notation."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.errors import InputError, NotationError, nearest, one_of
from zeromesh.wires import DTYPES, coded, spellings


class Stage(enum.Enum):
    """The ZeRO stage of one axis, with ``k`` where gathered parameters are kept from forward to backward, and ``h``
    where they are kept in the host's memory. Or that of the host itself, which says which shards lie there.

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
"""The level below the device: its memory. No axis of the mesh, it cuts nothing."""

FLOAT_DTYPES = ("fp64", "fp32", "bf16", "fp16")
"""Dtypes of parameters, gradients and masters in memory."""

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype")
"""Names of the dtypes in plans, workloads and `zm.shard`."""

_TORCH_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def dtype_name(dtype: object, field: str) -> str | None:
    """The name of a dtype that is given as torch's own, by our name or by torch's; of None, None.

    Raises:
        InputError: a model does not compute in it.

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


# PaRO (arXiv 2310.06003) names p, g, os each N (not sharded), I (inside the node) or G (global); (node, cluster).
PARO: dict[str, tuple[str, str]] = {
    "NNN": ("0", "0"),
    "NNI": ("1", "0"),
    "NII": ("2", "0"),
    "INI": ("3d", "0"),
    "III": ("3", "0"),
    "NNG": ("1", "1"),
    "NIG": ("2", "1"),
    "NGG": ("2", "2"),
    "ING": ("3d", "1"),
    "IIG": ("3", "1"),
    "IGG": ("3", "2"),
    "GNG": ("3d", "3d"),
    "GIG": ("3", "3d"),
    "GGG": ("3", "3"),
}


# Sources: DDP, ZeRO (1910.02054), HSDP = MiCS (2205.00119) = PaRO III, HFSDP (Megatron-FSDP) = pytorch#148257,
# ZeRO++ (2306.10209), Frontier (2501.04266, layout assumed), FCDP (2602.06499), ZeRO-Offload (2101.06840); FSDP2's
# CPUOffloadPolicy.
_SYSTEMS: dict[str, tuple[str, ...]] = {
    "ddp": ("0",),
    "zero1": ("1",),
    "zero2": ("2",),
    "zero3": ("3",),
    "fsdp": ("3",),
    "hsdp": ("3", "0"),
    "mics": ("3", "0"),
    "hfsdp": ("3", "1"),
    "hpz": ("3", "3k"),
    "zero++": ("3@int8/int4", "3k@int8/int4"),
    "frontier": ("3@int8/", "2@/int4", "1"),
    "fcdp": ("3", "3h"),
    "zero-offload": ("host=2", "2"),
    "cpu-offload": ("host=3", "3"),
} | {f"paro:{name}": stages for name, stages in PARO.items()}
"""Stages by level, innermost first, behind the host's if it has one. Where a mesh has more axes than a preset has
levels, the one before the outermost stands for several: "inside the node" is all but the outermost axis."""

PRESETS = tuple(_SYSTEMS)


def preset_axes(name: str, axes: Sequence[str] | None) -> str:
    """The notation of preset `name` on the given axes.

    Args:
        name: a key of `PRESETS`, in any case.
        axes: axis names, innermost first.

    Raises:
        NotationError: unknown name, no axes, or fewer axes than the preset has levels.
    """
    known = {key.lower(): key for key in PRESETS}
    if name.lower() not in known:
        raise NotationError(
            f"a strategy is axis=stage terms, as in node=3,cluster=1, or a preset; got {name!r}: "
            f"{nearest(name.lower(), known)}"
        )
    if axes is None:
        raise NotationError(f"preset {name} needs the names of the mesh's axes; give them, or write axis=stage terms")
    stages = _SYSTEMS[known[name.lower()]]
    host, stages = (stages[:1], stages[1:]) if stages[0].startswith(HOST) else ((), stages)
    if len(axes) < len(stages):
        raise NotationError(f"preset {name} has {len(stages)} levels, the mesh has {len(axes)}: {', '.join(axes)}")
    inner = max(0, len(stages) - 2)
    by_axis = stages[:inner] + stages[inner : inner + 1] * (1 + len(axes) - len(stages)) + stages[inner + 1 :]
    return ",".join([*host, *(f"{axis}={stage}" for axis, stage in zip(axes, by_axis, strict=True))])
