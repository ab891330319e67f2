"""The planner's units are the engine's, joined ones too: one schedule follows from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.pure.planner.setups import small_cluster
from zeromesh.engine.units import Precision, find_units, join_modules
from zeromesh.errors import ModelError
from zeromesh.model.from_module import from_module
from zeromesh.model.module_units import cut, recomputes
from zeromesh.model.spec import ModelSpec, UnitKind
from zeromesh.simulator.run import simulate
from zeromesh.simulator.units import schedule_units
from zeromesh.simulator.workload import FixedWorkload

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    """A list inside of a member of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


class Nested(nn.Module):
    """Named blocks hold named blocks; some are wrapped for checkpointing."""

    _no_split_modules = ("Block", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        blocks = [Block() for _ in range(4)]
        self.blocks = nn.ModuleList(checkpoint_wrapper(b) if i % 2 else b for i, b in enumerate(blocks))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean()


class Unnamed(Nested):
    _no_split_modules = ()


@pytest.mark.parametrize("model", [Nested, Unnamed, lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))])
def test_units_of_any_module_are_the_engines(model: Callable[[], nn.Module]) -> None:
    module = model()
    precision = Precision(param=torch.bfloat16)
    engine = [unit.describe(precision) for unit in join_modules(find_units(module), precision, 0)]
    held = [(unit.name, sum(p.numel() for _, p in unit.parameters)) for unit in cut(module)]
    theirs = [(unit.name, sum(buffer.numel for buffer in unit.buffers)) for unit in engine]
    assert held == [unit for unit in theirs if unit[1]]


class Mixed(nn.Module):
    """Norms in fp32, products in bf16, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16).bfloat16()) for _ in range(3)]
        blocks[0][0].bias.requires_grad_(False)
        self.blocks = nn.ModuleList(blocks)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_parameters_that_are_alike_once_sharded_are_one_buffer() -> None:
    module, precision = Mixed(), Precision(param=torch.bfloat16)
    engine = [unit.describe(precision) for unit in find_units(module, precision=precision)]
    assert [len(unit.buffers) for unit in engine] == [1, 2, 1, 1]
    x = torch.zeros(1, 8, 16)
    spec = from_module(module, seq_len=8, inputs=(x,))
    planned = schedule_units(spec, FixedWorkload(seq_len=8, global_batch_tokens=8))[0]
    assert [unit.buffers for unit in planned][1:] == [unit.buffers for unit in engine][1:]
    own = [unit.describe(Precision()) for unit in find_units(module)]
    assert [len(unit.buffers) for unit in own] == [1, 3, 2, 2]


class Quantised(nn.Module):
    """Blocks of frozen codes, as bitsandbytes has them, and of parameters that train beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for block in self.blocks:
            block.codes = nn.Parameter(torch.zeros(2048, dtype=torch.uint8), requires_grad=False)
            block.small = nn.Parameter(torch.zeros(64, dtype=torch.float8_e4m3fn), requires_grad=False)
            block.phase = nn.Parameter(torch.zeros(8, dtype=torch.complex64), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_frozen_codes_are_planned_in_their_own_dtype_and_what_is_not_sharded_is_whole() -> None:
    module = Quantised()
    spec, plain = from_module(module, seq_len=64), replace(from_module(module, seq_len=64), whole_bytes=0.0)
    workload = FixedWorkload(seq_len=64, global_batch_tokens=256)
    planned = [unit.buffers for unit in schedule_units(spec, workload)[0] if unit.buffers]
    engine = [unit.describe(Precision(param=torch.bfloat16)).buffers for unit in find_units(module)]
    assert planned == [buffers for buffers in engine if buffers]
    assert [(each.param_dtype, each.numel) for each in planned[1]][1:] == [("code u8", 2048), ("code e4m3", 64)]
    assert spec.whole_bytes == 3 * 8 * 8
    memory = [simulate(one, small_cluster(2, 2), "node=3,cluster=3", workload).memory for one in (spec, plain)]
    assert memory[0].params - memory[1].params == spec.whole_bytes


def test_checkpointing_is_described_by_what_it_is_added_to() -> None:
    """Blocks save and compute as without it; a planner chooses it, and is told of it, apart. A block's gradients of
    weights are products too; and equal blocks are described once."""
    plain, wrapped = Unnamed(), Unnamed()
    plain.blocks = nn.ModuleList(Block() for _ in range(4))
    wrapped.blocks = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(4))
    expected = from_module(plain, seq_len=64)
    assert from_module(wrapped, seq_len=64) == expected
    assert (recomputes(plain), recomputes(wrapped)) == (False, True)
    (block,) = (unit for unit in expected.units if unit.kind is UnitKind.BLOCK)
    assert block.count == 4
    assert [product.trainable_share for product in block.matmuls] == [1.0, 1.0]
    for model in (Nested(), Unnamed()):  # some of whose blocks are wrapped
        (some,) = (unit for unit in from_module(model, seq_len=64).units if unit.kind is UnitKind.BLOCK)
        assert (some.count, some.matmuls) == (4, block.matmuls)
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](2))
    expected = from_module(module, seq_len=64)
    assert not recomputes(module)
    module.activation_checkpointing_enable({"use_reentrant": False})
    assert recomputes(module) and from_module(module, seq_len=64) == expected
    assert module.is_activation_checkpointing, "the module itself was changed"


CONFIGS: dict[str, Any] = {
    "llama": lambda layers: transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4, vocab_size=500
    ),
    "gpt2": lambda layers: transformers.GPT2Config(
        n_embd=64, n_layer=layers, n_head=4, vocab_size=500, n_positions=128
    ),
}


@cache
def described(name: str) -> tuple[nn.Module, ModelSpec]:
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](6))
    return module, from_module(module, seq_len=128)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("bucket_bytes", [0, 100_000, 250_000, 25 << 20])
def test_the_planners_units_are_the_engines(name: str, bucket_bytes: int) -> None:
    module, spec = described(name)
    precision = Precision(param=torch.bfloat16)
    engine = [unit.describe(precision) for unit in join_modules(find_units(module), precision, bucket_bytes)]
    workload = FixedWorkload(seq_len=128, global_batch_tokens=128)
    assert list(schedule_units(spec, workload, bucket_bytes)[0]) == engine
    parts = ("*.mlp", "lm_head") if name == "llama" else ("transformer.h.[3-5].mlp", "*.wpe", "*.attn")
    apart = join_modules(find_units(module, precision=precision, parts=parts), precision, bucket_bytes)
    assert list(schedule_units(spec, workload, bucket_bytes, parts)[0]) == [unit.describe(precision) for unit in apart]
    for percent in 20, 75:
        shared = join_modules(find_units(module, precision=precision, shares={"": percent}), precision, bucket_bytes)
        ours = [(unit.name, set(unit.describe(precision).buffers)) for unit in shared]
        planned = schedule_units(spec, workload, bucket_bytes, shares={"": percent})[0]
        assert [(unit.name, set(unit.buffers)) for unit in planned] == ours, percent
    with pytest.raises(
        ModelError, match=r"\.1\.\S+ belongs to the parts \*\.1 and \*\.mlp, but can have only one layout"
    ):
        schedule_units(spec, workload, bucket_bytes, ("*.1", "*.mlp"))
