"""DeepSpeed's engines as peers in `shaped.py`, if DeepSpeed is installed:

    pip install wheel && DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8

(its set-up imports torch; nothing is compiled). Tested with 0.19.8 and torch 2.13 on gloo: ZeRO-1, 2 and 3, and hpZ (a
second copy of the parameters inside the node) run in fp32 and bf16. ZeRO++'s quantised weights (qwZ) and gradients
(qgZ) do not: their kernels have no CPU build ("This op had not been implemented on CPU backend"). MiCS was removed in
0.19. Stage 0 is left to DDP.

The engines live in the same processes as the other systems, on the same default group. DeepSpeed replaces nothing in
torch on import, but its engines leave changes behind for the whole process. ZeRO-3 leaves its own
`torch.nn.functional.linear`, which is installed here only during its steps. hpZ leaves its group, which every later
ZeRO-3 would use, and which is removed again. (Its autocast would change the buckets of later engines as well; it is not
used.)

Settings: buckets of one block for stages 2 and 3, like FSDP2's units, and of the whole model for stage 1, whose
gradients are whole anyway. No `overlap_comm`: on the CPU it has no streams, its reductions block, and it would take
second buffers. Stage 3 gathers a block at once (leaf modules), and the next block ahead; norms stay whole. "kept" is
DeepSpeed's default, which keeps parameters that are used again within 1e9 elements, so all. Bucketed gradients are
all-reduced, or with "to owners" reduced to the rank that keeps them. Without clipping, stages 1 and 2 need no norm;
stage 3 always computes it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.peers import Step, make_model


def installed() -> str:
    """The version of DeepSpeed; "" if it is not installed."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return ""


def deepspeed_peers(sizes: tuple[int, int]) -> dict[str, Callable[..., Step]]:
    """Returns the systems by name; none if DeepSpeed is not installed."""
    if not installed():
        return {}
    _start()
    node = sizes[1]
    return {
        "DeepSpeed ZeRO-1": partial(deepspeed_step, stage=1),
        "DeepSpeed ZeRO-1, to owners": partial(deepspeed_step, stage=1, owners=True),
        "DeepSpeed ZeRO-2": partial(deepspeed_step, stage=2),
        "DeepSpeed ZeRO-2, to owners": partial(deepspeed_step, stage=2, owners=True),
        "DeepSpeed ZeRO-3": partial(deepspeed_step, stage=3),
        "DeepSpeed ZeRO-3, kept": partial(deepspeed_step, stage=3, kept=True),
        f"DeepSpeed ZeRO-3, hpZ {node}": partial(deepspeed_step, stage=3, node=node),
    }


def deepspeed_bytes(name: str, whole: int, block: int, item: int, sizes: tuple[int, int]) -> int:
    """Bytes per rank as DeepSpeed allocates them: `item` bytes of a parameter, fp32 gradients, masters and moments.

    This favours DeepSpeed: its temporary flat copies are left out, and norms count as sharded.
    """
    world, node = math.prod(sizes), sizes[1]
    if "ZeRO-1" in name:  # with bf16 parameters, gradients are accumulated in fp32 copies
        return (item + 4) * whole + 12 * whole // world
    if "ZeRO-2" in name:
        return item * whole + item * block + 16 * whole // world
    held = (16 if item == 4 else 16 + item) * whole // world  # fp32 parameters are their own masters
    gathered = item * whole if "kept" in name else 2 * item * block
    return held + gathered + (item * whole // node if "hpZ" in name else 0) + item * block


def deepspeed_step(
    size: str,
    dtype: torch.dtype,
    data: list[torch.Tensor],
    *,
    stage: int,
    owners: bool = False,
    kept: bool = False,
    node: int = 1,
) -> Step:
    """Makes a training step with DeepSpeed's engine.

    Args:
        stage: ZeRO stage: 1, 2 or 3.
        owners: reduce gradients to the rank that keeps them, instead of all-reducing the bucket; for stages 1 and 2.
        kept: gathered parameters stay between forward and backward; for stage 3.
        node: number of ranks that hold a second copy of the parameters (hpZ), 1 for none; for stage 3.
    """
    import deepspeed

    model: Any = make_model(size)
    whole, block = _elements(model), _elements(model.model.layers[0])
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": stage == 2,
        "reduce_bucket_size": whole if stage == 1 else block,
    }
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
        reuse = {"stage3_max_live_parameters": 2 * block, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": block}
        zero |= {} if kept else reuse
        zero |= {"zero_hpz_partition_size": node} if node > 1 else {}
    else:
        zero |= {"use_multi_rank_bucket_allreduce": not owners}
        zero |= {} if stage == 1 and dtype is torch.bfloat16 else {"compute_grad_norm": False}
    config = {
        "train_batch_size": len(data) * len(data[0]) * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": len(data[0]),
        "gradient_accumulation_steps": len(data),
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    if dtype is torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    held = functional.linear
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    linear, functional.linear = functional.linear, held
    if node > 1:
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # else the next ZeRO-3 would have it as well

    def step() -> None:
        functional.linear = linear
        for batch in data:
            engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
            engine.step()  # updates at the last micro-batch only
        functional.linear = held

    step()  # stage 3 records the order of its modules in the first step, and gathers ahead from the second on
    return step


@cache
def _start() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # An all-reduce through shared memory that only its inference calls; every rank would compile it first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")  # takes the existing group


def _elements(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
