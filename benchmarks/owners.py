"""Optimizers that own whole tensors, against AdamW on slices, and against gathering every matrix everywhere.

    make bench-owners ARGS="--out benchmarks/results/owners.json"

Needs root: clusters are emulated (`lab`); a tree without rates is loopback. All systems of a cell live in the same
processes and take turns, in an order that changes from round to round. A turn is two steps, of which the second is
timed. Figures are medians, and ratios the medians of single rounds' ratios. One thread per rank, fp32, one micro-batch
of 2 x 64 tokens, strategy node=3,cluster=1.

    AdamW on slices          what the others are held against
    AdamW by owners          AMSP's own setting, in the engine
    Muon by owners           on the blocks' matrices, AdamW on slices for the rest
    ... less Newton-Schulz   the same with no iterations: what the step takes beside them, bytes and all
    Muon, gathered           FSDP2 over all ranks: momenta on slices, each update gathered on every rank, which iterates

The optimizer's part is `step` between two barriers, until masters have been updated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz

import zeromesh as zm
from benchmarks.harness import in_turns, on_ranks, parser, save
from benchmarks.peers import batches, fsdp, make_model
from benchmarks.shaped_table import mesh_of
from zeromesh.engine.api import engine_of
from zeromesh.launch.ranks import Ranks
from zeromesh.schedule.step import sent_bytes_per_axis

CELLS = ("7M 2,2 5", "7M 2@200mbit,2 3", "7M 2@1gbit,4 3", "30M 2,2 3", "30M 2@1gbit,2 3")
"""Model, tree and number of rounds of each cell."""

SLICES, OWNERS, MUON, REST, GATHERED = (
    "AdamW on slices",
    "AdamW by owners",
    "Muon by owners",
    "Muon by owners less Newton-Schulz",
    "Muon, gathered",
)
BUCKET_BYTES = 8 << 20
LR = 1e-4


@dataclass(slots=True, kw_only=True)
class System:
    """A model in training, and the durations of its steps."""

    model: nn.Module
    optimizers: list[Any]
    data: torch.Tensor
    step_s: list[float] = field(default_factory=list)
    part_s: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Runs a step. Returns the seconds of the optimizers."""
        self.model(input_ids=self.data, labels=self.data, use_cache=False).loss.backward()
        dist.barrier()
        start = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        dist.barrier()
        part = time.perf_counter() - start
        self.model.zero_grad()
        return part

    def timed(self) -> float:
        self.step()
        dist.barrier()
        start = time.perf_counter()
        part = self.step()
        dist.barrier()
        self.step_s.append(time.perf_counter() - start)
        self.part_s.append(part)
        if not isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            engine_of(self.model).at_rest()
        dist.barrier()
        return part

    def sent(self) -> dict[str, int]:
        """Bytes that a rank sends on each axis in a step; empty for FSDP2."""
        if isinstance(self.model, torch.distributed.fsdp.FSDPModule):
            return {}
        own = sent_bytes_per_axis(engine_of(self.model).schedule, micro_batches=1)
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, own)
        return {axis: round(statistics.mean(each[axis] for each in counts)) for axis in own}


def divided(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Returns the matrices of blocks, and the other parameters."""
    matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    own = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in own]


def ours(size: str, mesh: Any, data: torch.Tensor, make: Callable[[nn.Module], list[Any]]) -> System:
    model = zm.shard(make_model(size), mesh, "node=3,cluster=1", bucket_bytes=BUCKET_BYTES)
    return System(model=model, optimizers=make(model), data=data)


def slices(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, fused=True)]


def adamw_by_owners(model: nn.Module) -> list[Any]:
    return [zm.by_owner(torch.optim.AdamW, model.parameters(), lr=LR, fused=True)]


def muon_by_owners(model: nn.Module, **options: Any) -> list[Any]:
    matrices, rest = divided(model)
    muon = zm.by_owner(torch.optim.Muon, matrices, lr=LR, batched=True, **options)
    return [muon, torch.optim.AdamW(rest, lr=LR, fused=True)]


class GatheredMuon(torch.optim.Optimizer):
    """Muon with momenta on slices, in which every rank gathers every update."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            state["momentum"].lerp_(param.grad, 0.05)
            update = param.grad.lerp(state["momentum"], 0.95)
            assert isinstance(update, DTensor)
            whole = _zeropower_via_newtonschulz(update.full_tensor(), (3.4445, -4.775, 2.0315), 5, 1e-7)
            own = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
            param.mul_(1 - LR * 0.1).sub_(own, alpha=LR)


def gathered(size: str, mesh: Any, data: torch.Tensor) -> System:
    model = fsdp(make_model(size), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)))
    matrices, rest = divided(model)
    return System(model=model, optimizers=[GatheredMuon(matrices), torch.optim.AdamW(rest, lr=LR)], data=data)


def run(ranks: Ranks, *, model: str, rounds: int) -> dict[str, Any]:
    """A task of all ranks."""
    torch.set_num_threads(1)
    mesh, data = ranks.mesh, batches(1, 2, 64)[0]
    systems = {
        SLICES: ours(model, mesh, data, slices),
        OWNERS: ours(model, mesh, data, adamw_by_owners),
        MUON: ours(model, mesh, data, muon_by_owners),
        REST: ours(model, mesh, data, partial(muon_by_owners, ns_steps=0)),
        GATHERED: gathered(model, mesh, data),
    }
    for system in systems.values():
        system.step()  # the first step brings masters to their owners
    in_turns({name: system.timed for name, system in systems.items()}, rounds, warm_up=0)
    rows = {
        name: {
            "step_s": round(statistics.median(system.step_s), 4),
            "optimizer_s": round(statistics.median(system.part_s), 4),
            "sent_bytes": system.sent(),
        }
        for name, system in systems.items()
    }
    return {"rows": rows, "ratios": ratios(systems)}


def ratios(systems: dict[str, System]) -> dict[str, float]:
    """Returns the ratios that have goals."""

    def ratio(one: list[float], other: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)

    return {
        "Muon by owners less Newton-Schulz / AdamW on slices, step": ratio(
            systems[REST].step_s, systems[SLICES].step_s
        ),
        "AdamW by owners / AdamW on slices, step": ratio(systems[OWNERS].step_s, systems[SLICES].step_s),
        "Muon, gathered / Muon by owners, optimizer": ratio(systems[GATHERED].part_s, systems[MUON].part_s),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cells", nargs="+", default=CELLS, help="model, tree and rounds of each, in one word")
    args = options.parse_args()
    cells: list[dict[str, Any]] = []
    for cell in args.cells:
        model, tree, rounds = cell.split()
        shaped = "@" in tree
        mesh = mesh_of(tree) if shaped else dict(zip(("cluster", "node"), map(int, tree.split(",")), strict=True))
        given = {"tree": tree if shaped else "", "model": model, "rounds": int(rounds)}
        found = on_ranks("benchmarks.owners:run", mesh, **given)
        cells.append(given | {"tree": tree} | found)
        save(args.out, cells=cells)


if __name__ == "__main__":
    main()
