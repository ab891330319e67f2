"""A model as data: tensors, matrix products and activations, unit by unit.

A *unit* is gathered and released as a whole (the engine cuts a module by the same rule, see `UnitKind`). Equal units
that follow one another are one `UnitSpec` with a count, so a model of 80 equal blocks is planned as one block.

All quantities "per token" are for one token of one sequence, and for one unit of the `count`. Activations are in the
compute dtype that the spec was built for.

[Note: FLOPs] A multiply-add counts as two. `forward_flops` and `backward_flops` are those of the hardware. Causal
attention counts in full, as in torch's own counter. A fused attention's backward counts five products for the forward's
two, since it computes the scores again. `ModelSpec.model_flops_per_token` has those that MFU credits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from zeromesh.errors import ModelError, one_of, short_repr
from zeromesh.model.shape import Kernels, TransformerShape

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "int4": 0.5}


class UnitKind(StrEnum):
    """How a unit takes part in a step.

    EMBEDDING and HEAD exist only if the two weights are not tied. ROOT holds everything that is in no other unit or is
    tied across units. It is entered before all others and left after them. Its computation (the last norm, a tied head)
    follows the last block.
    """

    ROOT = "root"
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class Recomputation(StrEnum):
    """Which activations of a block are computed again in the backward pass.

    SELECTIVE keeps the outputs of attention and of every second matrix product, as torchtitan's per-operator policy
    does (pytorch/torchtitan, torchtitan/models/llama3/infra/parallelize.py); FULL keeps only the block's input.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter: name inside its unit, shape, and how training uses it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    lookup: bool = False  # read by index, never multiplied: input or position embeddings
    active_share: float = 1.0  # share of its elements that one token uses: top_k / experts
    ep: int = 1  # ranks among which ep divides the tensor by experts
    dtype: str | None = None  # of frozen codes, which no precision changes
    packed: int = 1  # codes in one element

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ModelError(f"{self.name}: every dimension must be at least 1, got shape {self.shape}")
        if not 0.0 < self.active_share <= 1.0:
            raise ModelError(f"{self.name}: active_share must lie in (0, 1], got {self.active_share}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSpec:
    """`count` products of [rows_per_token * tokens, inner] with a weight [inner, outer].

    `trainable_share` is the share of the weight that needs a gradient: the backward always computes the input's
    gradient, and the weight's only for that share. `returned` is the share of both that is computed: 0 if the product
    ran without gradients or led only to a choice, half if the input needs none. `dtype` is None for the model's own.
    """

    name: str
    inner: int
    outer: int
    rows_per_token: float = 1.0
    count: int = 1
    trainable_share: float = 1.0
    returned: float = 1.0
    dtype: str | None = None

    @property
    def forward_flops(self) -> float:
        """FLOPs per token."""
        return 2.0 * self.inner * self.outer * self.rows_per_token * self.count

    @property
    def backward_flops(self) -> float:
        """FLOPs per token."""
        return self.forward_flops * (1.0 + self.trainable_share) * self.returned


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Scores and weighted sum of one attention layer: the term that grows with the sequence.

    A query sees `window` tokens if the layer is windowed, else the whole sequence. `fused` is a kernel that keeps no
    scores, and computes them again in its backward (FlashAttention-2, arXiv 2307.08691, section 3.1.2). `causal` is the
    share for which such a kernel skips scores that a causal mask hides; other kernels compute all. `layers` is the
    number of such layers in the unit, by FLOPs. `returned` is the share that has a backward.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    fused: bool = True
    causal: float = 1.0
    layers: float = 1.0
    returned: float = 1.0

    def context(self, seq_len: int) -> int:
        return seq_len if self.window is None else min(seq_len, self.window)

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs per token."""
        return 4.0 * self.layers * self.heads * self.head_dim * self.context(seq_len)

    def backward_flops(self, seq_len: int) -> float:
        """FLOPs per token."""
        return (2.5 if self.fused else 2.0) * self.returned * self.forward_flops(seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """Bytes per token that may grow with the sequence: `constant + per_context * seq_len`."""

    constant: float = 0.0
    per_context: float = 0.0

    def at(self, seq_len: int) -> float:
        return self.constant + self.per_context * seq_len

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(constant=self.constant + other.constant, per_context=self.per_context + other.per_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """Bytes per token of one unit.

    output: handed to the next unit. saved: stays from forward to backward under each recomputation (only blocks are
    recomputed; other units save the same under all three). working: memory of its backward in addition to that at its
    peak, mainly gradients of activations. elementwise: read and written in the forward outside matrix products and
    attention, for operations that memory bandwidth limits.
    """

    output: float
    saved_none: PerToken
    saved_selective: PerToken
    saved_full: PerToken
    working: PerToken = field(default_factory=PerToken)
    elementwise: PerToken = field(default_factory=PerToken)

    def saved(self, recomputation: Recomputation) -> PerToken:
        match recomputation:
            case Recomputation.NONE:
                return self.saved_none
            case Recomputation.SELECTIVE:
                return self.saved_selective
            case Recomputation.FULL:
                return self.saved_full

    def keeping(self, per_token: float) -> ActivationSpec:
        """Returns a copy that saves `per_token` bytes more under every recomputation."""
        more = PerToken(constant=per_token)
        return replace(
            self,
            saved_none=self.saved_none + more,
            saved_selective=self.saved_selective + more,
            saved_full=self.saved_full + more,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """A collective inside a unit that the unit's computation waits for."""

    axis: str  # tp, cp, ep or pp
    operation: str  # the cost model's name; a message to the next rank is a broadcast to it
    elements: float  # of the whole buffer, per token of this rank
    backward: bool = False  # whether it is part of the backward
    kept: bool = False  # selective recomputation keeps its result
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """`count` equal units in a row, described once. `name` is the module path of the first.

    `returned`: whether it has a backward; units before all that trains have none. Its `ModelSpec` sets this.
    `num_params`, `num_trainable`: elements of one of the units.
    """

    name: str
    kind: UnitKind
    tensors: tuple[TensorSpec, ...]
    activations: ActivationSpec
    matmuls: tuple[MatmulSpec, ...] = ()
    attention: AttentionSpec | None = None
    other_forward_flops: float = 0.0  # per token: of other operations, such as a convolution
    other_backward_flops: float = 0.0
    count: int = 1
    collectives: tuple[CollectiveSpec, ...] = ()  # if a model is divided inside a data-parallel rank
    returned: bool = True
    num_params: int = field(init=False, repr=False, compare=False)
    num_trainable: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_params", sum(tensor.num_elements for tensor in self.tensors))
        trainable = sum(tensor.num_elements for tensor in self.tensors if tensor.trainable)
        object.__setattr__(self, "num_trainable", trainable)
        if self.count < 1:
            raise ModelError(f"unit {self.name}: count must be at least 1, got {self.count}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ModelError(f"unit {self.name}: tensor names must differ, repeated: {', '.join(repeated)}")

    @property
    def num_frozen(self) -> int:
        return self.num_params - self.num_trainable

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs per token; see [Note: FLOPs]."""
        attention = self.attention.forward_flops(seq_len) if self.attention else 0.0
        return sum(matmul.forward_flops for matmul in self.matmuls) + attention + self.other_forward_flops

    def backward_flops(self, seq_len: int) -> float:
        """FLOPs per token, without recomputation."""
        if not self.returned:
            return 0.0
        attention = self.attention.backward_flops(seq_len) if self.attention else 0.0
        return sum(matmul.backward_flops for matmul in self.matmuls) + attention + self.other_backward_flops

    def recomputes(self, recomputation: Recomputation) -> bool:
        """Whether part of its forward is repeated in the backward."""
        return self.kind is UnitKind.BLOCK and recomputation is not Recomputation.NONE and self.returned

    @property
    def selected_matmuls(self) -> tuple[MatmulSpec, ...]:
        """The products that selective recomputation repeats: it keeps the 1st, 3rd, 5th ... in order of execution."""
        return self.matmuls[1::2]

    def recomputed_collectives(self, recomputation: Recomputation) -> tuple[CollectiveSpec, ...]:
        """The forward's collectives that the backward repeats."""
        if not self.recomputes(recomputation):
            return ()
        selective = recomputation is Recomputation.SELECTIVE
        return tuple(one for one in self.collectives if not one.backward and not (selective and one.kept))

    def saved_bytes(self, seq_len: int, recomputation: Recomputation) -> float:
        """Bytes per token that live from the unit's forward to its backward."""
        if not self.returned:
            return 0.0
        return self.activations.saved(recomputation).at(seq_len)

    def backward_peak_bytes(self, seq_len: int, recomputation: Recomputation) -> float:
        """Bytes per token at the peak of the unit's backward: saved, recomputed and working together."""
        alive = max(self.saved_bytes(seq_len, Recomputation.NONE), self.saved_bytes(seq_len, recomputation))
        return alive + self.activations.working.at(seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFrom:
    """A transformer's shape and kernels, and its trained part as an argument of `with_trainable`."""

    shape: TransformerShape
    kernels: Kernels
    trainable: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as its units, in the order in which they are entered: root, embedding, blocks, head.

    `max_seq_len` is set if positions are looked up, so that longer sequences cannot run. `whole_bytes` are those of
    frozen parameters outside all units, since every rank holds these whole. `built_from` is set for models of
    `zeromesh.model.transformer`, to build one rank's part. `assumed` has sentences on assumptions of its reader that
    may not hold in a run.
    """

    name: str
    units: tuple[UnitSpec, ...]
    hidden: int
    num_layers: int
    vocab: int
    dtype: str = "bf16"
    max_seq_len: int | None = None
    whole_bytes: float = 0.0
    source: str = ""
    assumed: tuple[str, ...] = ()
    built_from: BuiltFrom | None = field(default=None, compare=False, repr=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.units:
            raise ModelError(f"model {self.name}: at least one unit is required, got none")
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"model {self.name}: dtype must be {one_of(self.dtype, DTYPE_BYTES)}")
        ahead = {id(unit) for unit in _before_what_trains(self.units)}
        units = (replace(unit, returned=id(unit) not in ahead) for unit in self.units)
        object.__setattr__(self, "units", tuple(units))

    @property
    def num_params(self) -> int:
        return sum(unit.count * unit.num_params for unit in self.units)

    @property
    def num_trainable(self) -> int:
        return sum(unit.count * unit.num_trainable for unit in self.units)

    def model_flops_per_token(self, seq_len: int) -> float:
        """FLOPs that MFU credits: 6 per parameter that multiplies, or 4 if it is frozen, and 12 * layers * hidden *
        seq_len. Without a backward, a third of that.

        The input embedding does not multiply; a tied one does, as the head. Only active experts count. Recomputation
        gets no credit, and causality does not halve attention.
        """
        weights = 0.0
        for unit in self.units:
            for tensor in unit.tensors:
                if not tensor.lookup:
                    cost = 6.0 if tensor.trainable else 4.0 if unit.returned else 2.0
                    weights += unit.count * cost * tensor.num_elements * tensor.packed * tensor.active_share
        forward_only = sum(u.count for u in self.units if u.kind is UnitKind.BLOCK and not u.returned)
        return weights + (12.0 * self.num_layers - 8.0 * forward_only) * self.hidden * seq_len

    def saved_activation_bytes(self, seq_len: int, recomputation: Recomputation) -> float:
        """Bytes per token of all units together, at the end of the forward."""
        return sum(unit.count * unit.saved_bytes(seq_len, recomputation) for unit in self.units)

    def peak_activation_bytes(self, seq_len: int, recomputation: Recomputation) -> float:
        """Bytes per token at the worst point of the backward, in which units leave in reverse order.

        During unit i's backward, everything is alive that the units before it saved, and i's own peak.
        """
        alive_before = 0.0
        peak = 0.0
        for unit in in_execution_order(self.units):
            last = alive_before + (unit.count - 1) * unit.saved_bytes(seq_len, recomputation)
            peak = max(peak, last + unit.backward_peak_bytes(seq_len, recomputation))
            alive_before += unit.count * unit.saved_bytes(seq_len, recomputation)
        return peak


def _before_what_trains(units: tuple[UnitSpec, ...]) -> list[UnitSpec]:
    """Returns the units into which no gradient flows. Trained matrices of the root (a tied embedding, learned
    positions) are used before all blocks."""
    order = in_execution_order(units)
    roots = (unit for unit in units if unit.kind is UnitKind.ROOT)
    early = any(tensor.trainable and len(tensor.shape) > 1 for root in roots for tensor in root.tensors)
    first = next((position for position, unit in enumerate(order) if unit.num_trainable), 0)
    return [] if early else order[:first]


def in_execution_order(units: tuple[UnitSpec, ...]) -> list[UnitSpec]:
    """Sorts units by execution. The root computes after the last block and before the head; see `UnitKind`."""
    return sorted(units, key=lambda unit: _RANK[unit.kind])


_RANK = {UnitKind.EMBEDDING: 0, UnitKind.BLOCK: 1, UnitKind.ROOT: 2, UnitKind.HEAD: 3}
