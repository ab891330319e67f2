"""Configurations of other engines: what they say, and what each engine cannot express."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest

from zeromesh.errors import InputError
from zeromesh.model import ModelSpec, preset
from zeromesh.planner.emit import EMITTERS, emit_deepspeed, emit_fsdp2, emit_megatron_fsdp
from zeromesh.strategy import Plan, Strategy

MESH = (("node", 8), ("cluster", 4))


def a_plan(strategy: str, **choices: Any) -> Plan:
    return Plan(
        strategy=Strategy.parse(strategy),
        mesh=MESH,
        micro_batch=2,
        micro_batches=3,
        **{"param_dtype": "bf16", "grad_dtype": "fp32", **choices},
    )


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ("node=0,cluster=0", {"stage": 0}),
        ("node=1,cluster=1", {"stage": 1}),
        ("node=2,cluster=2", {"stage": 2}),
        ("node=3,cluster=3", {"stage": 3, "stage3_max_reuse_distance": 0}),
        ("node=3,cluster=3k", {"stage": 3, "zero_hpz_partition_size": 8, "stage3_max_reuse_distance": 0}),
        (
            "node=3@int8/int4,cluster=3k@int8/int4",
            {
                "stage": 3,
                "zero_hpz_partition_size": 8,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
            },
        ),
    ],
)
def test_deepspeed_configurations(strategy: str, zero: dict[str, object]) -> None:
    config = json.loads(emit_deepspeed(a_plan(strategy), preset("llama-7b")))
    assert zero.items() <= config["zero_optimization"].items()
    assert ("zero_hpz_partition_size" in zero) == ("zero_hpz_partition_size" in config["zero_optimization"])
    assert config["train_batch_size"] == 2 * 3 * 32
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.0  # its default would clip


@pytest.mark.parametrize(
    ("strategy", "choices", "dtypes"),
    [
        (
            "node=1,cluster=1",
            {},
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"},
        ),
        (
            "node=3,cluster=3k",
            {"reduce_dtype": "fp32", "grad_dtype": "bf16"},
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"},
        ),
        (
            "node=0,cluster=0",
            {},
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "communication_data_type": "bf16"},
        ),
        (
            "node=1@/fp32,cluster=1@/fp32",
            {},
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        ),
        (
            "node=0,cluster=0",
            {"param_dtype": "fp32"},
            {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        ),
    ],
)
def test_dtypes_of_deepspeed(strategy: str, choices: dict[str, Any], dtypes: dict[str, object]) -> None:
    config = json.loads(emit_deepspeed(a_plan(strategy, **choices), preset("llama-7b")))
    known = ("bf16", "fp16", "torch_autocast", "data_types", "communication_data_type")
    assert {key: config[key] for key in known if key in config} == dtypes


@pytest.mark.parametrize("emit", list(EMITTERS.values()))
@pytest.mark.parametrize("option", ["prefetch=4", "overlap=none", "collective=ho_ring"])
def test_options_are_ours_alone(emit: Callable[[Plan, ModelSpec], str], option: str) -> None:
    with pytest.raises(InputError, match=f"cannot express the option {option}"):
        emit(a_plan(f"node=3,cluster=3;{option}"), preset("llama-7b"))


def test_deepspeed_has_no_bf16_gradients_beside_fp32_parameters_at_stage_0() -> None:
    with pytest.raises(InputError, match="bf16 gradients beside fp32 parameters where nothing is sharded"):
        emit_deepspeed(a_plan("node=0,cluster=0", param_dtype="fp32", grad_dtype="bf16"), preset("llama-7b"))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("node=3,cluster=0", "DeepSpeed cannot express 3 inside and 0 outside is MiCS"),
        ("node=3,cluster=1", "stage 1 over 4 ranks beside other stages"),
        ("node=3d,cluster=3d", "stage 3d over 32 ranks"),
        ("node[4]=3,node[2]=1,cluster=0", "stage 0 over 4 ranks beside other stages"),
        ("node=3@int4/,cluster=3@int4/", "parameter wires int4"),
        ("node=3@/int8,cluster=3@/int8", "gradient wires int8"),
        ("node=3@int8/,cluster=3", "parameter wires bf16, int8"),
        ("node=2,cluster=2@/fp32", "gradient wires bf16, fp32"),
        ("node=3@int8/int4+ef,cluster=3@int8/int4+ef", "error feedback"),
    ],
)
def test_deepspeed_says_what_it_cannot_express(strategy: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        emit_deepspeed(a_plan(strategy), preset("llama-7b"))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("node=0,cluster=0", "stage 0 on the innermost part.*DistributedDataParallel"),
        ("node=1,cluster=0", "stage 1 on the innermost part"),
        ("node=2,cluster=2", "stage 2 on the innermost part"),
        ("node=3,cluster=1", "stage 1 over 4 ranks outside a group of stage 3"),
        ("node=3d,cluster=1", "stage 1 over 4 ranks outside a group of stage 3d"),
        ("node=3@int8/,cluster=3", "parameter wires bf16, int8: it sends them in the dtype that it computes in"),
        ("node=3@/int4,cluster=3@/int4", "gradient wires int4: it reduces in one lossless dtype on all levels"),
        ("node=3@fp32/,cluster=3", "parameter wires bf16, fp32"),
        ("node=3,cluster=0@/fp32", "gradient wires bf16, fp32"),
        ("node=3,cluster[2]=3k,cluster[2]=0", "stage 3k over 2 ranks outside a group of stage 3"),
    ],
)
def test_fsdp2_says_what_it_cannot_express(strategy: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        emit_fsdp2(a_plan(strategy), preset("llama-7b"))


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


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("node=3,cluster=3k", "stage 3k outside a group of stage 3: only 0, or 1 outside 3"),
        ("node=3k,cluster=3k", "stage 3k: it neither keeps"),
        ("node=2,cluster=1", "stage 1 outside a group of stage 2"),
        ("node[4]=3,node[2]=1,cluster=0", "3 different parts"),
        ("node=3,cluster=1@fp32/", "parameter wires bf16, fp32"),
        ("node=3,cluster=0@/fp32", "gradient wires bf16, fp32"),
    ],
)
def test_megatron_fsdp_says_what_it_cannot_express(strategy: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        emit_megatron_fsdp(a_plan(strategy), preset("llama-7b"))


@pytest.mark.parametrize("emit", [emit_fsdp2, emit_megatron_fsdp])
def test_one_wire_of_all_gradients_is_taken_over(emit: Callable[[Plan, ModelSpec], str]) -> None:
    names = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
    for wire, other in (("bf16", "fp32"), ("fp32", "bf16")):
        text = emit(a_plan(f"node=3@/{wire},cluster=0@/{wire}", reduce_dtype=other), preset("llama-7b"))
        option = "reduce_dtype" if emit is emit_fsdp2 else "grad_comm_dtype"
        assert f"{option}={names[wire]}" in text


def test_fsdp2_accumulates_in_fp32() -> None:
    with pytest.raises(InputError, match="FSDP2 cannot express bf16 gradient shards: it accumulates in its param"):
        emit_fsdp2(a_plan("node=3,cluster=3", grad_dtype="bf16"), preset("llama-7b"))


@pytest.mark.parametrize("emit", EMITTERS.values())
def test_masters_are_fp32(emit: Callable[[Plan, ModelSpec], str]) -> None:
    with pytest.raises(InputError, match="cannot express bf16 masters: its optimizer has fp32 ones"):
        emit(a_plan("node=3,cluster=3", master_dtype="bf16"), preset("llama-7b"))
