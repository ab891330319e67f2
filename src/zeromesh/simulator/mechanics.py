"""How an engine carries out the schedule's transfers, as data: ours, and those that published tables come from.

[Note: Engines] Each is the same schedule with other mechanics, from its paper or code:

- zeromesh: one collective per axis, level by level; each axis has a lane for gathers and one for reductions.
  Small units are joined where no parameters are sharded.
- fsdp (torch.distributed.fsdp, FullyShardedDataParallel and fully_shard): a wrapped block is gathered and reduced over
  its whole shard group at once; both share one communicator, so they queue in the order of issue; a copy into and out
  of the flat buffer each way; reduce buffers come from the caching allocator and go back to it. On two axes the
  gradients' all-reduce between groups runs under the backward.
- deepspeed (ZeRO, ZeRO++): over the whole group, on one communicator; parameters are gathered module by module with a
  prefetch of 5e7 elements (`stage3_prefetch_bucket_size`), less than one product of a large model, so a block takes
  several gathers, each with its latency, and compute waits for them (DeepSpeed#1174); the
  gather of updated parameters at the end of a step is not hidden (#3338, #6876), reductions are (#6876). The host's
  time for a gather is known of 2021's alone (130 us before and 250 us to launch: #1069), and left out. Quantised
  wires: flat gathers, hierarchical all-to-all for gradients (arXiv 2306.10209).
- amsp (arXiv 2311.00257, InternEvo): whole tensors belong to ranks, so gradients are all-reduced over all axes that
  replicate parameters and dropped where not owned, and updated parameters are broadcast, once per owner, under the
  next forward; each kind of communication has its own communicators.
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

    `owners` says how whole tensors come to their owners and back: [Note: Ways to owners] of `zeromesh.simulator.owned`;
    `launch_order` is that of collectives in several lanes: [Note: Launch order] of `zeromesh.simulator.network`.
    """

    name: str  # as `--engine` spells it
    joint: bool = False  # neighbouring collectives of one kind over several axes are a flat one over their joint group
    owners: Literal["exchange", "broadcast"] = "exchange"
    # The queue that each kind waits in; those without one wait in the lanes of their axes.
    queues: tuple[tuple[RouteKind, str], ...] = ()
    communicators: int = 2  # of each axis
    gather_numel: int = 0  # elements that one gather of parameters has at most; 0: a unit is gathered as a whole
    host_gather_s: float = 0.0  # that the device stands still for the host to issue a gather of parameters
    copies: int = 0  # full-size copies beside each gather and each reduction
    collects: bool = False  # the computation copies autograd's gradients to where they are reduced
    planned: bool = True  # reduce buffers are allocated once; False: they come and go with each unit's backward
    workspace: bool = False  # collectives work in memory of their own, allocated once
    bucket_bytes: int = 0  # up to which neighbouring units are joined where no parameters are sharded
    step_bytes: float = 0.0  # that the optimizer's step needs for a moment, per element of the state shard; fused: none
    overlap_gather: bool = True  # False: the device stands still for every gather
    overlap_reduce: bool = True  # False: it stands still for every reduction of a micro-batch
    overlap_boundary: bool = True  # False: gradients are reduced to the state shard after the backward, not under it
    overlap_refresh: bool = True  # False: updated parameters are gathered before the next forward starts
    products: tuple[str, ...] = ()  # other dtypes of the blocks' products; torchao's and Megatron-FSDP's are FSDP's
    windowed: bool = False  # refreshes start a few units ahead of the forward, as ours do; False: all with the step
    launch_order: Literal["none", "implicit"] = "none"

    def check_products(self, model: ModelSpec) -> None:
        """Raises InputError where the blocks' products are in a dtype that the engine does not compute in."""
        others = {matmul.dtype for unit in model.units for matmul in unit.matmuls if matmul.dtype} - {*self.products}
        if others:
            have = [name for name, engine in ENGINES.items() if others <= {*engine.products}]
            raise InputError(
                f"engine {self.name} computes products in the dtype of the activations, and they are asked for in "
                f"{', '.join(sorted(others))}: name an engine that has it, {', '.join(have)}"
            )

    def lane(self, kind: RouteKind, direction: Direction, axis: str, lanes: Lanes) -> str:
        """The lane that work of `kind` waits in: that of its axis, one of the schedule's `lanes`, or a queue."""
        return dict(self.queues).get(kind) or lanes.lane(direction, axis)

    def adds(self, messages: bool) -> bool:
        """Whether a kernel of its own adds a reduce-scatter's result to the accumulated gradient: a backend's own
        leaves it in place. Our sums of messages add as they go, which is counted in their cost."""
        return self.workspace and not messages

    def carried_out(self, strategy: Strategy) -> Strategy:
        """The strategy with the collectives that this engine's `auto` means."""
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
    """The engine that `--engine` names; mechanics of one's own as they are. Raises ConfigError, which names the
    nearest, if there is none."""
    if isinstance(name, Mechanics):
        return name
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; {nearest(name, ENGINES)}")
    return ENGINES[name]
