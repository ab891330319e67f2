"""Where the values of a model come from: the meta device, the first rank alone, whole state dicts, changes by hand."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeromesh as zm
from tests.dist.parity import (
    Net,
    Pair,
    close,
    mesh_of,
    mesh_of_world,
    net,
    next_token_loss,
    same_params,
    same_state,
    tokens,
)
from tests.dist.pool import on_ranks
from zeromesh.engine import build
from zeromesh.engine.api import engine_of
from zeromesh.errors import MismatchError, ModelError

MODES = pytest.mark.parametrize("strategy", ("node=3", "node=0"))


# ---- meta device


def ordered_init(calls: list[str]) -> Any:
    """Values that depend on the module's kind alone, so that the order of initialisation does not matter."""

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        for name, param in module.named_parameters(recurse=False):
            assert not param.is_meta
            generator = torch.Generator().manual_seed(param.numel() + len(name))
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))

    return init


@MODES
@on_ranks(2)
def test_meta_model_gets_its_values_on_the_first_rank(strategy):
    expected, calls = net(), []
    for module in expected.modules():
        with torch.no_grad():
            ordered_init([])(module)
    model = zm.shard(net().to("meta"), mesh_of(2), strategy, init=ordered_init(calls))
    # Embedding, final norm and head; in each block two linear layers, a norm and the block's own gain.
    assert len(calls) == (0 if dist.get_rank() else 3 + 3 * 4)
    same_state(model, expected)
    assert next_token_loss(model, tokens(0, 0, 0)).item() == pytest.approx(
        next_token_loss(expected, tokens(0, 0, 0)).item()
    )


class Held(TorchDispatchMode):
    """The most bytes of parameters' dtypes that were alive at once, of storages made since: looked at after each op.

    Slots and scratch memory are made as bytes, so that they do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                num_bytes = storage.nbytes() if tensor.is_floating_point() else 0
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), num_bytes))
        self.most = max(self.most, sum(num_bytes for _, num_bytes in self._alive.values()))
        return made


@on_ranks(2)
def test_no_rank_ever_holds_the_whole_meta_model():
    """At most two units, as the modules hold one and as it is broadcast, beside the rank's own part; and
    one that the back end's thread lets go of a moment after its broadcast has ended."""

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.fill_(0.5)

    model = net(num_blocks=20, dim=16).to("meta")
    whole = sum(param.nbytes for param in model.parameters())
    mesh = mesh_of(2)
    with Held() as held:
        zm.shard(model, mesh, "node=3", init=init)
    engine = engine_of(model)
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    shards = sum(tensor.nbytes for buffer in buffers for tensor in buffer.persistent().values())
    unit = max(sum(8 * buffer.padded for buffer in unit.buffers) for unit in engine.units)
    assert 3 * unit < whole / 6
    assert shards <= held.most <= shards + 3 * unit


class Scaled(nn.Module):
    """A parameter of its own around a linear layer, and a buffer that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        self.table = torch.arange(4.0)  # as torchtitan's modules do; the first rank's memory is still all ranks'

    def _init_weights(self) -> None:
        """Takes no module, as in transformers' MiniCPM-V: it is not that library's rule."""
        raise AssertionError

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.table


class Shared(nn.Module):
    """Linear layers of two blocks share a weight but not their biases, so that it lies in another unit than they."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.blocks[2].inner.weight = self.blocks[0].inner.weight


@on_ranks(2)
def test_modules_initialise_themselves():
    with torch.device("meta"):
        model = Shared()
    zm.shard(model, mesh_of(2), "node=3")
    state = zm.full_state_dict(model)
    assert all(block.table.tolist() == [0, 1, 2, 3] for block in model.blocks)
    if dist.get_rank() == 0:
        assert state["blocks.1.scale"].tolist() == [2, 2, 2, 2]
        assert state["norm.running_var"].tolist() == [1, 1, 1, 1]
        assert state["blocks.0.inner.weight"].equal(state["blocks.2.inner.weight"])
        for name in ("blocks.0.inner.weight", "blocks.0.inner.bias", "blocks.2.inner.bias"):
            assert 0 < state[name].abs().max() <= 0.5  # uniform up to 1/sqrt(4)


@pytest.mark.parametrize(("strategy", "init"), [("node=0", None), ("node=3", nn.Linear.reset_parameters)])
@on_ranks(2)
def test_what_has_values_keeps_them_beside_what_is_made(strategy, init):
    """A new bias; a new layer beside others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].bias = nn.Parameter(torch.empty(8, device="meta"))
    model[1].to("meta")
    given = init and (lambda module: init(module) if isinstance(module, nn.Linear) else None)
    whole = zm.full_state_dict(zm.shard(model, mesh_of(2), strategy, init=given))
    if dist.get_rank() == 0:
        made = {name for name, value in expected.items() if not torch.equal(whole[name], value)}
        assert made == {"0.bias", "1.weight", "1.bias"}
        assert all(torch.isfinite(whole[name]).all() for name in made)


class Bare(nn.Module):
    """With a buffer of integers, which its `reset_parameters` forgets, or part of its weight, or nothing."""

    def __init__(self, *forgotten: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("index", torch.empty(4, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool))
        if forgotten != ("all",):
            self.reset_parameters = lambda: self.reset(forgotten)

    def reset(self, forgotten: tuple[str, ...]) -> None:
        if "bias" in forgotten:
            raise ValueError("no bias to initialise")
        nn.init.zeros_(self.weight[:2] if "weight" in forgotten else self.weight)
        self.mask.fill_(True)
        if "index" not in forgotten:
            self.index.copy_(torch.arange(4))


@on_ranks(2)
def test_values_that_nobody_gives_are_an_error_on_every_rank():
    for forgotten, message in (
        ("all", r"weight is on the meta device and Bare has no reset_parameters"),
        ("bias", r"the initialisation of 0 raised ValueError: no bias to initialise"),
        ("weight", r"weight.*left it, or part of it, without values.*init="),
        ("index", r"index was on the meta device and its initialisation left it"),
        ("", ""),
    ):
        with torch.device("meta"):
            model = nn.Sequential(Bare(forgotten), Bare(forgotten))
        with pytest.raises(ModelError, match=message) if message else nullcontext():
            zm.shard(model, mesh_of_world(), "node=3")
    assert all(bare.index.tolist() == [0, 1, 2, 3] and bare.mask.all() for bare in model)


@on_ranks(4)
def test_memory_that_one_rank_lacks_is_an_error_on_every_rank():
    """Here of buffers, which come after the last thing that all ranks exchange."""
    rank = dist.get_rank()
    failing = mock.patch.object(build, "_bytes", side_effect=MemoryError("no room"))
    error, message = (MemoryError, "no room") if rank == 2 else (MismatchError, "on rank 2 it did not: MemoryError")
    with failing if rank == 2 else nullcontext(), pytest.raises(error, match=message):
        zm.shard(net(), mesh_of(2, 2), "node=3,cluster=1")


@on_ranks(2)
def test_hugging_face_on_the_meta_device():
    from tests.dist.features.test_huggingface import build

    for kind in ("llama", "t5"):
        expected = build(kind).float()
        with torch.device("meta"):
            model = build(kind).float()
        torch.manual_seed(1)
        zm.shard(model, mesh_of_world(), "node=3")
        for (name, held), (_, value) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
            close(held, value, name)
        for name, value in zm.full_state_dict(model).items():
            spread = expected.state_dict()[name].std(correction=0).item()
            assert value.std(correction=0).item() == pytest.approx(spread, rel=0.5, abs=1e-9), name


# ---- the first rank's values


@pytest.mark.parametrize(("strategy", "others"), [("node=3,cluster=3", "meta"), ("node=0,cluster=1", "random")])
@on_ranks(4)
def test_weights_on_the_first_rank_only(strategy, others):
    expected, model = net(), net()
    if dist.get_rank():
        torch.manual_seed(dist.get_rank())
        model = model.to("meta") if others == "meta" else Net().double()
    zm.shard(model, mesh_of(2, 2), strategy)
    same_params(model, expected)
    same_state(model, expected)


@on_ranks(2)
def test_buffers_are_the_first_rank_s():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        model.register_buffer(f"of_{dtype}".replace(".", "_"), torch.arange(6).view(2, 3).t().to(dtype) + rank)
    zm.shard(model, mesh_of(2), "node=3")
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        assert getattr(model, f"of_{dtype}".replace(".", "_")).equal(torch.arange(6).view(2, 3).t().to(dtype))


# ---- state


@on_ranks(2)
def test_whole_state_of_dtypes_that_gloo_does_not_know():
    dtypes = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64)
    model = nn.Linear(2, 2)
    values = {str(dtype).removeprefix("torch."): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    for name, value in values.items():
        model.register_buffer(name, torch.zeros(3, 2).to(value.dtype).t())
    model.register_buffer("none", torch.zeros(0, 2, dtype=torch.int16))
    # torchtitan's split a fused weight, which needs the whole of it.
    model.register_state_dict_post_hook(lambda *_: pytest.fail("called with slices"))
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.uint16), requires_grad=False))
    zm.shard(model, mesh_of(2), "node=2")
    state = values | {"weight": torch.eye(2), "bias": torch.ones(2), "none": torch.zeros(0, 2)}
    state["codes"] = torch.tensor([1, 2, 60000], dtype=torch.uint16)
    zm.load_full_state_dict(model, state if dist.get_rank() == 0 else {})
    for name, value in (values | {"codes": state["codes"]}).items():
        assert getattr(model, name).equal(value), name
    assert model(torch.tensor([3.0, 4.0])).tolist() == [4.0, 5.0]
    assert set(zm.full_state_dict(model)) == (set(state) if dist.get_rank() == 0 else set())


@MODES
@on_ranks(2)
def test_a_change_by_hand_and_refresh(strategy):
    """An average of the weights over steps, evaluated in place of the weights and taken back."""
    pair = Pair(base=net(), strategy=strategy)
    average = {n: p.detach().clone() for n, p in pair.plain.named_parameters()}
    local = {n: p.local.clone() for n, p in pair.model.named_parameters()}

    def evaluate(step: int) -> None:
        for name, p in pair.plain.named_parameters():
            average[name].lerp_(p.detach(), 0.3)
        for name, p in pair.model.named_parameters():
            local[name].lerp_(p.local, 0.3)
        kept = {n: p.local.clone() for n, p in pair.model.named_parameters()}
        with torch.no_grad():
            for name, p in pair.model.named_parameters():
                p.local.copy_(local[name])
            zm.refresh(pair.model)
            reference = copy.deepcopy(pair.plain)
            reference.load_state_dict(average)
            batch = tokens(step, 0, dist.get_rank())
            close(pair.model(batch), reference(batch), "averaged model's output")
            for name, p in pair.model.named_parameters():
                p.local.copy_(kept[name])
            zm.refresh(pair.model)
            close(pair.model(batch), pair.plain(batch), "model's output afterwards")

    pair.train(after_step=evaluate)


# ---- the end


@on_ranks(2)
def test_moving_a_sharded_model():
    model = zm.shard(net().float(), mesh_of(2), "node=3", param_dtype=torch.bfloat16)
    before = zm.full_state_dict(model)
    assert model.to("cpu") is model and model.float() is model
    for move in (nn.Module.half, nn.Module.double, lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu")):
        with pytest.raises(ModelError, match=r"view of this rank's shard \(torch\.float32 on cpu\).*before zm\.shard"):
            move(model)
    after = zm.full_state_dict(model)
    assert all(after[name].equal(value) for name, value in before.items())
    with pytest.raises(ModelError, match=r"cannot be copied"):
        copy.deepcopy(model)
    block = model.blocks[0]
    assert copy.copy(model).blocks is model.blocks
    del model
    gc.collect()
    with pytest.raises(ModelError, match=r"has been deleted"):
        block(torch.ones(2, 5))


@on_ranks(2)
def test_a_mesh_of_sizes_is_on_the_host_where_a_build_for_devices_finds_none():
    built_for = torch.device("cuda")
    with mock.patch.object(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else built_for
    ):
        zm.Sharding(strategy="node=3", mesh={"node": 2}).shard(nn.Linear(2, 2))
