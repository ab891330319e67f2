"""A Llama under tensor parallelism inside, and a ZeRO stage for each level around it.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py

The mesh is torch's and has all axes. torch's own `parallelize_module` divides matrices over the innermost axis.
zeromesh shards each rank's part of them over the other axes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import zeromesh as zm

VOCABULARY, SEQUENCE, BATCH, STEPS, MICRO_BATCHES = 32, 16, 4, 8, 2

BLOCK = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
"""The plan of each block; other parameters are whole on each tensor-parallel rank."""

ENDS = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),  # logits stay divided
}


def build(tp: DeviceMesh) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    parallelize_module(model, tp, ENDS)
    for block in model.model.layers:
        parallelize_module(block, tp, BLOCK)
    return model


def batch(generator: torch.Generator) -> torch.Tensor:
    """Rows of numbers that count up from a random start."""
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    return (first + torch.arange(SEQUENCE)) % VOCABULARY


def train(mesh: DeviceMesh) -> list[float]:
    """The loss of each step, averaged over the data-parallel ranks."""
    data = mesh[mesh.mesh_dim_names[:-1]]
    model = zm.shard(build(mesh["tp"]), data, "node=3,cluster=1" if data.ndim == 2 else "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Ranks of one tensor-parallel group have the same tokens.
    generator = torch.Generator().manual_seed(dist.get_rank() // mesh["tp"].size())
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            tokens = batch(generator)
            with zm.accumulate(model, last=micro == MICRO_BATCHES - 1), loss_parallel():
                logits = model(input_ids=tokens).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()
            total += float(loss.detach().full_tensor()) / MICRO_BATCHES
        zm.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zm.sum_over_ranks(model, total) / data.size())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    shape, names = ((world // 4, 2, 2), ("cluster", "node", "tp")) if world > 4 else ((world // 2, 2), ("node", "tp"))
    losses = train(init_device_mesh("cpu", shape, mesh_dim_names=names))
    if dist.get_rank() == 0:
        print("\n".join(f"step {step + 1}  loss {loss:.3f}" for step, loss in enumerate(losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
