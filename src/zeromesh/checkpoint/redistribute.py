"""Copies values from slices of one layout into slices of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.engine.control import Control, gather_over
from zeromesh.engine.elements import Elements
from zeromesh.engine.param import Slice, tell_of_write
from zeromesh.errors import InputError, InternalError

Run = tuple[int, int, int]
"""(start in the flattened whole tensor, length, start in the slice)."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copies a run of one tensor's elements from one slice to another: its start in each, and its length."""

    tensor: int
    source: int
    target: int
    length: int


def copy_values(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies the values of `sources` into `targets`, between slices in any two layouts.

    This is a collective: all ranks of the model call it with the same tensors in the same order. Targets and sources
    may be parameters, gradients, clones and other results of elementwise functions. Values are converted to the
    target's dtype. Each element is sent once to each rank that needs it, in one exchange. Nothing is sent between
    slices of the same elements.

    Args:
        targets: slices, written in place.
        sources: as many slices, whose whole tensors have the same shapes.

    Raises:
        InputError: on every rank, if a tensor is not a slice, shapes differ, or the models are on different ranks.
        MismatchError, CommunicationError: not all ranks call it with the same tensors.

    Examples:
        >>> import torch, zeromesh as zm
        >>> student, teacher = (zm.shard(torch.nn.Linear(4, 4), None, "node=3") for _ in range(2))
        >>> zm.copy_values(list(teacher.parameters()), list(student.parameters()))
    """
    pairs = list(zip(_slices(targets), _slices(sources), strict=False))
    if len(targets) != len(sources) or any(target.shape != source.shape for target, source in pairs):
        shapes = [[tuple(each.shape) for each in tensors] for tensors in (targets, sources)]
        raise InputError(
            f"zm.copy_values needs a source of the same shape for each target; got {shapes[0]}, {shapes[1]}"
        )
    for target, _ in pairs:
        tell_of_write(target)
    apart = [pair for pair in pairs if pair[0].elements != pair[1].elements]
    with torch.no_grad():
        for target, source in pairs:
            if target.elements == source.elements:
                target.local.copy_(source.local)
        if apart:
            _exchange(apart)


def _slices(tensors: Sequence[Tensor]) -> list[Slice]:
    for at, each in enumerate(tensors):
        if not isinstance(each, Slice):
            raise InputError(
                f"zm.copy_values takes slices: parameters of sharded models, their gradients, and what elementwise "
                f"functions make of them; number {at} is {type(each).__name__} of {tuple(each.shape)}. A whole tensor "
                f"is copied by `.copy_`"
            )
    return [each for each in tensors if isinstance(each, Slice)]


def _exchange(pairs: Sequence[tuple[Slice, Slice]]) -> None:
    control = _control_of([each.elements for pair in pairs for each in pair])
    own = [(_runs(target.elements), _runs(source.elements)) for target, source in pairs]
    if control.world == 1:
        (moves,) = _plan([own], 0)
        return _take(pairs, moves, _give(pairs, moves))
    names = ", ".join(f"{target.elements} from {source.elements.layout}" for target, source in pairs)
    with control.meeting("zm.copy_values", names):
        group = control.everyone()
        assert group is not None  # there is more than one rank
        rank, held = group.rank(), gather_over(group, own)
        plans = [_plan(held, target) for target in range(len(held))]
        sent = [_give(pairs, plan[rank]) for plan in plans]
        sizes = [sum(move.length * pairs[move.tensor][1].element_size() for move in each) for each in plans[rank]]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=sent[0].device)
        dist.all_to_all_single(received, torch.cat(sent), sizes, [each.numel() for each in sent], group=group)
    for moves, data in zip(plans[rank], torch.split(received, sizes), strict=True):
        _take(pairs, moves, data)


def _control_of(elements: Sequence[Elements]) -> Control:
    controls = [each.control for each in elements if each.control is not None]
    if len({control.ranks for control in controls}) != 1:
        raise InputError("zm.copy_values copies between models on the same ranks; these are on different ones")
    return controls[0]


def _runs(elements: Elements) -> list[Run]:
    """Returns the runs of the flattened whole tensor that a slice holds."""
    held = elements.piece(elements.name, torch.empty(elements.numel, device="meta"))
    return [(row.start, row.local.numel(), int(row.local.storage_offset())) for row in held.rows() if row.local.numel()]


def _plan(held: Sequence[Sequence[tuple[list[Run], list[Run]]]], target: int) -> list[list[Move]]:
    """The runs that rank `target` receives, by sender. The sender is the rank itself if it holds a run, else the next
    rank that does, so that replicas share the work. `held` has by rank, for each tensor, the target's runs and the
    source's runs there."""
    found: list[list[Move]] = [[] for _ in held]
    for tensor, (missing, _) in enumerate(held[target]):
        for step in range(len(held)):
            source = (target + step) % len(held)
            if missing:
                missing = _meet(tensor, missing, held[source][tensor][1], found[source])
        if missing:
            raise InternalError(f"no rank has elements {missing} of tensor {tensor}")
    return found


def _meet(tensor: int, wanted: list[Run], there: list[Run], found: list[Move]) -> list[Run]:
    """Appends the runs that are in both lists, sorted by start, to `found`, and returns the rest of `wanted`."""
    left = list[Run]()
    for start, length, at in wanted:
        done = start
        for begin, size, offset in there:
            low, high = max(begin, done), min(begin + size, start + length)
            if low < high:
                if done < low:
                    left.append((done, low - done, at + done - start))
                found.append(Move(tensor, offset + low - begin, at + low - start, high - low))
                done = high
        if done < start + length:
            left.append((done, start + length - done, at + done - start))
    return left


def _give(pairs: Sequence[tuple[Slice, Slice]], moves: Sequence[Move]) -> Tensor:
    """Returns the bytes to send to one rank."""
    parts = [pairs[move.tensor][1].local[move.source :][: move.length].view(torch.uint8) for move in moves]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=pairs[0][0].device)


def _take(pairs: Sequence[tuple[Slice, Slice]], moves: Sequence[Move], data: Tensor) -> None:
    """Copies the bytes from one rank into place."""
    at = 0
    for move in moves:
        target, source = pairs[move.tensor]
        size = move.length * source.element_size()
        values = data[at : at + size].clone().view(source.dtype)  # clone() aligns the bytes for their dtype
        target.local[move.target :][: move.length].copy_(values)
        at += size
