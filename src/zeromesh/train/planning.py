"""`strategy = "auto"`: the planner's choice for the ranks that there are, made anew at every start."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from zeromesh.cluster import Cluster
from zeromesh.launch.ranks import from_first
from zeromesh.model import Recomputation
from zeromesh.model.from_module import from_module
from zeromesh.planner import Planned, Workload, plan
from zeromesh.train.config import TrainConfig
from zeromesh.units import format_bytes, format_seconds

REASONS = 3
"""Alternatives that are named beside the choice; `zeromesh plan` has them all."""


def choose_strategy(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """The configuration with the strategy that the planner chooses for its mesh, which rank 0 prints; collective.

    Args:
        config: of a run whose strategy is "auto".
        model: what is to be trained, not sharded yet.

    Raises:
        InputError: nothing fits.
    """

    def choose() -> tuple[str, str]:
        planned = plan_run(config, model)
        return str(planned.best.candidate.strategy), explain(planned)

    strategy, text = from_first(choose, "waiting for rank 0 to plan")
    if dist.get_rank() == 0:
        print(text, flush=True)
    return config.model_copy(update={"strategy": strategy})


def plan_run(config: TrainConfig, model: nn.Module) -> Planned:
    """Plans the step that the loop will run.

    Where the global batch does not divide, some ranks run sequences that count nothing: the planner is given the batch
    with those, since they take as long as any.
    """
    cluster, batch = config.hardware(), config.batch
    share = config.micro_batches * batch.micro
    workload = Workload(
        seq_len=config.data.seq_len,
        global_batch_tokens=share * config.world * config.data.seq_len,
        micro_batch=batch.micro,
        recomputation=Recomputation(config.model.activation_checkpointing),
        param_dtype=config.dtypes.param,
        reduce_dtype=config.dtypes.reduce,
        grad_dtype=config.dtypes.grad,
        master_dtype=config.dtypes.master,
    )
    spec = from_module(model, seq_len=config.data.seq_len, dtype=config.dtypes.param)
    return plan(spec, cluster, workload)


def explain(planned: Planned) -> str:
    """The choice, what it takes, and why not another."""
    best, cluster = planned.best, planned.cluster
    lines = [
        f"strategy auto: {best.candidate.strategy} for {_sizes(cluster)} of {cluster.name}, predicted"
        f" {format_seconds(best.simulation.step_s)} a step and {format_bytes(best.simulation.memory.total)} a device"
    ]
    # By strategy: the runner-up is often a well-known one, and is listed under both names.
    others = {reason.strategy: reason for reason in planned.why if reason.outcome != "chosen"}
    lines += [f"  not {reason.name} ({reason.strategy}): {reason.text}" for reason in others.values()]
    return "\n".join(lines[: 1 + REASONS])


def _sizes(cluster: Cluster) -> str:
    return " x ".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
