"""Files of other libraries, written by hand in the forms that these projects document, and those that we emit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zeromesh as zm
from tests.pure.cli.conftest import Command
from tests.pure.planner.test_emit import a_plan
from tests.pure.train.test_config import MINIMAL
from zeromesh.errors import InputError, MeshError
from zeromesh.model.presets import preset
from zeromesh.planner.emit import emit_deepspeed, emit_torchtitan
from zeromesh.planner.foreign import read_file, read_foreign
from zeromesh.strategy import Strategy
from zeromesh.train.config import load_config

TWO = (("node", 8), ("cluster", 4))

ZERO3 = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": 5e7},
    "flops_profiler": {"enabled": True},
}

FSDP1 = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  fsdp_reshard_after_forward: STRATEGY\n"

FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: OFFLOAD
parallelism_config:
  parallelism_config_dp_replicate_size: REPLICAS
  parallelism_config_dp_shard_size: 8
mixed_precision: bf16
num_machines: 4
num_processes: 32
dynamo_config:
  dynamo_backend: INDUCTOR
"""

TITAN = """
[model]
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 16
tensor_parallel_degree = 2
context_parallel_degree = 1
[checkpoint]
enable = true
interval = 250
[activation_checkpoint]
mode = "full"
"""


def zero(**section: Any) -> str:
    return json.dumps(ZERO3 | {"zero_optimization": section})


def fsdp(strategy: str) -> str:
    return f"distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\nnum_processes: 8\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return written


CPU = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("name", "text", "strategy"),
    [
        ("ds.json", zero(stage=0), "node=0,cluster=0"),
        ("ds.json", zero(stage=1, offload_optimizer=CPU), "host=1,node=1,cluster=1"),
        ("ds.json", zero(stage=2, offload_optimizer=CPU), "host=2,node=2,cluster=2"),
        ("ds.json", zero(stage=3, offload_optimizer=CPU | {"ratio": 0.3}), "host[30%]=2,node=3,cluster=3"),
        ("ds.json", zero(stage=3, offload_optimizer=CPU, offload_param=CPU), "host=3,node=3,cluster=3"),
        ("ds.json", zero(stage=3, offload_param=CPU), "host=3,node=3,cluster=3"),
        ("ds.json", zero(stage=3, zero_hpz_partition_size=8), "node=3,cluster=3k"),
        ("ds.json", zero(stage=3, zero_hpz_partition_size=4), "node[4]=3,node[*]=3k,cluster=3k"),
        ("ds.json", zero(stage=3, mics_shard_size=16), "node=3,cluster[2]=3,cluster[*]=0"),
        (
            "ds.json",
            zero(stage=3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True),
            "node=3@int8/int4,cluster=3k@int8/int4",
        ),
        ("a.yaml", fsdp("FULL_SHARD"), "node=3,cluster=3"),
        ("a.yaml", fsdp("2"), "node=3k,cluster=3k"),
        ("a.yaml", fsdp("NO_SHARD"), "node=0,cluster=0"),
        ("a.yaml", FSDP1.replace("STRATEGY", "SHARD_GRAD_OP"), "node=3k,cluster=3k"),
        ("a.yaml", FSDP1.replace("STRATEGY", "NO_SHARD"), "node=0,cluster=0"),
        ("a.yaml", fsdp("HYBRID_SHARD"), "node=3,cluster=0"),
        ("a.yaml", fsdp("HYBRID_SHARD_ZERO2"), "node=3k,cluster=0"),
        ("a.yaml", FSDP2.replace("OFFLOAD", "false").replace("REPLICAS", "4"), "node=3k,cluster=0"),
        ("a.yaml", FSDP2.replace("OFFLOAD", "true").replace("REPLICAS", "1"), "host=3,node=3k,cluster=3k"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\n", "node=0,cluster=0"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n", "node=2,cluster=2"),
        ("f.json", '{"fsdp_version": 2, "reshard_after_forward": true}', "node=3,cluster=3"),
        ("t.toml", TITAN, "node=3,cluster[2]=3,cluster[*]=0"),
        ("t.toml", "[parallelism]\nfsdp_reshard_after_forward = 'never'\n", "node=3k,cluster=3k"),
        ("t.toml", "[parallelism]\n[training]\nenable_cpu_offload = true\n", "host=3,node=3,cluster=3"),
    ],
)
def test_the_strategy_that_a_file_means(write: Any, name: str, text: str, strategy: str) -> None:
    axes = [axis for axis, _ in TWO]
    assert Strategy.parse(read_foreign(write(name, text)).strategy(TWO), axes) == Strategy.parse(strategy, axes)


def test_keys_are_ours_and_what_has_none_is_listed(write: Any) -> None:
    found = read_foreign(write("ds.json", json.dumps(ZERO3)))
    assert found.keys == {
        "dtypes.param": "bf16",
        "batch.global_sequences": 256,
        "batch.micro": 4,
        "optimizer.clip_norm": 1.0,
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.warmup_steps": 100,
    }
    assert found.without == ("scheduler.type = WarmupLR", "flops_profiler.enabled = True")
    whole = ZERO3 | {"train_batch_size": "auto", "gradient_accumulation_steps": 4}
    first, *_ = read_foreign(write("ds.json", json.dumps(whole))).without
    assert first.startswith("gradient_accumulation_steps = 4: set batch.global_sequences")
    assert found.strategy() == "node=3,cluster=3"  # of which the file says no sizes
    found = read_foreign(write("a.yaml", FSDP2.replace("OFFLOAD", "false").replace("REPLICAS", "1")))
    assert found.mesh == TWO and found.keys["model.activation_checkpointing"] == "full"
    assert found.without == ("dynamo_config.dynamo_backend = INDUCTOR",)
    found = read_foreign(write("t.toml", TITAN))
    assert found.keys["--tp"] == 2 and "--cp" not in found.keys and found.keys["checkpoint.every"] == 250
    assert (found.keys["data.seq_len"], found.keys["run.steps"]) == (8192, 1000)
    assert found.without == ("model.flavor = 8B",)


def test_off_is_said_where_our_default_is_not_off(write: Any) -> None:
    adamw = {"type": "AdamW", "params": {"weight_decay": 0.0}}
    keys = read_foreign(write("ds.json", json.dumps(ZERO3 | {"gradient_clipping": 0, "optimizer": adamw}))).keys
    assert (keys["optimizer.clip_norm"], keys["optimizer.weight_decay"]) == (0, 0.0)
    for unset in (None, "", -1, False, "auto"):
        keys = read_foreign(write("ds.json", json.dumps(ZERO3 | {"gradient_clipping": unset}))).keys
        assert "optimizer.clip_norm" not in keys, unset
    text = TITAN.replace('"full"', '"none"').replace("[lr_scheduler]", "[lr_scheduler]\nmin_lr_factor = 0.0")
    keys = read_foreign(write("t.toml", text)).keys
    assert (keys["model.activation_checkpointing"], keys["optimizer.final_lr_ratio"]) == ("none", 0.0)
    kept = read_foreign(write("k.toml", TITAN.replace("interval = 250", "keep_latest_k = 0")))
    assert "checkpoint.keep" not in kept.keys and any("keep_latest_k = 0: set" in line for line in kept.without)


def test_accelerate_leads_to_its_deepspeed_file(write: Any) -> None:
    write("ds.json", zero(stage=3, offload_optimizer={"device": "nvme"}))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\nnum_processes: 8\n"
    found = read_foreign(write("a.yaml", text))
    assert found.strategy() == "node=3" and found.keys["batch.micro"] == 4
    assert "offload to nvme" in found.without[-1]


@pytest.mark.parametrize(
    ("emit", "file", "strategy"),
    [
        (emit_deepspeed, "ds.json", "node=0,cluster=0"),
        (emit_deepspeed, "ds.json", "host=2,node=3,cluster=3"),
        (emit_deepspeed, "ds.json", "node=3@int8/int4,cluster=3k@int8/int4"),
        (emit_torchtitan, "t.toml", "node=3k,cluster=0"),
        (emit_torchtitan, "t.toml", "host=3,node=3,cluster=3"),
    ],
)
def test_a_file_that_we_emit_comes_back(write: Any, emit: Any, file: str, strategy: str) -> None:
    plan = a_plan(strategy)
    found = read_foreign(write(file, emit(plan, preset("llama-7b"))))
    assert Strategy.parse(found.strategy(plan.mesh)) == plan.strategy
    assert (found.keys["dtypes.param"], found.keys["batch.micro"], found.without) == ("bf16", 2, ())


def test_train_plan_and_sharding_take_such_files(write: Any, zeromesh: Command) -> None:
    path = write("ds.json", json.dumps(ZERO3))
    run = write("run.toml", MINIMAL.replace('"node=3,cluster=1"', '"ds.json"'))
    config = load_config(run)
    assert config.strategy == "node=3,cluster=3"
    assert (config.dtypes.param, config.optimizer.clip_norm) == ("bf16", 1.0)  # the run's file has none
    assert (config.batch.micro, config.optimizer.lr) == (2, 1e-3)  # the run's own
    sharding = zm.Sharding.from_file(path, mesh={"cluster": 4, "node": 8})
    assert str(sharding.strategy) == "node=3,cluster=3" and sharding.param_dtype == "bf16"
    base = ("--model", "llama-7b", "--cluster", "a800-8x-hdr", "--world", "32", "--seq-len", "4096")
    base += ("--global-batch-tokens", "1Mi")
    searched = ("plan", *base, "--splits", "none", "--no-robust")
    code, out, _ = zeromesh(*searched, "--strategy", path, "--json")
    assert code == 0 and json.loads(out)["yours"]["strategy"] == "node=3,cluster=3"
    code, out, _ = zeromesh("simulate", *base, "--strategy", path, "--json")
    assert code == 0 and json.loads(out)["strategy"] == "node=3,cluster=3"
    titan = ("--strategy", write("t.toml", TITAN), "--tp", "2", "--json")  # 16 shards are 4 nodes of 4 pairs
    code, out, _ = zeromesh("simulate", *base, *titan)
    assert code == 0 and json.loads(out)["strategy"] == "node=3,cluster=3"
    code, out, _ = zeromesh(*searched, *titan)
    assert code == 0 and json.loads(out)["yours"]["strategy"] == "node=3,cluster=3"
    code, out, _ = zeromesh("import", path, "--mesh", "cluster=4,node=8")
    assert code == 0 and out.startswith(
        '# from DeepSpeed\nstrategy = "node=3,cluster=3"\nmesh = { cluster = 4, node = 8 }'
    )
    assert write("again.toml", out).exists() and "# no equivalent:\n#   scheduler.type = WarmupLR" in out


def test_refusals(write: Any) -> None:
    with pytest.raises(MeshError, match="DeepSpeed shards over 3 ranks, which are no part of"):
        read_foreign(write("ds.json", zero(stage=3, mics_shard_size=3))).strategy(TWO)
    with pytest.raises(InputError, match="no configuration of DeepSpeed"):
        read_file(write("x.toml", "[model]\n"))
    with pytest.raises(InputError, match="a value is none that such a file has"):
        read_file(write("ds.json", zero(stage="many")))
    with pytest.raises(InputError, match="32 processes on 3 machines"):
        read_file(write("a.yaml", FSDP2.replace("num_machines: 4", "num_machines: 3")))
    with pytest.raises(InputError, match="fsdp_sharding_strategy must be one of FULL_SHARD"):
        read_file(write("a.yaml", fsdp("FULL")))
    with pytest.raises(InputError, match="does not say a mesh"):
        zm.Sharding.from_file(write("ds.json", zero(stage=1)))
    with pytest.raises(InputError, match=r"cuts the model beside data \(--tp\)"):
        zm.Sharding.from_file(write("t.toml", TITAN), mesh={"cluster": 4, "node": 8})
