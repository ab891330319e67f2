"""Mixtures of experts that others wrote, under transformers' own expert parallelism, as one process trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.hugging import SMALL
from tests.dist.parallel.tensor import FP64
from tests.dist.parallel.test_models import train_beside
from tests.dist.parity import same_params
from tests.dist.pool import kept, on_ranks

SIZES = SMALL | {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def build(kind: str) -> Any:
    """The same on every rank."""
    import transformers as hf  # several seconds, once per worker

    torch.manual_seed(0)
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4)).double()
    sizes = SIZES | {
        "moe_intermediate_size": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes)).double()
    bias = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.copy_(torch.linspace(-0.01, 0.01, len(bias)))  # else ties
    return model


def divided(model: Any, experts: DeviceMesh, tp: DeviceMesh) -> Any:
    """As `from_pretrained` with a DistributedConfig does it, without FSDP2."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = DistributedConfig(tp_size=tp.size(), fsdp_size=experts.size(), ep_size=experts.size())
    by_tp, by_ep, _ = model._resolve_parallel_plans(config)
    return apply_expert_parallelism(apply_tensor_parallelism(model, tp, by_tp), experts, tp, by_ep)


@on_ranks(4)
def test_expert_parallel():
    """Experts over the node."""
    mesh = kept(init_device_mesh, "cpu", (2, 2, 1), mesh_dim_names=("cluster", "node", "tp"))
    model = divided(build("deepseek"), mesh["node"], mesh["tp"])
    part = zm.Part(mesh=mesh["cluster"], strategy="cluster=1")
    model = zm.shard(model, mesh["cluster", "node"], "node=3,cluster=1", parts={"*.experts": part}, **FP64)
    train_beside(model, build("deepseek"))


@on_ranks(4)
def test_a_pretrained_model_is_read_where_its_experts_are(tmp_path):
    """Whose files have a tensor for each expert; written by the first rank."""
    import transformers as hf

    paths, plain = [tmp_path], build("mixtral")
    dist.broadcast_object_list(paths)
    if dist.get_rank() == 0:
        plain.save_pretrained(paths[0])
    dist.barrier()
    mesh = kept(init_device_mesh, "cpu", (2, 2, 1), mesh_dim_names=("cluster", "node", "tp"))
    model = zm.from_pretrained(hf.AutoModelForCausalLM, paths[0], dtype=torch.float64, experts_implementation="eager")
    model = divided(model, mesh["node"], mesh["tp"])
    part = zm.Part(mesh=mesh["cluster"], strategy="cluster=1")
    model = zm.shard(model, mesh["cluster", "node"], "node=3,cluster=1", parts={"*.experts": part}, **FP64)
    same_params(model, plain)


@pytest.mark.parametrize(("kind", "degree"), [("mixtral", 4), ("deepseek", 2)])
@on_ranks(8)
def test_expert_parallel_beside_tensor_parallel(kind, degree):
    """Experts over ranks that have other tokens and those that have the same, as transformers lays its meshes; and over
    those of the same tokens alone."""
    dense = kept(init_device_mesh, "cpu", (4, 2), mesh_dim_names=("data", "tp"))
    sparse = kept(init_device_mesh, "cpu", (8 // degree, degree), mesh_dim_names=("copies", "experts"))
    model = divided(build(kind), sparse["experts"], dense["tp"])
    part = zm.Part(mesh=sparse["copies"], strategy="copies=3")
    model = zm.shard(model, dense["data"], "data=1", parts={"*.experts": part}, **FP64)
    train_beside(model, build(kind))
