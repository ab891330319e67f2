"""Activation checkpointing and compilation: forwards that are repeated in the backward, and hooks around graphs.

Steps after the first are those of wrapped and compiled blocks, and of Hugging Face's models.
"""

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
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zeromesh as zm
from tests.dist.parity import (
    ONE_AXIS,
    Block,
    Net,
    Pair,
    check,
    close,
    local_part,
    mean_square,
    mesh_of_world,
    net,
    next_token_loss,
    vectors,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of


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


@on_ranks(2)
def test_segments_of_blocks():
    """A segment of five blocks is longer than the slots."""
    for segment, reentrant, strategies in (
        (2, False, ["node=3"]),
        (5, False, ["node=3d"]),
        (5, True, ["node=3", "node=0"]),
    ):
        torch.manual_seed(0)
        check(Segmented(segment, reentrant, num_blocks=5).double(), *strategies, steps=1)


class Inside(Block):
    """Checkpoints a part of itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: torch.tanh(self.up(self.norm(y))), x, use_reentrant=self.reentrant)
        return x + self.gain * self.down(inner)


class Thrice(Block):
    """Three checkpointed parts share a parameter, whose gradient comes with each, before the others' or after."""

    before = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down, self.norm):
            x = checkpoint(partial(self._part, layer), x, use_reentrant=True)
        return x

    def _part(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x * self.gain) if self.before else layer(x) * self.gain)


def of_blocks(kind: type[Block], **attributes: bool) -> Net:
    base = net()
    for block in base.blocks:
        block.__class__ = kind
        vars(block).update(attributes)
    return base


def half_frozen() -> Net:
    """All trained parameters have their gradients before the first, frozen half is computed again."""
    base = of_blocks(Inside)
    for block in base.blocks:
        block.up.requires_grad_(False)
        block.norm.requires_grad_(False)
    return base


class Sequenced(Net):
    def __init__(self) -> None:
        super().__init__(num_blocks=5)
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint_sequential(self.blocks, 2, self.embed(tokens), use_reentrant=False)  # type: ignore[arg-type]
        return self.head(self.norm(x))


PARTS = {
    "of a block": (lambda: of_blocks(Inside), ONE_AXIS),
    "of a block, reentrant": (lambda: of_blocks(Inside, reentrant=True), ("node=3d",)),
    "frozen": (half_frozen, ("node=3", "node=0")),
    "that share a parameter after": (lambda: of_blocks(Thrice), ("node=3",)),
    "that share a parameter before": (lambda: of_blocks(Thrice, before=True), ("node=0",)),
    "of a sequence": (lambda: Sequenced().double(), ("node=3",)),
}


@pytest.mark.parametrize("parts", PARTS)
@on_ranks(2)
def test_parts_that_are_computed_again(parts):
    make, strategies = PARTS[parts]
    check(make(), *strategies, steps=1)


@on_ranks(2)
def test_the_whole_model():
    """As a user does who checkpoints model(x) from outside."""

    def loss_of(model: nn.Module, batch: Tensor, *, reentrant: bool) -> Tensor:
        # Reentrant checkpointing differentiates with respect to its inputs, so one of them must ask for it.
        anchor = torch.zeros((), requires_grad=True)
        return next_token_loss(lambda t: checkpoint(lambda t, _: model(t), t, anchor, use_reentrant=reentrant), batch)

    for reentrant in (False, True):
        check(net(), *ONE_AXIS[reentrant::2], loss_of=partial(loss_of, reentrant=reentrant), steps=1)


NAMES = ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]


@on_ranks(2)
def test_checkpoint_wrapper():
    """Units and names are those of the unwrapped model."""

    def wrap(model: nn.Module, implementation: CheckpointImpl) -> None:
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )

    for implementation, strategy in zip(CheckpointImpl, ONE_AXIS, strict=False):
        options = {"bucket_bytes": 0}
        (pair,) = check(net(), strategy, wrap=partial(wrap, implementation=implementation), options=options)
        assert [unit.name for unit in engine_of(pair.model).units] == NAMES


# ---- torch.compile


graphs: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A back end that runs graphs as they were captured: their sizes alone matter here."""
    graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
    return graph.forward


def in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=counting)


def then_checkpoint(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(torch.compile(block, backend=counting))  # type: ignore[arg-type]


def ahead_of_time(model: Any) -> None:
    """So that the backward too is a graph, over parameters that it finds where the forward saw them."""
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")


def start_compiling() -> None:
    # Dynamo looks at `.grad` of every tensor that it meets; plain models get the same warning.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.reset()
    graphs.clear()


@on_ranks(2)
def test_a_compiled_step():
    """Forward and backward in one compiled function: the engine's own functions are none of its graphs."""
    start_compiling()
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).double()

    @torch.compile(backend="eager")
    def step(model, x):
        model(x).square().mean().backward()

    pair = Pair(base=plain, strategy="node=3", loss_of=mean_square, data_of=vectors(4), micro_batches=1)
    for index in range(2):
        step(pair.model, vectors(4)(index, 0, dist.get_rank()))
        pair.plain_backward(index)
        pair.same_grads()
        zm.zero_grad(pair.model)
        pair.plain.zero_grad()


@pytest.mark.parametrize(
    ("wrap", "strategy"),
    [(in_place, "node=1"), (then_checkpoint, "node=3"), (ahead_of_time, "node=3k")],
)
@on_ranks(2)
def test_compiled_blocks(wrap, strategy):
    """Compiled before sharding; hooks run around the graphs, and all of a block's computation is in one of them."""
    start_compiling()
    (pair,) = check(net(), strategy, wrap=wrap, micro_batches=1, options={"bucket_bytes": 0})
    assert [unit.name for unit in engine_of(pair.model).units] == NAMES
    if wrap is not ahead_of_time:
        # norm, up, tanh, down, times gain, plus x
        assert graphs and max(graphs) >= 6
        assert len(graphs) <= 3


class Small(nn.Module):
    """As little as makes one kernel of the forward and, of a frozen one, the same of the backward: each takes the
    compiler seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@on_ranks(2)
def test_blocks_that_inductor_compiles(tmp_path):
    """Torch's default back end: kernels in C++ that read the gather slots by address. One rank has to wait for them."""

    def wrap(model: Any) -> None:
        if dist.get_rank() == 0:
            model[1] = torch.compile(model[1])

    start_compiling()
    warnings.simplefilter("ignore", DeprecationWarning)  # inductor's, of functions that torch has deprecated
    # In this process; a header that is compiled ahead pays only for many kernels, as do vectors.
    config = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(config):
        # For these ranks alone: an earlier session's kernels would leave nothing to be tried.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        base = nn.Sequential(*(Small() for _ in range(3))).double()
        base[1].weight.requires_grad_(False)
        check(base, "node=3", wrap=wrap, loss_of=mean_square, data_of=vectors(4), options={"units": [Small]})
        torch._dynamo.reset()
    assert dist.get_rank() or list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(("strategy", "compiled"), [("node=3", True), ("node=1", False)])
@on_ranks(2)
def test_wrappers_around_what_is_sharded(strategy, compiled):
    """Units are found under them; state dicts have the names of the wrapped ones, and take those of the wrapper too."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).double()
    inner: Any = copy.deepcopy(plain)
    wrapped = checkpoint_wrapper(torch.compile(inner, backend="eager") if compiled else inner)
    model = zm.shard(wrapped, mesh_of_world(), strategy, bucket_bytes=0)
    assert [unit.name for unit in engine_of(model).units] == ["", "0", "1"]
    batches = [vectors(4)(0, 0, rank) for rank in range(2)]
    mean_square(model, batches[dist.get_rank()]).backward()
    sum(mean_square(plain, batch) / 2 for batch in batches).backward()  # type: ignore[union-attr]
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    expected = plain.state_dict()
    assert list(model.state_dict()) == list(expected)
    prefix = "_orig_mod." if compiled else ""
    for factor in (1, 2):
        if factor == 2:
            model.load_state_dict({f"{prefix}{name}": value * 2 for name, value in expected.items()})
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            close(param.local, local_part(param, value * factor), param.full_name)
        found = zm.full_state_dict(model)
        assert all(torch.allclose(found[name], factor * expected[name]) for name in found) and len(found) % 4 == 0
