"""Models that others wrote, under tensor parallelism as they have it; and the example."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.features.test_huggingface import data_of, loss_of
from tests.dist.hugging import SMALL
from tests.dist.parallel.experts import load_example
from tests.dist.parallel.tensor import CLIP, FP64, mesh_of, params_of
from tests.dist.parity import BOUND, Pair, same_params
from tests.dist.pool import kept, on_ranks

_LATENT: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1},
    "deepseek_v3": _LATENT,
}


def build(kind: str) -> Any:
    """The same on every rank."""
    import transformers as hf  # several seconds, once per worker

    torch.manual_seed(0)
    sizes = SMALL | {"head_dim": 4} | MIXTURES.get(kind, {})
    classes: dict[str, tuple[Any, Any]] = {
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig),
        "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig),
        "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config),
    }
    model, config = classes[kind]
    built = model(config(**sizes)).double()
    if kind in MIXTURES:
        built.set_experts_implementation("eager")  # torch's grouped products have no fp64
    for param in built.parameters():  # far from zero, where AdamW would magnify rounding of sums in another order
        nn.init.normal_(param, mean=0.5 if param.dim() < 2 else 0.0, std=0.3)
    if kind == "deepseek_v3":
        bias = built.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
        bias.copy_(torch.linspace(-0.01, 0.01, len(bias)))  # else ties
    return built


def by_its_plan(model: Any, tp: Any) -> Any:
    """As `from_pretrained` with a DistributedConfig does it."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp.size()))
    return apply_tensor_parallelism(model, tp, plan)


def train_beside(model: nn.Module, plain: nn.Module, bound: float = BOUND, **options: float) -> None:
    """One step of both by AdamW with these options, `plain` on the tokens of all data-parallel ranks; compared."""
    make = partial(torch.optim.AdamW, lr=1e-2, **options)
    pair = Pair(base=plain, model=model, loss_of=loss_of, data_of=partial(data_of, "llama"), bound=bound, clip=CLIP)
    pair.train(steps=1, make_optimizer=make)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("qwen3", "node=0"), ("qwen3_moe", "node=1"), ("deepseek_v3", "node=3")],  # the first sums in place, with hooks
)
@on_ranks(4)
def test_hugging_face_plans(kind, strategy):
    mesh, plain = mesh_of(2), build(kind)
    model = zm.shard(by_its_plan(build(kind), mesh["tp"]), mesh["node"], strategy, **FP64)
    divided = [param.region for param in params_of(model) if not param.region.is_whole]
    assert len(divided) >= 8
    assert any(region.fold[1] > 1 for region in divided) == (kind in MIXTURES)
    # Without an eps near gradients' size AdamW would make rounding of those that are nearly zero as large as a step.
    # Routers and rotations compute in fp32, where sums in another order may round to the next number.
    train_beside(model, plain, 1e-6 if kind in MIXTURES else BOUND, eps=1e-3)


@on_ranks(4)
def test_the_example_learns():
    example = load_example("tensor_parallel")
    example.STEPS = 5
    losses = example.train(mesh_of(2))
    assert losses[-1] < 0.7 * losses[0]


@on_ranks(4)
def test_the_example_of_a_pipeline_learns():
    mesh = kept(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("pp", "node"))
    example = load_example("pipeline")
    example.STEPS = 4
    losses = example.train(mesh)
    assert bool(losses) == (mesh.get_local_rank("pp") == 0)
    assert not losses or losses[-1] < 0.7 * losses[0]


# ---- Mixtures of experts that others wrote, under transformers' own expert parallelism, as one process trains them


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
    model = divided(build("deepseek_v3"), mesh["node"], mesh["tp"])
    part = zm.Part(mesh=mesh["cluster"], strategy="cluster=1")
    model = zm.shard(model, mesh["cluster", "node"], "node=3,cluster=1", parts={"*.experts": part}, **FP64)
    train_beside(model, build("deepseek_v3"))


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


def expert_parallel_beside_tensor_parallel(kind: str, degree: int) -> None:
    world = dist.get_world_size()
    dense = kept(init_device_mesh, "cpu", (world // 2, 2), mesh_dim_names=("data", "tp"))
    sparse = kept(init_device_mesh, "cpu", (world // degree, degree), mesh_dim_names=("copies", "experts"))
    model = divided(build(kind), sparse["experts"], dense["tp"])
    part = zm.Part(mesh=sparse["copies"], strategy="copies=3")
    model = zm.shard(model, dense["data"], "data=1", parts={"*.experts": part}, **FP64)
    train_beside(model, build(kind))


@on_ranks(4)
def test_experts_over_ranks_of_the_same_tokens():
    expert_parallel_beside_tensor_parallel("deepseek_v3", degree=2)


@on_ranks(4)
def test_experts_over_ranks_of_the_same_and_of_other_tokens():
    """As transformers lays its meshes."""
    expert_parallel_beside_tensor_parallel("mixtral", degree=4)
