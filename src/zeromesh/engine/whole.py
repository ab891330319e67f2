"""Whole tensors in the place of slices, in states of any shape, and back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromesh.engine.control import gather_over, reduce_over
from zeromesh.engine.engine import Engine
from zeromesh.engine.param import ShardedParameter, Slice
from zeromesh.errors import InputError
from zeromesh.pieces.piece import Piece, copy_shared, whole
from zeromesh.pieces.sliced import Sliced

ON_EACH = "all ranks gather slices together, each its own: give the same values on every rank, not only on the first"


def whole_state(state: Any, engine: Engine | None = None, *, everywhere: bool = False, otherwise: str = ON_EACH) -> Any:
    """A state with whole tensors in the place of its slices: a state dict of a sharded model, a moving average, or any
    dicts, lists and tuples. All ranks that have the slices call it, those of `engine` or (None) of the job.

    With `everywhere` the tensors are on all ranks, where the slices are; else on the CPU of the job's first rank, and
    None on the others.

    Raises:
        InputError: with the words `otherwise`, on all ranks, where they have slices of different tensors.
    """
    control, job = None if engine is None else engine.control, dist.group.WORLD if dist.is_initialized() else None
    groups = [job] if control is None else [control.group, *control.beyond]
    names = repr([each.full_name for each in tree_leaves(state) if isinstance(each, Slice)])
    alike = control.same(names) if control else len({*gather_over(job, zlib.crc32(names.encode()))}) == 1
    if not alike:
        raise InputError(otherwise)

    def gathered(sliced: Slice) -> Tensor | None:
        own = sliced.piece()
        values = torch.zeros(sliced.shape, dtype=own.local.dtype, device=own.local.device)
        copy_shared(own, whole(own.name, values))
        for group in groups if values.numel() else ():
            # Elements on several ranks are bit-equal there: a maximum of bytes is their union.
            reduce_over(group, values.view(-1).view(torch.uint8), dist.ReduceOp.MAX)
        return values if everywhere else values.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else None

    return tree_map_only(Slice, gathered, state)


def sliced_like(current: Any, state: Any) -> Any:
    """`state`, with a slice in the place of each whole tensor where `current`, which is built alike, has a slice."""
    if isinstance(current, Slice) and isinstance(state, Tensor):
        return torch.zeros_like(current).copy_(state)
    if isinstance(current, Mapping) and isinstance(state, Mapping):
        return {key: sliced_like(current.get(key), value) for key, value in state.items()}
    if isinstance(current, list | tuple) and isinstance(state, list | tuple) and len(current) == len(state):
        return type(state)(map(sliced_like, current, state))
    return state


def gathered(state: Any, info: Any) -> Any:
    """`whole_state` of a state that torch has collected, if its `info` asks for that; slices that every rank has.

    Raises:
        InputError: on all ranks, where some have none.
    """
    params = (param for param in info.fqn_param_mapping if isinstance(param, ShardedParameter))
    engine = next((param.engine() for param in params), None)
    if engine is None or not info.full_state_dict:
        return state
    otherwise = (
        "full_state_dict=True gathers tensors of which every rank has a slice, and an optimizer of zm.by_owner has "
        "whole states on some ranks: save it with zm.Checkpoints, or leave full_state_dict out and save with "
        "torch.distributed.checkpoint; zm.full_state_dict(model) gathers the model"
    )
    return whole_state(state, engine, everywhere=not info.cpu_offload, otherwise=otherwise)


class Staged(Sliced, torch.Tensor):
    """A copy of a slice that no longer belongs to a model, for another thread or process to write."""

    _piece: Piece
    writes: bool

    def piece(self) -> Piece:
        return self._piece


def staged(source: Slice) -> Staged:
    """A slice's values as they are now, in the host's memory."""
    piece = source.piece(local=source.local.to("cpu", copy=True))
    found: Staged = torch.Tensor._make_subclass(Staged, piece.local)
    found._piece, found.writes = piece, source.writes
    return found
