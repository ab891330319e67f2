"""Activation checkpointing and compilation: forwards that are repeated in the backward, and hooks around graphs."""

from __future__ import annotations

import copy
import shutil
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zeromesh as zm
from tests.dist.features.parity import (
    DEFERRED,
    ONE_AXIS,
    STRATEGIES,
    Block,
    Net,
    Pair,
    check,
    close,
    local_part,
    net,
    next_token_loss,
    same_grads,
    same_params,
    sgd,
    tokens,
)
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of

ALL = (*STRATEGIES, DEFERRED, "node=3,cluster=3k")
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


class Segmented(Net):
    """Checkpoints its blocks in segments of a given length."""

    def __init__(self, segment: int, reentrant: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        self.segment, self.reentrant = segment, reentrant

    def run(self, start: int, x: Tensor) -> Tensor:
        for block in self.blocks[start : start + self.segment]:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for start in range(0, len(self.blocks), self.segment):
            x = checkpoint(partial(self.run, start), x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("segment", [1, 2, 5])
@REENTRANT
@on_ranks(4)
def test_segments_of_blocks(reentrant, segment):
    """A segment of five blocks is longer than the slots."""
    torch.manual_seed(0)
    check(Segmented(segment, reentrant, num_blocks=5).double(), *(ALL if segment == 5 else ALL[:1]))


class Inside(Block):
    """Checkpoints a part of itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: torch.tanh(self.up(self.norm(y))), x, use_reentrant=self.reentrant)
        return x + self.gain * self.down(inner)


@REENTRANT
@on_ranks(2)
def test_a_part_of_a_block(reentrant):
    base = net()
    for block in base.blocks:
        block.__class__, block.reentrant = Inside, reentrant
    check(base, *ONE_AXIS)


class HalfFrozen(Block):
    """Its first half is frozen and checkpointed, so that all trained parameters have their gradients before it is
    computed again."""

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: torch.tanh(self.up(self.norm(y))), x, use_reentrant=False)
        return x + self.gain * self.down(inner)


@on_ranks(2)
def test_a_frozen_part_of_a_block_is_computed_again():
    base = net()
    for block in base.blocks:
        block.__class__ = HalfFrozen
        block.up.requires_grad_(False)
        block.norm.requires_grad_(False)
    check(base, *ONE_AXIS[:2])


class Thrice(Block):
    """Three checkpointed parts share a parameter, whose gradient comes with each, before the others' or after."""

    before = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down, self.norm):
            x = checkpoint(partial(self._part, layer), x, use_reentrant=True)
        return x

    def _part(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x * self.gain) if self.before else layer(x) * self.gain)


@pytest.mark.parametrize("before", [False, True])
@on_ranks(2)
def test_reentrant_parts_of_a_block_that_share_a_parameter(before):
    base = net()
    for block in base.blocks:
        block.__class__, block.before = Thrice, before
    check(base, *ONE_AXIS[:2])


@REENTRANT
@on_ranks(2)
def test_the_whole_model(reentrant):
    """As a user does who checkpoints model(x) from outside."""

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        # Reentrant checkpointing differentiates with respect to its inputs, so one of them must ask for it.
        anchor = torch.zeros((), requires_grad=True)
        logits = checkpoint(lambda t, _: model(t), batch, anchor, use_reentrant=reentrant)
        return nn.functional.cross_entropy(logits.flatten(0, -2), batch.flatten().roll(1))

    check(net(), *ONE_AXIS, loss_of=loss_of)


@pytest.mark.parametrize("implementation", list(CheckpointImpl))
@on_ranks(2)
def test_checkpoint_wrapper(implementation):
    """Units and names are those of the unwrapped model."""

    def wrap(model: nn.Module) -> None:
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )

    for strategy in ONE_AXIS[:2]:
        pair = Wrapped(base=net(), strategy=strategy, wrap=wrap, options={"bucket_bytes": 0})
        names = [unit.name for unit in engine_of(pair.model).units]
        assert names == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
        pair.train()


class Wrapped(Pair):
    """Wraps the sharded copy alone: the plain one keeps its names, and its numbers are the same."""

    def __init__(self, *, wrap: Any, **arguments: Any) -> None:
        copies = iter((lambda model: None, wrap))
        super().__init__(prepare=lambda model: next(copies)(model), **arguments)


class Sequenced(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint_sequential(self.blocks, 2, self.embed(tokens), use_reentrant=False)  # type: ignore[arg-type]
        return self.head(self.norm(x))


@on_ranks(2)
def test_checkpoint_sequential():
    torch.manual_seed(0)
    base = Sequenced(num_blocks=5).double()
    base.blocks = nn.Sequential(*base.blocks)  # type: ignore[assignment]
    check(base, "node=3", "node=3d")


@REENTRANT
@pytest.mark.parametrize("kind", ["llama", "t5"])
@on_ranks(2)
def test_hugging_face_gradient_checkpointing(kind, reentrant):
    from tests.dist.features.test_huggingface import build, data_of, loss_of

    def prepare(model: Any) -> None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.train()

    check(
        build(kind),
        *(ONE_AXIS[:1] if kind == "t5" else ONE_AXIS),
        loss_of=loss_of,
        data_of=partial(data_of, kind),
        prepare=prepare,
    )


# ---- torch.compile


graphs: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A back end that runs what was captured as it is: what matters here is what was captured."""
    graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
    return graph.forward


COMPILERS = ("c++", "g++", "clang++")


def compile_list(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=counting)


def compile_in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=counting)


def compile_then_checkpoint(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(torch.compile(block, backend=counting))  # type: ignore[arg-type]


def ahead_of_time(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")


@pytest.mark.parametrize("strategy", ["node=3", "node=1"])
@on_ranks(2)
def test_a_compiled_step(strategy):
    """Forward and backward in one compiled function: the engine's own functions are none of its graphs."""
    # As in `test_compiled_blocks`.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.reset()
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = zm.shard(copy.deepcopy(plain), init_device_mesh("cpu", (2,), mesh_dim_names=("node",)), strategy)

    @torch.compile(backend="eager")
    def step(model, x):
        model(x).square().sum().backward()

    for _ in range(2):
        x = torch.randn(2, 4)
        step(model, x)
        plain(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            dist.all_reduce(theirs.grad)
            close(ours.grad.local, local_part(ours, theirs.grad / 2), ours.full_name, 1e-5)
        zm.zero_grad(model)
        plain.zero_grad()


@pytest.mark.parametrize("wrap", [compile_list, compile_in_place, compile_then_checkpoint, ahead_of_time])
@on_ranks(2)
def test_compiled_blocks(wrap):
    """Compiled before sharding; hooks run around the graphs, and what a block computes is all in one of them."""
    # Dynamo looks at `.grad` of every tensor that it meets; plain models get the same warning.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.reset()
    graphs.clear()
    pair = Wrapped(base=net(), strategy="node=3", wrap=wrap)
    names = [unit.name for unit in engine_of(pair.model).units]
    assert names == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    pair.train()
    if wrap is not ahead_of_time:
        # norm, up, tanh, down, times gain, plus x
        assert graphs and max(graphs) >= 6
        assert len(graphs) <= 3


@on_ranks(2)
def test_compiled_backwards_where_parameters_are_kept_and_where_they_are_not_sharded():
    """Ahead of time, so that the backward too is a graph, over parameters that it finds where the forward saw them."""
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    for strategy in ("node=3k", "node=0"):
        torch._dynamo.reset()
        Wrapped(base=net(), strategy=strategy, wrap=ahead_of_time).train()


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason=f"inductor needs one of {', '.join(COMPILERS)}")
@on_ranks(2)
def test_blocks_that_inductor_compiles(tmp_path):
    """Torch's default back end: kernels in C++ that read the gather slots by address. One rank has to wait for them."""
    warnings.simplefilter("ignore", DeprecationWarning)  # inductor's imports, of what torch itself has deprecated
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    plain, model = net(), net()
    batches = [tokens(0, 0, rank) for rank in range(2)]
    with (
        pytest.MonkeyPatch.context() as patch,
        # In this process; a header that is compiled ahead pays only for many kernels, as do vectors.
        torch._inductor.config.patch(
            {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
        ),
    ):
        # For these ranks alone: what an earlier session compiled would leave nothing to be tried.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        torch._dynamo.reset()
        for index, block in enumerate(model.blocks) if dist.get_rank() == 0 else ():
            model.blocks[index] = torch.compile(block)  # type: ignore[assignment]
        mesh = kept(init_device_mesh, "cpu", (2,), mesh_dim_names=("node",))
        zm.shard(model, mesh, "node=3")
        optimizers = [sgd(m.parameters()) for m in (plain, model)]
        for _ in range(2):
            for batch in batches:
                (next_token_loss(plain, batch) / 2).backward()
            next_token_loss(model, batches[dist.get_rank()]).backward()
            same_grads(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same_params(model, plain)
        torch._dynamo.reset()
    assert dist.get_rank() or list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", ["node=3", "node=1"])
@on_ranks(2)
def test_wrappers_around_what_is_sharded(strategy, compiled):
    """Units are found under them; state dicts have the names of what is wrapped, and take those of the wrapper too."""

    def blocks() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).double()

    plain, inner = blocks(), blocks()
    wrapped: Any = checkpoint_wrapper(torch.compile(inner, backend="eager") if compiled else inner)  # type: ignore[arg-type]
    model = zm.shard(wrapped, kept(init_device_mesh, "cpu", (2,), mesh_dim_names=("node",)), strategy, bucket_bytes=0)
    assert [unit.name for unit in engine_of(model).units] == ["", "0", "1"]
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double() for rank in range(2)]
    model(batches[dist.get_rank()]).square().mean().backward()
    sum(plain(batch).square().mean() / 2 for batch in batches).backward()  # type: ignore[union-attr]
    for net_ in (model, plain):
        torch.optim.SGD(net_.parameters(), lr=0.1).step()
    expected, state = plain.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    found = zm.full_state_dict(model)
    assert all(torch.allclose(found[name], expected[name]) for name in found) and len(found) % 4 == 0
    prefix = "_orig_mod." if compiled else ""
    model.load_state_dict({f"{prefix}{name}": value * 2 for name, value in expected.items()})
    found = zm.full_state_dict(model)
    assert all(torch.allclose(found[name], 2 * expected[name]) for name in found)
