"""The public functions for steps of sharded models. Names and meanings follow FSDP2 where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine, Pipeline
from zeromesh.engine.hooks import install_on_method
from zeromesh.engine.lifecycle import Weight
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.reductions import slice_norms
from zeromesh.errors import InputError, ModelError


def accumulate(
    model: nn.Module, *, last: bool, weight: float | None = None, total: float | None = None
) -> AbstractContextManager[Weight]:
    """Marks one micro-batch, forward and backward, of a step with several.

    Gradients are averaged over ranks and summed over micro-batches. With weights (such as numbers of tokens) they are
    the weighted mean over all ranks and micro-batches: make each loss the mean of its micro-batch, undivided. If
    experts get tokens of several ranks, the loss must carry the weight:
    ``with zm.accumulate(...) as weigh: weigh(loss).backward()``. This form works in every model.

    Args:
        model: a sharded model.
        last: True if the optimizer steps after this micro-batch. Its backward reduces over all axes and shows `.grad`.
        weight: weight of this micro-batch on this rank. It may differ between ranks, and may be 0.
        total: sum of the weights of all micro-batches on all ranks in this step, the same on every rank; see
            `sum_over_ranks`.

    Raises:
        ModelError: `model` is not sharded, the weight is negative or has no total, only some micro-batches of the step
            have weights, the loss does not carry a weight that it must carry, or an earlier backward raised (call
            `zm.zero_grad` to begin again).
    """
    engine = engine_of(model)
    return engine.accumulate(last, Weight(None if weight is None else _scale(weight, total, engine.control.size)))


def _scale(weight: float, total: float | None, ranks: int) -> float:
    """The factor of a gradient, given that reductions average over `ranks`. It is known before the step, so messages
    and rounding errors owed to the next step have the size of a gradient."""
    if not weight >= 0:
        raise ModelError(f"the weight of a micro-batch must be zero or more (its number of tokens, say); got {weight}")
    if total is None or not total >= weight:
        raise ModelError(
            f"a micro-batch with a weight needs total=, the sum of weights over all micro-batches and ranks of a step; "
            f"got weight={weight}, total={total}: zm.accumulate(model, ..., total=zm.sum_over_ranks(model, own)), "
            f"where own is the sum of this rank's weights in the step"
        )
    return weight * ranks / total if total else 0.0


def sum_over_ranks(model: nn.Module, value: float) -> float:
    """Sums a number (such as this rank's tokens of a step) over all ranks of the model's mesh. All of them call it.

    Raises:
        ModelError: `model` is not sharded.
    """
    return engine_of(model).control.total(value)


def clip_grad_norm_(
    model: nn.Module | Sequence[nn.Module], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients so that their joint norm is at most `max_norm`.

    Args:
        model: a sharded model, several on the same ranks, or all of this rank's stages of a pipeline (`zm.pipeline`).
            With stages, the norm covers all stages.
        max_norm: largest norm of the whole gradient.
        norm_type: p of the p-norm, above 0; may be inf.
        error_if_nonfinite: raise if the norm is nan or infinite, before any gradient is scaled.

    Returns:
        The norm of the whole gradient before scaling, 0-d, the same on every rank.

    Raises:
        ModelError: `model` is not sharded.
        InputError: `norm_type` is not above 0, or the models have no joint norm.
        RuntimeError: with `error_if_nonfinite`, as in torch.
    """
    engines = [engine_of(each) for each in ([model] if isinstance(model, nn.Module) else model)]
    pipeline = require_joint(engines)
    shown, totals = list[tuple[list[ShardedParameter], list[Tensor]]](), list[Tensor]()
    for engine in engines:
        own = [param for param in engine.optimizer_params() if param.grad is not None]
        known: Sequence[Tensor | None] = ()
        if norm_type == 2 and engine.backend.host is not None:
            known = engine.backend.beside().known_norms(own)
        grads = [param.grad.local for param in own]  # type: ignore[union-attr]  # slices
        shown.append((own, grads))
        norms = slice_norms(grads, [param.elements.spans for param in own], norm_type, known)
        norms = norms.to(torch.promote_types(grads[0].dtype, torch.float32)) if own else torch.zeros(1)
        totals.append(torch.linalg.vector_norm(norms, norm_type))
    total = max(totals, key=lambda each: each.dtype.itemsize)  # one without gradients is in fp32
    if pipeline is not None or len(engines) != 1:
        dtype = total.dtype if pipeline is None else pipeline.norm_dtype
        total = joint_norm(totals, norm_type, pipeline, engines[0].control.device).to(dtype)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped; drop error_if_nonfinite to "
            "continue"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for engine, (own, grads) in zip(engines, shown, strict=True):
        if any(param.steps_there for param in own):
            from zeromesh.engine.beside import leave_to_step  # of host=

            grads = leave_to_step(engine.backend, own, grads, factor)
        for device in {grad.device for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
    return total


def refresh(model: nn.Module) -> None:
    """Gathers and casts parameters again. Call it after changing them by hand through `.local`.

    Raises:
        ModelError: `model` is not sharded.
    """
    engine_of(model).changed()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes a method a forward of the model, as FSDP2's `register_fsdp_forward_method` does.

    The method then computes with whole parameters, and its outputs can be trained. All ranks call it together.

    Args:
        module: a sharded model, or a module of one that has parameters.
        name: name of the method, such as ``"encode"``; ``"forward"`` for a layer that is called without the model
            around it.

    Raises:
        ModelError: `module` has no sharded parameters.
    """
    for param in module.parameters():
        if isinstance(param, ShardedParameter) and (engine := param.engine()) is not None:
            return install_on_method(engine, module, name)
    raise ModelError(f"{type(module).__name__} has no sharded parameters: call zm.shard first")


def zero_grad(model: nn.Module) -> None:
    """Drops all gradients, also sums of micro-batches that have not been reduced by a last one.

    Raises:
        ModelError: `model` is not sharded.
    """
    engine_of(model).discard_grads()


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
    """The norm of this rank's models, whose `norms` are the same on all ranks of each mesh, and of the other stages;
    0-d, the same on all ranks."""
    own: Tensor = torch.linalg.vector_norm(torch.stack([norm.double().to(device) for norm in norms]), order)
    if pipeline is not None:
        # Gathered, not reduced: a maximum over ranks drops nan or keeps it by their order.
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size(pipeline.group))]
        dist.all_gather(found, own, group=pipeline.group)
        own = torch.linalg.vector_norm(torch.stack(found), order)
    return own
