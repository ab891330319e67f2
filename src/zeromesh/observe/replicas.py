"""Checks that ranks which must hold the same bytes do: compares a digest of everything replicated over all ranks.

[Note: Replicas] A layout, of the model or of a part, makes several ranks hold the same bytes, and all compute them
identically to the bit. These tensors are equal over these axes:

    master, optimizer states   axes of stage 0
    params                     axes that do not shard parameters: stages 0, 1 and 2
    kept copies                those, and the axes that keep

Faulty memory, a kernel that depends on timing, different software, or parameters changed by hand on one rank can break
this. Training then goes on and looks healthy, but learns a mixture. The model's buffers (running statistics) belong to
each rank, and are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.engine.api import engine_of
from zeromesh.engine.control import gather_over
from zeromesh.engine.elements import Home
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.optim import take_slices
from zeromesh.engine.vouched import stored
from zeromesh.errors import MismatchError
from zeromesh.strategy import Axis

CHUNK = 1 << 18
"""8-byte words that are weighted at once: 6 MiB of temporaries."""

# Odd constants from the generators splitmix64 and PCG. Any that mix high bits into low ones would do.
_GOLDEN, _MIX, _STEP = -7046029254386353131, -4658895280553007687, 6364136223846793005

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Something that this rank and others must hold with equal bytes."""

    unit: str
    name: str  # for messages
    home: Home
    axes: tuple[Axis, ...]  # over which it must be equal
    parts: Callable[[], Iterable[Named]]  # its tensors, with the same names in the same order on every rank


def check_replicas(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] = ()) -> None:
    """Compares replicated tensors on all ranks. Every rank of the mesh calls it, between two steps.

    It reads every replicated byte once, and exchanges 8 bytes per rank for each kind of tensor of a unit. Without
    replicas it does nothing.

    Args:
        model: a sharded model.
        optimizers: optimizers whose states are compared as well.

    Raises:
        MismatchError: on every rank, if bytes differ. It names ranks, axis, unit and tensor.
        CommunicationError: a rank did not take part.
    """
    engine = engine_of(model)
    engine.at_rest(follow=True)  # copies that have not yet followed their masters would differ
    everyone = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    held = list(_held(engine, everyone))
    if not held:
        return
    ranks, digests = _exchange(engine, held)
    drifts = list(_drifts(engine, held, digests))
    if drifts:
        raise MismatchError(_message(engine, drifts, ranks))


def digest(tensor: Tensor) -> Tensor:
    """Returns a digest of a tensor's bytes as a 0-d int64 tensor on its device. Any single changed bit changes it.

    The digest is the sum of the words times odd weights, modulo 2**64, chunk by chunk. Integer sums do not depend on
    the order in which a device adds.
    """
    # `reshape` and not `view`, for tensors of any strides.
    data = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    whole = data.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    head = data[:whole]
    if head.storage_offset() % 8 or head.data_ptr() % 8:
        head = head.clone()
    words = head.view(torch.int64)
    weights = _weights(min(CHUNK, max(1, words.numel())), data.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK]
        total = total * _STEP + (chunk * weights[: chunk.numel()]).sum()
    return total * _STEP + rest.view(torch.int64)[0] * _GOLDEN


def _weights(count: int, device: torch.device) -> Tensor:
    mixed = torch.arange(1, count + 1, device=device) * _GOLDEN
    return ((mixed ^ (mixed >> 29)) * _MIX) | 1


def _held(engine: Engine, optimizers: Sequence[Optimizer]) -> Iterator[Held]:
    """Yields the things to compare: [Note: Replicas]."""
    for unit in engine.units:
        for buffer in unit.buffers:
            home = engine.homes[buffer.spec.part]
            layout = home.layout
            dropped = [axis for axis in layout.param_axes if not axis.stage.kept]
            states, params, kept = (
                tuple(axis for axis in layout.axes if axis not in sharded and axis.size > 1)
                for sharded in (layout.significant, layout.param_axes, dropped)
            )
            found: list[tuple[str, tuple[Axis, ...], Callable[[], Iterable[Named]]]] = [
                ("parameters", params, partial(_whole, buffer, buffer.params))
            ]
            if buffer.kept is not None:
                found.append(("kept copy", kept, partial(_whole, buffer, buffer.kept)))
            if buffer.master is not None and not buffer.master_in_params:
                found.append(("master copy", states, partial(_masters, buffer)))
            if buffer.master is not None and optimizers:
                found.append(("optimizer states", states, partial(_states, buffer, optimizers)))
            for name, axes, parts in found:
                if axes:
                    yield Held(unit=unit.name, name=name, home=home, axes=axes, parts=parts)


def _whole(buffer: FlatShards, values: Tensor) -> list[Named]:
    names = [place.info.name for place in buffer.places]
    return [(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", values)]


def _masters(buffer: FlatShards) -> list[Named]:
    return [(param.full_name, param.local) for param in buffer.optimizer_params]


def _states(buffer: FlatShards, optimizers: Sequence[Optimizer]) -> Iterator[Named]:
    for optimizer in optimizers:
        take_slices(optimizer)
    for param in buffer.optimizer_params:
        for optimizer in optimizers:
            # `get`, since indexing would add a state for a parameter that has none.
            state: dict[str, Any] = optimizer.state.get(param, {})
            for key in sorted(state):
                if isinstance(state[key], Tensor | int | float):
                    for name, part in stored(key, torch.as_tensor(state[key])).items():
                        yield f"{name} of {param.full_name}", part


def _exchange(engine: Engine, held: Sequence[Held]) -> tuple[list[int], Tensor]:
    """Returns the global ranks, and the digests of each thing, both by rank of the mesh, as int64 on the host."""
    control = engine.control
    table = torch.zeros(control.size, 1 + len(held), dtype=torch.int64, device=control.device)
    # Each rank adds its digests to zeros: a reduction is the one collective that every backend has on its device.
    table[control.rank, 0] = 0 if control.group is None else dist.get_rank()
    table[control.rank, 1:] = torch.stack([_digest_of(thing, control.device) for thing in held])
    table = control.reduce(table).cpu()
    return table[:, 0].tolist(), table[:, 1:]


def _digest_of(thing: Held, device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=device)
    for _, tensor in thing.parts():
        total = total * _STEP + digest(tensor).to(device)
    return total


Seats = Sequence[tuple[int, dict[str, int]]]
"""By rank of the model's mesh: which of a part's meshes it is in, and its coordinates there."""

Drift = tuple[Held, list[int], list[int]]
"""Something held, the ranks of the mesh that must agree on it, and their digests, which differ."""


def _seats(engine: Engine, home: Home) -> Seats:
    """Finds the coordinates of all ranks. Collective if the part has its own mesh."""
    control, own = engine.control, home.control
    same = [(0, rank) for rank in range(control.size)]
    everyone = same if own is control else gather_over(control.group, (own.source, own.rank))
    return [(mesh, home.layout.coordinates(rank)) for mesh, rank in everyone]


def _drifts(engine: Engine, held: Sequence[Held], digests: Tensor) -> Iterator[Drift]:
    homes = {thing.axes: thing.home for thing in held}  # no two layouts have an axis in common
    by_axes: dict[tuple[Axis, ...], tuple[list[list[int]], Tensor]] = {}
    for axes, home in homes.items():
        names, found = {axis.name for axis in axes}, dict[tuple[int, ...], list[int]]()
        for rank, (mesh, coordinates) in enumerate(_seats(engine, home)):
            own = tuple(index for name, index in coordinates.items() if name not in names)
            found.setdefault((mesh, *own), []).append(rank)
        firsts = torch.zeros(engine.control.size, dtype=torch.int64, device="cpu")
        for ranks in found.values():
            firsts[ranks] = ranks[0]
        by_axes[axes] = list(found.values()), firsts
    for thing, values in zip(held, digests.unbind(1), strict=True):
        groups, firsts = by_axes[thing.axes]
        # Usually nothing differs, and with many ranks a loop over them would take longer than the digests.
        for ranks in [] if torch.equal(values, values[firsts]) else groups:
            seen = values[ranks].tolist()
            if len(set(seen)) > 1:
                yield thing, ranks, seen


def _message(engine: Engine, drifts: Sequence[Drift], ranks: Sequence[int]) -> str:
    """Words the first drift. Collective: the ranks compare it part by part."""
    thing, group, values = drifts[0]
    (value, most), (_, next_most), *_ = Counter(values).most_common()
    differing = [rank for rank, own in zip(group, values, strict=True) if own != value]
    model = next(rank for rank in group if rank not in differing)
    seats = _seats(engine, thing.home)
    parts = _differing_parts(engine, thing, model, differing[0])
    (_, one), (_, two) = seats[model], seats[differing[0]]
    axes = ", ".join(axis.name for axis in thing.axes if one[axis.name] != two[axis.name])
    if most == next_most:  # there is no majority
        who = f"ranks {', '.join(map(str, sorted(ranks[rank] for rank in group)))} have drifted apart"
    else:
        odd = ", ".join(map(str, sorted(ranks[rank] for rank in differing)))
        who = f"rank{'s' * (len(differing) > 1)} {odd} drifted away from rank {ranks[model]}"
    also = f", and {len(parts) - 1} more" if len(parts) > 1 else ""
    elsewhere = f" ({len(drifts) - 1} more differences in other places)" if len(drifts) > 1 else ""
    return (
        f"{who}: over axis {axes} they must hold the same {thing.name} of unit {thing.unit or '(root)'!r} to the bit, "
        f"and differ in {parts[0]}{also}{elsewhere}. What was learnt since they were last equal cannot be trusted: go "
        f"on from a checkpoint of before, and look for faulty memory and for unequal software"
    )


def _differing_parts(engine: Engine, thing: Held, one: int, two: int) -> list[str]:
    """Returns the names of the parts that differ between two ranks of the mesh. Collective."""
    own = [(name, int(digest(tensor))) for name, tensor in thing.parts()]
    parts = {rank: dict(digests) for rank, digests in gather_over(engine.control.group, (engine.control.rank, own))}
    names = dict.fromkeys([*parts[one], *parts[two]])
    return [name for name in names if parts[one].get(name) != parts[two].get(name)]
