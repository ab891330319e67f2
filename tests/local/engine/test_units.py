"""Tensors that are sharded, tensors that are refused as they would be lost, and modules that are units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

import zeromesh as zm
from zeromesh.engine.api import engine_of
from zeromesh.errors import ModelError


class Doubling(torch.Tensor):
    """Overrides a function, as quantised weights do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) * 2 if func is F.linear else out


class Marked(nn.Parameter):
    """Computes as any other does."""


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def with_first(value: nn.Parameter) -> nn.Sequential:
    model = pair()
    model[0].weight = value
    return model


def subclass(*, frozen: bool) -> nn.Sequential:
    return with_first(nn.Parameter(torch.eye(4).as_subclass(Doubling), requires_grad=not frozen))


class Params4bit(nn.Parameter):
    """Stands for bitsandbytes' class of this name (0.49): codes, whose scales are in an attribute."""

    __module__ = "bitsandbytes.nn.modules"
    quant_state: object = None


def of_bitsandbytes() -> nn.Sequential:
    weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = object()
    return with_first(weight)


def dtensor(mesh, placement) -> nn.Sequential:
    return with_first(nn.Parameter(DTensor.from_local(torch.eye(4), mesh, [placement])))


def accumulating_in_fp32() -> nn.Sequential:
    model = with_first(nn.Parameter(torch.eye(4, dtype=torch.bfloat16)))
    model[0].weight.grad_dtype = torch.float32
    return model


def tied_by_data(device: str, columns: int = 4) -> nn.Sequential:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(columns, 4, bias=False))
    first, second = model.parameters()
    second.data = first.data[:, :columns]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: subclass(frozen=False), r"0\.weight is a Doubling, a subclass of Tensor that computes in its own way"),
        (lambda: subclass(frozen=True), r"0\.weight is a Doubling"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), r"0\.weight has no shape yet .*run the model once"),
        (of_bitsandbytes, r"0\.weight is a Params4bit of bitsandbytes, which keeps scales .*in bf16, and freeze it"),
        (lambda: nn.DataParallel(pair()), "the model is in torch's DataParallel already, which would go on with"),
        (accumulating_in_fp32, r"0\.weight has grad_dtype=torch\.float32, which would be lost.*give zm\.shard these"),
        (lambda: tied_by_data("cpu"), r"0\.weight and 1\.weight share memory and are not one parameter.*Tie them"),
        (lambda: tied_by_data("meta"), r"0\.weight and 1\.weight share memory"),
        (lambda: tied_by_data("cpu", columns=2), r"0\.weight and 1\.weight share memory"),
    ],
)
def test_what_would_be_lost_is_refused_and_nothing_is_touched(make, message):
    model = make()
    held = [
        (param, param.data_ptr()) for param in model.parameters() if not isinstance(param, nn.UninitializedParameter)
    ]
    with pytest.raises(ModelError, match=message):
        zm.shard(model, None, "node=3", units=["Linear"])
    assert all(param.data_ptr() == place for param, place in held)


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=3)])
def test_what_no_box_describes_cannot_be_sharded_further(placement):
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    try:
        model = dtensor(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), placement)
        with pytest.raises(
            ModelError,
            match=r"0\.weight is a DTensor of \(\d, 4\) that lies as .* over tp; only Shard, Replicate, and one",
        ):
            zm.shard(model, init_device_mesh("cpu", (1,), mesh_dim_names=("node",)), "node=3")
    finally:
        torch.distributed.destroy_process_group()


def test_what_shares_memory_without_being_two_of_one_is_sharded():
    frozen = tied_by_data("cpu").requires_grad_(False)
    columns, whole = pair(), torch.randn(4, 8)
    columns[0].weight.data, columns[1].weight.data = whole[:, :4], whole[:, 4:]
    marked = with_first(Marked(torch.eye(4)))
    for model in (frozen, columns, marked):
        x = torch.randn(2, 4)
        want = model(x)
        sharded = zm.shard(model, None, "node=3", units=["Linear"])
        assert sharded(x).equal(want)


class Lookup(nn.Module):
    """An embedding whose forward is never called, behind the blocks, and one ahead of them; None among the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), None, nn.Linear(4, 4)])  # type: ignore[list-item]
        self.queries, self.out = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x if block is None else block(x)
        return self.out(x @ self.queries.weight.T @ self.queries.weight)


class Accessors(Lookup):
    """As Hugging Face models name their embedding and head: here a list of heads, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 4), None])  # type: ignore[list-item]

    def get_input_embeddings(self):
        raise NotImplementedError

    def get_output_embeddings(self):
        return self.heads

    def forward(self, x):
        return self.heads[0](super().forward(x))


@pytest.mark.parametrize(
    ("kind", "units"),
    [(Lookup, ["", "embed", "blocks.0", "blocks.2", "out"]), (Accessors, ["", "blocks.0", "blocks.2"])],
)
def test_edges_are_the_models_own(kind, units):
    model, x = kind(), torch.arange(6)
    want = model(x)
    zm.shard(model, None, "node=3", bucket_bytes=0)
    assert [unit.name for unit in engine_of(model).units] == units
    assert model(x).equal(want)
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
