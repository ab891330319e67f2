"""Configurations of other engines: their contents, and strategies that an engine cannot express."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest

from zeromesh.errors import InputError
from zeromesh.model.presets import preset
from zeromesh.model.spec import ModelSpec
from zeromesh.parallel import Parallel
from zeromesh.planner.emit import EMITTERS, emit_deepspeed, emit_fsdp2, emit_megatron_fsdp
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan

MESH = (("node", 8), ("cluster", 4))


def a_plan(strategy: str, **choices: Any) -> Plan:
    fields = {"param_dtype": "bf16", "grad_dtype": "fp32", "micro_batch": 2, "micro_batches": 3, **choices}
    return Plan(strategy=Strategy.parse(strategy), mesh=MESH, **fields)


HPZ = {"stage": 3, "zero_hpz_partition_size": 8, "stage3_max_reuse_distance": 0}
CPU = {"device": "cpu", "pin_memory": True}
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ("node=0,cluster=0", {"stage": 0}),
        ("node=1,cluster=1", {"stage": 1}),
        ("node=2,cluster=2", {"stage": 2}),
        ("node=3,cluster=3", {"stage": 3, "stage3_max_reuse_distance": 0}),
        ("host=1,node=1,cluster=1", {"stage": 1, "offload_optimizer": CPU}),
        ("host=2,node=2,cluster=2", {"stage": 2, "offload_optimizer": CPU}),
        ("host=2,node=3,cluster=3", {"stage": 3, "offload_optimizer": CPU}),
        ("host=3,node=3,cluster=3", {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
        ("node=3,cluster=3k", HPZ),
        ("node=3@int8/int4,cluster=3k@int8/int4", HPZ | QUANTISED),
    ],
)
def test_deepspeed_configurations(strategy: str, zero: dict[str, object]) -> None:
    config = json.loads(emit_deepspeed(a_plan(strategy), preset("llama-7b")))
    assert zero.items() <= config["zero_optimization"].items()
    for section in ("zero_hpz_partition_size", "offload_optimizer", "offload_param"):
        assert (section in zero) == (section in config["zero_optimization"])
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[size] for size in sizes] == [2 * 3 * 32, 2, 3]
    assert config["gradient_clipping"] == 0.0  # its default would clip


@pytest.mark.parametrize(
    ("strategy", "choices", "sums", "wire", "more"),
    [
        ("node=1,cluster=1", {}, "fp32", "bf16", BF16),
        ("node=3,cluster=3k", {"reduce_dtype": "fp32", "grad_dtype": "bf16"}, "bf16", "fp32", BF16),
        ("node=0,cluster=0", {}, None, "bf16", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ("node=1@/fp32,cluster=1@/fp32", {}, "fp32", "fp32", BF16),
        ("node=0,cluster=0", {"param_dtype": "fp32"}, "fp32", "fp32", {}),
    ],
)
def test_dtypes_of_deepspeed(
    strategy: str, choices: dict[str, Any], sums: str | None, wire: str, more: dict[str, object]
) -> None:
    config = json.loads(emit_deepspeed(a_plan(strategy, **choices), preset("llama-7b")))
    known = ("bf16", "fp16", "torch_autocast", "data_types", "communication_data_type")
    of_sums = {"data_types": {"grad_accum_dtype": sums}} if sums else {}
    expected = {"communication_data_type": wire, **of_sums, **more}
    assert {key: config[key] for key in known if key in config} == expected


INNER = "stage 1 over 4 ranks outside a group of stage 3"


@pytest.mark.parametrize(
    ("engine", "strategy", "choices", "message"),
    [
        ("deepspeed", "node=3,cluster=0", {}, "DeepSpeed cannot express 3 inside and 0 outside is MiCS"),
        ("deepspeed", "node=3,cluster=1", {}, "stage 1 over 4 ranks beside other stages"),
        ("deepspeed", "node=3@int4/,cluster=3@int4/", {}, "parameter wires int4"),
        ("deepspeed", "node=3@/int8,cluster=3@/int8", {}, "gradient wires int8"),
        ("deepspeed", "node=3@int8/int4+ef,cluster=3@int8/int4+ef", {}, "error feedback"),
        (
            "deepspeed",
            "node=0,cluster=0",
            {"param_dtype": "fp32", "grad_dtype": "bf16"},
            "bf16 gradients beside fp32 parameters where nothing is sharded",
        ),
        ("fsdp2", "node=0,cluster=0", {}, "stage 0 on the innermost part.*DistributedDataParallel"),
        ("fsdp2", "node=3,cluster=1", {}, INNER),
        ("fsdp2", "node=3@int8/,cluster=3", {}, "parameter wires bf16, int8: it sends them in the dtype that it"),
        ("fsdp2", "node=3@/int4,cluster=3@/int4", {}, "gradient wires int4: it reduces in one lossless dtype on all"),
        ("fsdp2", "node=3,cluster=0@/fp32", {}, "gradient wires bf16, fp32"),
        ("fsdp2", "node=3,cluster[2]=3k,cluster[2]=0", {}, "stage 3k over 2 ranks outside a group of stage 3"),
        ("fsdp2", "node=3,cluster=3", {"grad_dtype": "bf16"}, "cannot express bf16 gradient shards: it accumulates in"),
        ("megatron-lm", "node=3,cluster=0", {}, "stages 3, 0: 0 or 1 inside, 0 outside of 1"),
        ("megatron-lm", "node=1@/bf16,cluster=0@/fp32", {}, "gradient wires bf16, fp32"),
        ("megatron-lm", "host=2,node=1,cluster=1", {}, "host=2 with stage 1: its offload is host=1 with 1"),
        ("megatron-lm", "host[35%]=3,node=3,cluster=3", {}, "cannot express stages 3"),
        ("megatron-fsdp", "node=3,cluster=3k", {}, "stage 3k outside a group of stage 3: only 0, or 1 outside 3"),
        ("megatron-fsdp", "node=3k,cluster=3k", {}, "stage 3k: it neither keeps"),
        ("megatron-fsdp", "node[4]=3,node[2]=1,cluster=0", {}, "3 different parts"),
        ("megatron-fsdp", "node=3,cluster=1@fp32/", {}, "parameter wires bf16, fp32"),
        (
            "deepspeed",
            "host=1,node=3,cluster=3",
            {},
            "host=1 with 3: its offload is host=1 with 1, host=2 with 2, host=2",
        ),
        ("deepspeed", "host=3,node=2,cluster=2", {}, "host=3 with 2: its offload is"),
        ("deepspeed", "host=3,node=3,cluster=3k", {}, "host=3 with 3 and 3k: its offload is"),
        ("fsdp2", "host=1,node=3,cluster=3", {}, "host=1 with stage 3: its offload is host=3 there"),
        ("fsdp2", "host=3,node=3d,cluster=3d", {}, "host=3 with stage 3d: its offload is host=3d there"),
        ("fsdp2", "host=3,node=3,cluster=0", {}, r"host=3 beside replicas: .*pytorch/pytorch#180665"),
        ("torchtitan", "host=2,node=3,cluster=3", {}, "torchtitan cannot express host=2 with stage 3"),
        ("megatron-fsdp", "host=1,node=1,cluster=1", {}, "shards in the host's memory: Megatron-LM has an offload"),
        *(
            (engine, "host[35%]=3,node=3,cluster=3", {}, r"cannot express (host\[35%\]|shards|stages 3)")
            for engine in EMITTERS
        ),
        *((engine, "node=3,cluster=3h", {}, "cannot express (stages? 3|shards in the host)") for engine in EMITTERS),
        *(
            (engine, f"node=3,cluster=3;{option}", {}, f"cannot express the option {option}")
            for engine in EMITTERS
            for option in ("prefetch=4", "overlap=none", "collective=ho_ring")
        ),
        *((engine, "node=3,cluster=3", {"master_dtype": "bf16"}, "cannot express bf16 masters") for engine in EMITTERS),
    ],
)
def test_what_an_engine_cannot_express(engine: str, strategy: str, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EMITTERS[engine](a_plan(strategy, **choices), preset("llama-7b"))


@pytest.mark.parametrize(
    ("strategy", "stage", "outer", "mesh"),
    [
        ("node=0,cluster=0", 0, 0, "(32, 1)"),
        ("node=2,cluster=2", 2, 0, "(32, 1)"),
        ("node=3,cluster=0", 3, 0, "(4, 8, 1)"),
        ("node=3,cluster=1", 3, 1, "(4, 8, 1)"),
        ("node=3,cluster[2]=3,cluster[*]=1", 3, 1, "(2, 16, 1)"),
    ],
)
def test_megatron_fsdp_configurations(strategy: str, stage: int, outer: int, mesh: str) -> None:
    text = emit_megatron_fsdp(a_plan(strategy), preset("llama-7b"))
    ast.parse(text)
    assert f"zero_dp_strategy={stage}," in text
    assert f"outer_dp_sharding_strategy={outer}," in text
    assert f"init_device_mesh(device_type, {mesh}" in text
    assert ('dp_outer_dim="dp_outer"' in text) == (mesh.count(",") == 2)


@pytest.mark.parametrize("strategy", ["host=3,node=3,cluster=3", "host=3d,node=3dk,cluster=3dk", "node=3,cluster=3"])
def test_what_is_sharded_is_offloaded(strategy: str) -> None:
    assert ("CPUOffloadPolicy(pin_memory" in emit_fsdp2(a_plan(strategy), preset("llama-7b"))) == ("host" in strategy)
    parallel = Parallel(pp=2) if "3d" in strategy else None  # where it reduces once a step
    text = EMITTERS["torchtitan"](a_plan(strategy, parallel=parallel), preset("llama-7b"))
    assert ("enable_cpu_offload = true" in text) == ("host" in strategy)


def test_arguments_of_megatron_lm() -> None:
    parallel = Parallel(tp=2, pp=2, pp_chunks=2, pp_schedule="interleaved")
    plan = a_plan("host[35%]=1,node=1,cluster=0", parallel=parallel, recompute="full", seq_len=512)
    text = EMITTERS["megatron-lm"](plan, preset("llama-7b"))
    comment, *lines = text.splitlines()
    assert comment == "# Gradients are sent in fp32, as they are summed; the plan has bf16."
    expected = """tensor-model-parallel-size 2, context-parallel-size 1, pipeline-model-parallel-size 2,
        num-layers-per-virtual-pipeline-stage 8, expert-model-parallel-size 1, sequence-parallel, micro-batch-size 2,
        global-batch-size 192, seq-length 512, bf16, accumulate-allreduce-grads-in-fp32, use-distributed-optimizer,
        num-distributed-optimizer-instances 4, optimizer-cpu-offload, optimizer-offload-fraction 0.35,
        use-precision-aware-optimizer, recompute-granularity full, recompute-method uniform, recompute-num-layers 1"""
    assert {*lines} == {f"--{option}" for option in " ".join(expected.split()).split(", ")}
    plain = EMITTERS["megatron-lm"](a_plan("node=0,cluster=0", grad_dtype="bf16"), preset("llama-7b"))
    assert plain.startswith("--") and "distributed-optimizer" not in plain and "fp32" not in plain


@pytest.mark.parametrize("emit", [emit_fsdp2, emit_megatron_fsdp])
def test_one_wire_of_all_gradients_is_taken_over(emit: Callable[[Plan, ModelSpec], str]) -> None:
    names = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
    for wire, other in (("bf16", "fp32"), ("fp32", "bf16")):
        text = emit(a_plan(f"node=3@/{wire},cluster=0@/{wire}", reduce_dtype=other), preset("llama-7b"))
        option = "reduce_dtype" if emit is emit_fsdp2 else "grad_comm_dtype"
        assert f"{option}={names[wire]}" in text
