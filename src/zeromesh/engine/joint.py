"""The norm of several models' gradients: of a pipeline's stages, or of models on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.engine.engine import Engine, Pipeline
from zeromesh.errors import InputError


def require_joint(engines: Sequence[Engine]) -> Pipeline | None:
    """The pipeline that `engines` are this rank's part of; None of models that are in none.

    Raises:
        InputError: they have no joint norm: the other ranks would wait, or sum another.
    """
    pipeline = next((engine.pipeline for engine in engines if engine.pipeline is not None), None)
    if pipeline is None:
        ranks = [dist.get_process_group_ranks(e.control.group) if e.control.group else [] for e in engines]
        if ranks.count(ranks[0]) != len(ranks):
            raise InputError(
                f"a joint norm needs models on the same ranks, or all of this rank's stages of one pipeline; these are "
                f"on ranks {' and '.join(map(str, ranks))}: for stages, call zm.pipeline(stages) first"
            )
        return None
    own = [engine() for engine in pipeline.stages.values()]
    if len(engines) != len(own) or any(engine not in own for engine in engines):
        raise InputError(
            f"this rank holds stages {', '.join(map(str, pipeline.stages))} of a pipeline, and the norm covers all of "
            f"them; got {len(engines)} model(s): pass the models of exactly these stages, as a list, on all ranks"
        )
    return pipeline


def joint_norm(norms: Sequence[Tensor], order: float, pipeline: Pipeline | None, device: torch.device) -> Tensor:
    """The norm of all that `norms` are the norms of, here and in the other stages; 0-d, the same on all ranks.

    Args:
        norms: of this rank's models, each the same on all ranks of its mesh.
        order: p of the p-norm.
        pipeline: that they are a part of.
    """
    own: Tensor = torch.linalg.vector_norm(torch.stack([norm.double().to(device) for norm in norms]), order)
    if pipeline is not None:
        # Gathered, not reduced: a maximum over ranks drops nan or keeps it by their order.
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size(pipeline.group))]
        dist.all_gather(found, own, group=pipeline.group)
        own = torch.linalg.vector_norm(torch.stack(found), order)
    return own
