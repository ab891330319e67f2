"""Models that others wrote, under tensor parallelism as they have it; and the example."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.features.parity import share_grads
from tests.dist.hugging import SMALL, VOCABULARY
from tests.dist.parallel.tensor import FP64, MICRO_BATCHES, TOLERANCE, mesh_of, params_of, require_equal
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of

_LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 4,
    "head_dim": 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


def build(kind: str) -> Any:
    import transformers as hf  # several seconds, once per worker

    torch.manual_seed(0)
    sizes = SMALL | {"head_dim": 4} | MIXTURES.get(kind, {})
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig),
        "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig),
        "deepseek_v2": (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config),
        "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config),
    }
    model, config = classes[kind]
    built = model(config(**sizes)).double()
    if kind in MIXTURES:
        built.set_experts_implementation("eager")  # torch's grouped products have no fp64
    for param in built.parameters():  # far from zero, where AdamW would magnify what sums in another order round
        nn.init.normal_(param, mean=0.5 if param.dim() < 2 else 0.0, std=0.3)
    return built


def by_its_plan(model: Any, tp: Any) -> Any:
    """As `from_pretrained` with a DistributedConfig does it."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp.size()))
    return apply_tensor_parallelism(model, tp, plan)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss / MICRO_BATCHES


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("llama", "node=3"),
        ("qwen3", "node=0"),  # sums in place, with hooks
        ("mixtral", "node=3"),
        ("qwen3_moe", "node=1"),
        ("deepseek_v2", "node=2"),
        ("deepseek_v3", "node=3"),
    ],
)
@on_ranks(4)
def test_hugging_face_plans(kind, strategy):
    mesh, plain = mesh_of(2), build(kind)
    model = zm.shard(by_its_plan(build(kind), mesh["tp"]), mesh["node"], strategy, **FP64)
    divided = [param.region for param in params_of(model) if not param.region.is_whole]
    assert len(divided) >= 8
    assert any(region.fold[1] > 1 for region in divided) == (kind in MIXTURES)
    # Without an eps near gradients' size AdamW would make rounding of those that are nearly zero as large as a step.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (plain, model)]
    # Routers and rotations compute in fp32, where sums in another order may round to the next number.
    near: dict[str, float] = {"tolerance": 1e-6 if kind in MIXTURES else TOLERANCE}
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            for rank in range(2) if dist.get_rank() == 0 else ():
                (loss_of(plain, step, micro, rank) / 2).backward()
            with zm.accumulate(model, last=micro == MICRO_BATCHES - 1):
                loss_of(model, step, micro, engine_of(model).control.rank).backward()
        share_grads(plain)
        norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.5), zm.clip_grad_norm_(model, 0.5)
        off = abs(float(norms[0] - norms[1]))
        assert off < near["tolerance"], f"norm {step} of {float(norms[0])}: off by {off}"
        grads = {name: param.grad for name, param in plain.named_parameters()}
        require_equal("gradient", ((p, p.grad.local, grads) for p in params_of(model)), **near)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values = {name: param.detach() for name, param in plain.named_parameters()}
        require_equal("parameter", ((p, p.local, values) for p in params_of(model)), **near)
        for key in ("exp_avg", "exp_avg_sq"):
            states = {name: optimizers[0].state[param][key] for name, param in plain.named_parameters()}
            require_equal(key, ((p, optimizers[1].state[p][key], states) for p in params_of(model)), **near)


def example(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_ranks(4)
def test_the_example_learns():
    losses = example("tensor_parallel").train(mesh_of(2))
    assert losses[-1] < 0.7 * losses[0]


@on_ranks(4)
def test_the_example_of_a_pipeline_learns():
    mesh = kept(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("pp", "node"))
    losses = example("pipeline").train(mesh)
    assert bool(losses) == (mesh.get_local_rank("pp") == 0)
    assert not losses or losses[-1] < 0.7 * losses[0]
