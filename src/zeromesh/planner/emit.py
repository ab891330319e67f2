"""Plans as configurations of other engines, if they can express them: docs/planning.md has a table.

An emitter that refuses names the part of the strategy that its engine cannot express. All engines have fp32 masters,
send parameters in the compute dtype, and send gradients in one dtype on all levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import NoReturn

from jinja2 import Environment, PackageLoader, StrictUndefined

from zeromesh.errors import InputError
from zeromesh.model.spec import ModelSpec, UnitKind
from zeromesh.parallel import WHOLE
from zeromesh.strategy import Layout
from zeromesh.strategy.plan import Plan
from zeromesh.strategy.stage import HOST

Parts = list[tuple[str, int]]

_TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def emit_fsdp2(plan: Plan, model: ModelSpec) -> str:
    """A Python module with `shard(model)` and `train_step(...)` for torch's `fully_shard`. Raises InputError, which
    names the part, if FSDP2 cannot express the strategy."""
    layout = Layout.of(plan.strategy, plan.mesh)
    plan = _in_one_dtype("FSDP2", plan, layout)
    if plan.grad_dtype not in (None, "fp32"):
        _refuse("FSDP2", plan, f"{plan.grad_dtype} gradient shards: it accumulates in its parameters' dtype, fp32")
    parts = _parts("FSDP2", plan, layout, alone="3")
    inner, rest = parts[0], parts[1:]
    sharded = inner[0].removesuffix("k")
    if sharded not in ("3", "3d"):
        _refuse(
            "FSDP2",
            plan,
            f"stage {inner[0]} on the innermost part: its parameters, gradients and optimizer states are sharded alike"
            + ("; with 0 everywhere use DistributedDataParallel" if inner[0] == "0" else ""),
        )
    kept = [part for part in rest if part[0] == sharded + "k"]
    replicas = [part for part in rest if part[0] == "0"]
    if [*kept, *replicas] != rest or len(kept) > 1 or (kept and replicas):
        wrong = next((part for part in rest if part[0] not in ("0", sharded + "k")), rest[0])
        _refuse("FSDP2", plan, f"stage {wrong[0]} over {wrong[1]} ranks outside a group of stage {inner[0]}")
    reshard: bool | int = inner[1] if kept else not inner[0].endswith("k")
    return _render(
        "fsdp2.py.j2",
        plan,
        model,
        replicas=replicas[0][1] if replicas else 1,
        shards=inner[1] * (kept[0][1] if kept else 1),
        reshard=reshard,
        deferred=sharded == "3d",
        offloads=_offloads("FSDP2", plan, sharded, replicas),
    )


def _offloads(engine: str, plan: Plan, sharded: str, replicas: Parts) -> bool:
    """Whether FSDP2 keeps its shards in the host's memory."""
    host = plan.strategy.host.value
    if host not in ("0", sharded):
        _refuse(engine, plan, f"{HOST}={host} with stage {sharded}: its offload is {HOST}={sharded} there")
    if host != "0" and replicas:
        _refuse(engine, plan, f"{HOST}={host} beside replicas: it corrupted gradients there (pytorch/pytorch#180665)")
    return host != "0"


def emit_deepspeed(plan: Plan, model: ModelSpec) -> str:
    """A DeepSpeed configuration file. Raises InputError, which names the part that DeepSpeed cannot express."""
    layout = Layout.of(plan.strategy, plan.mesh)
    parts = _parts("DeepSpeed", plan, layout)
    zero = _deepspeed_zero(plan, parts) | _deepspeed_wires(plan, layout)
    plan = _reduced_in(_fp32_masters("DeepSpeed", plan), _sent(plan, layout)[1])
    config = {
        "train_batch_size": plan.micro_batch * plan.micro_batches * layout.world,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,
        **_deepspeed_precision(plan, zero["stage"] == 0),
        "zero_optimization": zero,
    }
    return json.dumps(config, indent=2)


_OFFLOADED = {("1", "1"): 1, ("2", "2"): 1, ("3", "2"): 1, ("3", "3"): 2}
"""Sections of DeepSpeed's offload by stage and stage of the host."""


def _deepspeed_zero(plan: Plan, parts: Parts) -> dict[str, object]:
    stages, host = [stage for stage, _ in parts], plan.strategy.host.value
    common: dict[str, object] = {"overlap_comm": True, "contiguous_gradients": True}
    if host != "0":
        count = _OFFLOADED.get((stages[0], host), 0) if len(parts) == 1 else 0
        if not count:
            pairs = ", ".join(f"{HOST}={host} with {stage}" for stage, host in _OFFLOADED)
            _refuse("DeepSpeed", plan, f"{HOST}={host} with {' and '.join(stages)}: its offload is {pairs}")
        sections = ("offload_optimizer", "offload_param")[:count]
        common |= {section: {"device": "cpu", "pin_memory": True} for section in sections}
    if stages[0] == "3":
        # By default it keeps parameters that are used again within 1e9 elements: in smaller models all, as 3k does.
        common |= {"stage3_max_reuse_distance": 0}
    if len(parts) == 1 and stages[0] in "0123":
        return {"stage": int(stages[0]), **(common if stages[0] != "0" else {})}
    if stages == ["3", "3k"]:
        return {"stage": 3, "zero_hpz_partition_size": parts[0][1], **common}
    if stages == ["3", "0"]:
        _refuse("DeepSpeed", plan, "3 inside and 0 outside is MiCS, which DeepSpeed 0.19 removed")
    wrong = next((part for part in parts if part[0] not in ("0", "1", "2", "3")), parts[-1])
    _refuse("DeepSpeed", plan, f"stage {wrong[0]} over {wrong[1]} ranks beside other stages: it has one for all ranks")


def _deepspeed_precision(plan: Plan, replicated: bool) -> dict[str, object]:
    """Dtypes of parameters, gradients and of the reduction, which would otherwise be in the parameters' dtype.

    Stage 0 goes through autocast, with parameters, gradients and states of 16 bytes as in the other stages: there,
    DeepSpeed 0.19 refuses fp32 gradients beside `bf16`, and with bf16 gradients it starts Adam with an empty step,
    which counts and makes the first steps shorter.
    """
    param, reduce = _computed_in(plan), plan.reduce_dtype or plan.param_dtype
    known: dict[str, object] = {"communication_data_type": reduce} if reduce else {}
    if replicated and param == "fp32" and plan.grad_dtype not in (None, "fp32"):
        _refuse("DeepSpeed", plan, f"{plan.grad_dtype} gradients beside fp32 parameters where nothing is sharded")
    if replicated and param != "fp32":
        return known | {"torch_autocast": {"enabled": True, "dtype": _TORCH[param].removeprefix("torch.")}}
    if param != "fp32":
        known[param] = {"enabled": True}
    if plan.grad_dtype:
        known["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    return known


def _deepspeed_wires(plan: Plan, layout: Layout) -> dict[str, object]:
    params, grads = _sent(plan, layout)
    known: dict[str, object] = {}
    if any(axis.wire.feedback for axis in layout.axes if axis.size > 1):
        _refuse("DeepSpeed", plan, "error feedback (+ef): its quantised gradients have none")
    if params == {"int8"} and layout.param_axes:
        known["zero_quantized_weights"] = True
    elif params - {_computed_in(plan)}:
        _refuse("DeepSpeed", plan, f"parameter wires {_names(params)}: it quantises to int8 on all levels of stage 3")
    if grads == {"int4"} and layout.param_axes:
        known["zero_quantized_gradients"] = True
    elif not _one_lossless(grads):
        _refuse("DeepSpeed", plan, f"gradient wires {_names(grads)}: it quantises to int4 on all levels of stage 3")
    return known


def emit_megatron_fsdp(plan: Plan, model: ModelSpec) -> str:
    """A Python module with `shard(model, optimizer)` for the megatron-fsdp package. Raises InputError, which names the
    part, if Megatron-FSDP cannot express the strategy."""
    layout = Layout.of(plan.strategy, plan.mesh)
    plan = _in_one_dtype("Megatron-FSDP", plan, layout)
    parts = _parts("Megatron-FSDP", plan, layout)
    (stage, shards), rest = parts[0], parts[1:]
    if plan.strategy.hosted:
        _refuse("Megatron-FSDP", plan, "shards in the host's memory: Megatron-LM has an offload (megatron-lm)")
    if stage not in ("0", "1", "2", "3"):
        _refuse("Megatron-FSDP", plan, f"stage {stage}: it neither keeps gathered parameters nor defers reductions")
    if len(rest) > 1:
        _refuse("Megatron-FSDP", plan, f"{len(parts)} different parts: it has an inner and an outer group")
    outer = rest[0] if rest else ("0", 1)
    if outer[0] not in ("0", "1") or (outer[0] == "1" and stage != "3"):
        _refuse("Megatron-FSDP", plan, f"stage {outer[0]} outside a group of stage {stage}: only 0, or 1 outside 3")
    return _render(
        "megatron_fsdp.py.j2",
        plan,
        model,
        replicas=outer[1],
        shards=shards,
        stage=int(stage),
        outer_stage=int(outer[0]),
    )


def emit_megatron_lm(plan: Plan, model: ModelSpec) -> str:
    """Arguments of Megatron-LM's pretraining scripts, with comments on differences. Raises InputError, which names the
    part, if Megatron-LM cannot express the strategy."""
    engine, parallel, layout = "Megatron-LM", plan.parallel or WHOLE, Layout.of(plan.strategy, plan.mesh)
    plan = _in_one_dtype(engine, plan, layout)
    (stage, _), *rest = _parts(engine, plan, layout, cut=True, shared=True)
    replicas = rest[0][1] if rest else 1
    if stage not in ("0", "1") or len(rest) > 1 or any(outer != "0" for outer, _ in rest):
        stages = ", ".join([stage, *(outer for outer, _ in rest)])
        _refuse(engine, plan, f"stages {stages}: 0 or 1 inside, 0 outside of 1")
    if (host := plan.strategy.host.value) not in ("0", stage):
        _refuse(engine, plan, f"{HOST}={host} with stage {stage}: its offload is {HOST}=1 with 1")
    if parallel.pp_schedule not in ("1f1b", "interleaved"):
        _refuse(engine, plan, f"the schedule {parallel.pp_schedule}: 1f1b or interleaved")
    cuts = parallel.pp * parallel.pp_chunks
    if model.num_layers % cuts:
        _refuse(engine, plan, f"{model.num_layers} layers over {cuts} stages, which do not divide them")
    ranks = layout.world // parallel.cp
    found: dict[str, object] = {
        "tensor-model-parallel-size": parallel.tp,
        "context-parallel-size": parallel.cp,
        "pipeline-model-parallel-size": parallel.pp,
        "num-layers-per-virtual-pipeline-stage": model.num_layers // cuts if parallel.pp_chunks > 1 else None,
        "expert-model-parallel-size": parallel.ep,
        "sequence-parallel": parallel.tp > 1 and parallel.sequence_parallel,
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": plan.micro_batch * plan.micro_batches * ranks,
        "seq-length": plan.seq_len,
        _computed_in(plan): _computed_in(plan) != "fp32",
        "accumulate-allreduce-grads-in-fp32": _computed_in(plan) != "fp32" and plan.grad_dtype in (None, "fp32"),
        "use-distributed-optimizer": stage == "1",
        "num-distributed-optimizer-instances": replicas if stage == "1" and replicas > 1 else None,
        "optimizer-cpu-offload": host != "0",
        "optimizer-offload-fraction": plan.strategy.percent / 100 if host != "0" else None,
        "use-precision-aware-optimizer": host != "0",
        "recompute-granularity": plan.recompute if plan.recompute != "none" else None,
        "recompute-method": "uniform" if plan.recompute == "full" else None,
        "recompute-num-layers": 1 if plan.recompute == "full" else None,
    }
    given = {name: value for name, value in found.items() if value is not None and value is not False}
    sums, sent = plan.grad_dtype or "fp32", plan.reduce_dtype or _computed_in(plan)
    differs = f"# Gradients are sent in {sums}, as they are summed; the plan has {sent}.\n" if sums != sent else ""
    return differs + "\n".join(f"--{name}" + ("" if value is True else f" {value}") for name, value in given.items())


_TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}


def emit_torchtitan(plan: Plan, model: ModelSpec) -> str:
    """The sections `parallelism`, `training` and `activation_checkpoint` of a torchtitan job file.

    Keys are those of torchtitan/config/job_config.py in pytorch/torchtitan@000204a. Raises InputError, which names the
    part, if torchtitan cannot express the strategy.
    """
    engine, parallel, layout = "torchtitan", plan.parallel or WHOLE, Layout.of(plan.strategy, plan.mesh)
    plan = _in_one_dtype(engine, plan, layout)
    # Its pipelines reduce once a step (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync).
    known = ("3d", "3dk") if parallel.pp > 1 else ("3", "3k")
    (stage, shards), *rest = _parts(engine, plan, layout, alone=known[0], cut=True)
    if stage not in known or len(rest) > 1 or any(outer != "0" for outer, _ in rest):
        wrong = next(((s, n) for s, n in rest if s != "0"), (stage, shards))
        _refuse(engine, plan, f"stage {wrong[0]} over {wrong[1]} ranks: {' or '.join(known)} inside, 0 outside of it")
    if shards % parallel.cp or shards % parallel.ep:
        _refuse(engine, plan, f"cp or ep that is wider than the {shards} ranks that share parameters: both lie in them")
    if parallel.tp > 1 and not parallel.sequence_parallel:
        _refuse(engine, plan, "tp without sequence parallelism")
    if _computed_in(plan) == "fp16":
        _refuse(engine, plan, "parameters in fp16: bf16 or fp32")
    stages = parallel.pp * parallel.pp_chunks
    if model.num_layers % stages:
        _refuse(engine, plan, f"{model.num_layers} layers over {stages} stages, which do not divide them")
    replicas = rest[0][1] if rest else 1
    offloads = _offloads(engine, plan, stage.removesuffix("k"), rest)
    return _render(
        "torchtitan.toml.j2",
        plan,
        model,
        parallel=parallel,
        schedule=_TITAN_SCHEDULES[parallel.pp_schedule],
        layers_per_stage=model.num_layers // stages,
        replicas=replicas,
        shards=shards // parallel.cp,
        ranks=replicas * shards // parallel.cp,
        reshard="never" if stage.endswith("k") else "always",
        dtype=_TORCH[_computed_in(plan)].removeprefix("torch."),
        offloads=offloads,
    )


EMITTERS: dict[str, Callable[[Plan, ModelSpec], str]] = {
    "fsdp2": emit_fsdp2,
    "deepspeed": emit_deepspeed,
    "megatron-lm": emit_megatron_lm,
    "megatron-fsdp": emit_megatron_fsdp,
    "torchtitan": emit_torchtitan,
}


ENGINES = {"fsdp": "fsdp2", "deepspeed": "deepspeed"}
"""By simulated engine, the emitter that knows which layouts it can run."""


def _parts(
    engine: str, plan: Plan, layout: Layout, *, alone: str = "0", cut: bool = False, shared: bool = False
) -> Parts:
    """(stage, ranks) of neighbouring axes of one stage together, innermost first, without axes of one rank. Refuses
    options; models divided beside data, unless `cut`; and shares of the host, unless `shared`. A single rank has the
    stage `alone`."""
    if plan.parallel is not None and not cut:
        _refuse(
            engine, plan, f"{plan.parallel}: what is emitted shards over data-parallel ranks alone (see torchtitan)"
        )
    default = replace(plan.strategy, collective="auto", overlap="all", prefetch=1, step="host")
    if plan.strategy != default:
        options = str(plan.strategy).partition(";")[2]
        _refuse(engine, plan, f"the option {options}: its own are other ones")
    if plan.strategy.percent < 100 and not shared:
        _refuse(engine, plan, f"{HOST}[{plan.strategy.percent}%]: its offload is for all tensors")
    axes = [axis for axis in layout.axes if axis.size > 1]
    parts = [(stage, layout.degree(list(same))) for stage, same in groupby(axes, key=lambda axis: axis.stage.value)]
    return parts or [(alone, 1)]


def _in_one_dtype(engine: str, plan: Plan, layout: Layout) -> Plan:
    """The plan with the dtype of all its gradients' wires as `reduce_dtype`; refuses other wires."""
    params, grads = _sent(plan, layout)
    if params - {_computed_in(plan)}:
        _refuse(engine, plan, f"parameter wires {_names(params)}: it sends them in the dtype that it computes in")
    if not _one_lossless(grads):
        _refuse(engine, plan, f"gradient wires {_names(grads)}: it reduces in one lossless dtype on all levels")
    return _reduced_in(_fp32_masters(engine, plan), grads)


def _sent(plan: Plan, layout: Layout) -> tuple[set[str], set[str]]:
    """Dtypes of parameters and of gradients on the wires between several ranks."""
    param = _computed_in(plan)
    axes = [axis for axis in layout.axes if axis.size > 1]
    params = {axis.wire.param or param for axis in axes if axis.stage.shards_states}
    return params, {axis.wire.grad or plan.reduce_dtype or param for axis in axes}


def _computed_in(plan: Plan) -> str:
    return plan.param_dtype or "fp32"


def _one_lossless(grads: set[str]) -> bool:
    return len(grads) <= 1 and grads <= set(_TORCH)


def _reduced_in(plan: Plan, grads: set[str]) -> Plan:
    return replace(plan, reduce_dtype=next(iter(grads & set(_TORCH)), plan.reduce_dtype))


def _fp32_masters(engine: str, plan: Plan) -> Plan:
    if plan.master_dtype not in (None, "fp32"):
        _refuse(engine, plan, f"{plan.master_dtype} masters: its optimizer has fp32 ones")
    return plan


def _refuse(engine: str, plan: Plan, part: str) -> NoReturn:
    raise InputError(f"{engine} cannot express {part} (strategy {plan.strategy}); zeromesh.shard runs it as it is")


def _names(dtypes: set[str]) -> str:
    return ", ".join(sorted(dtypes))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("zeromesh.planner"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _render(template: str, plan: Plan, model: ModelSpec, **values: object) -> str:
    # The names of the module lists whose children are units.
    blocks = dict.fromkeys(unit.name.rpartition(".")[0] for unit in model.units if unit.kind is UnitKind.BLOCK)
    found = _environment().get_template(template)
    return found.render(
        plan=plan,
        mesh=dict(plan.mesh),
        model=model.name,
        blocks=list(blocks),
        single=[unit.name for unit in model.units if unit.kind in (UnitKind.EMBEDDING, UnitKind.HEAD)],
        param_dtype=_TORCH[_computed_in(plan)],
        reduce_dtype=_TORCH[plan.reduce_dtype or _computed_in(plan)],
        grad_dtype=_TORCH[plan.grad_dtype or "fp32"],
        **values,
    )
