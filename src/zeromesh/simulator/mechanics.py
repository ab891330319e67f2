"""How an engine carries out the schedule's transfers, as data: for ours, and for engines with published tables.

[Note: Engines] Each engine runs the same schedule with its own mechanics, from its paper or code:

- zeromesh: one collective per axis, level by level; each axis has a lane for gathers and one for reductions. Small
  units are joined if no parameters are sharded.
- fsdp (torch.distributed.fsdp, FullyShardedDataParallel and fully_shard): a wrapped block is gathered and reduced over
  its whole shard group at once. Both share one communicator, so they queue in the order of issue. There is a copy into
  and out of the flat buffer each way. Reduce buffers come from the caching allocator and return to it. With two axes,
  the gradients' all-reduce between groups runs under the backward.
- deepspeed (ZeRO, ZeRO++): over the whole group, on one communicator. Parameters are gathered module by module, with a
  prefetch of 5e7 elements (`stage3_prefetch_bucket_size`). This is less than one matrix of a large model, so a block
  takes several gathers, each with its latency, and compute waits for them (DeepSpeed#1174). The gather of updated
  parameters at the end of a step is not hidden (#3338, #6876); reductions are (#6876). The host's time for a gather is
  known only for 2021 (130 us before and 250 us to launch: #1069), and left out. Quantised wires: flat gathers,
  hierarchical all-to-all for gradients (arXiv 2306.10209).
- amsp (arXiv 2311.00257, InternEvo): ranks own whole tensors. So gradients are all-reduced over all axes that replicate
  parameters, and dropped by ranks that do not own them. Updated parameters are broadcast, once per owner, under the
  next forward. Each kind of communication has its own communicators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zeromesh.errors import ConfigError, InputError, nearest
from zeromesh.model.spec import ModelSpec
from zeromesh.schedule.lanes import Lanes
from zeromesh.schedule.transfer import COPIES, GATHERS, REDUCTIONS, Direction, RouteKind
from zeromesh.schedule.unit import BUCKET_BYTES
from zeromesh.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanics:
    """See [Note: Engines].

    `owners` says how whole tensors get to their owners and back: [Note: Ways to owners] of `zeromesh.simulator.owned`.
    `launch_order` is the order of collectives in different lanes: [Note: Launch order] of `zeromesh.simulator.network`.
    """

    name: str  # as in `--engine`
    joint: bool = False  # neighbouring collectives of one kind over several axes become a flat one over all of them
    owners: Literal["exchange", "broadcast"] = "exchange"
    # The queue of each kind. Kinds without a queue wait in the lanes of their axes.
    queues: tuple[tuple[RouteKind, str], ...] = ()
    communicators: int = 2  # per axis
    gather_numel: int = 0  # limit for the elements of one gather of parameters; 0: a unit is gathered as a whole
    host_gather_s: float = 0.0  # seconds that the device waits for the host to issue a gather of parameters
    copies: int = 0  # full-size copies for each gather and each reduction
    collects: bool = False  # the computation copies gradients from autograd to where they are reduced
    planned: bool = True  # reduce buffers are allocated once; False: for each unit's backward
    workspace: bool = False  # collectives work in memory of their own, allocated once
    bucket_bytes: int = 0  # neighbouring units up to this size are joined if no parameters are sharded
    step_bytes: float = 0.0  # temporary memory of the optimizer's step, per element of the state shard; fused: none
    overlap_gather: bool = True  # False: the device stands still for every gather
    overlap_reduce: bool = True  # False: it stands still for every reduction of a micro-batch
    overlap_boundary: bool = True  # False: gradients are reduced to the state shard after the backward, not under it
    overlap_refresh: bool = True  # False: updated parameters are gathered before the next forward starts
    products: tuple[str, ...] = ()  # further dtypes of the blocks' products; fsdp's are torchao's, Megatron-FSDP's
    windowed: bool = False  # refreshes start a few units ahead of the forward, as in ours; False: all at once
    launch_order: Literal["none", "implicit"] = "none"

    def check_products(self, model: ModelSpec) -> None:
        """Raises InputError if the blocks' products are in a dtype that the engine does not support."""
        others = {matmul.dtype for unit in model.units for matmul in unit.matmuls if matmul.dtype} - {*self.products}
        if others:
            have = [name for name, engine in ENGINES.items() if others <= {*engine.products}]
            raise InputError(
                f"engine {self.name} computes products in the dtype of the activations, and they are asked for in "
                f"{', '.join(sorted(others))}: name an engine that has it, {', '.join(have)}"
            )

    def lane(self, kind: RouteKind, direction: Direction, axis: str, lanes: Lanes) -> str:
        """The lane that work of `kind` waits in: its axis's, one of the schedule's `lanes`, or a queue."""
        return dict(self.queues).get(kind) or lanes.lane(direction, axis)

    def adds(self, messages: bool) -> bool:
        """Whether a separate kernel adds a reduce-scatter's result to the accumulated gradient. A backend's own
        collective leaves its result in place. Our sums of messages add as they go, and their cost includes it."""
        return self.workspace and not messages

    def carried_out(self, strategy: Strategy) -> Strategy:
        """Returns the strategy with the collectives that `auto` means for this engine."""
        return replace(strategy, collective="flat") if self.joint and strategy.collective == "auto" else strategy


_KINDS: tuple[RouteKind, ...] = (*GATHERS, *REDUCTIONS, *COPIES)
_ONE_QUEUE = tuple((kind, "all") for kind in _KINDS)
_ONE_FOR_REDUCTIONS = tuple((kind, "reduce" if kind == "boundary" else kind) for kind in _KINDS)

ENGINES: dict[str, Mechanics] = {
    "zeromesh": Mechanics(name="zeromesh", collects=True, workspace=True, bucket_bytes=BUCKET_BYTES, windowed=True),
    "fsdp": Mechanics(
        name="fsdp",
        joint=True,
        queues=_ONE_QUEUE,
        communicators=1,
        copies=1,
        planned=False,
        products=("fp8", "mxfp8"),
    ),
    "deepspeed": Mechanics(
        name="deepspeed",
        joint=True,
        queues=_ONE_QUEUE,
        communicators=1,
        gather_numel=50_000_000,
        copies=1,
        planned=False,
        overlap_gather=False,
        overlap_refresh=False,
    ),
    "amsp": Mechanics(name="amsp", joint=True, owners="broadcast", queues=_ONE_FOR_REDUCTIONS, communicators=3),
}


def find_engine(name: str | Mechanics) -> Mechanics:
    """Returns the engine that `--engine` names, or the given mechanics themselves. Raises ConfigError, which names the
    nearest, if there is none."""
    if isinstance(name, Mechanics):
        return name
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; {nearest(name, ENGINES)}")
    return ENGINES[name]
