"""Each wrong input gives one message that says the requirement, the value and the remedy; on all ranks, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.parity import Case, backward, loss_of, mesh_of
from tests.dist.parity import net as plain_net
from tests.dist.pool import kept, on_ranks
from zeromesh.errors import (
    ClusterError,
    InputError,
    MeshError,
    MismatchError,
    ModelError,
    NotationError,
    OptimizerError,
)

CASE = Case(precision="fp32", micro_batches=2)


def shard(model: nn.Module, strategy, mesh=None, **options):
    return zm.shard(model, mesh or mesh_of(2), strategy, **options)


ON_TWO_RANKS = (
    ({"strategy": "node=4"}, NotationError, r"stage must be one of 0, 1, 2, 3, 3k, 3d, 3dk, 3h, 3dh; got '4'"),
    ({"strategy": "nod=3"}, MeshError, r"the mesh has no axis 'nod' .*did you mean node\?"),
    ({"units": ["AwkwardBlok"]}, ModelError, r"no module of class AwkwardBlok.*did you mean AwkwardBlock or"),
    ({"resident": ["layers.9"]}, ModelError, r"resident unit 'layers\.9' is not a unit of the model: did you mean"),
)


@on_ranks(2)
def test_arguments_of_shard():
    for options, error, message in ON_TWO_RANKS:
        with pytest.raises(error, match=message):
            shard(CASE.build(), **{"strategy": "node=3"} | options)
    with pytest.raises(MeshError, match=r"dimensions need names: init_device_mesh\(.*mesh_dim_names="):
        shard(CASE.build(), "node=3", kept(init_device_mesh, "cpu", (2,)))
    with pytest.raises(MeshError, match="2 ranks need a mesh, got None: make one with torch's init_device_mesh"):
        zm.shard(CASE.build(), None, "node=3")
    with pytest.raises(ModelError, match=r"Awkward is not sharded .*: call zm\.shard first"):
        zm.clip_grad_norm_(CASE.build(), 1.0)
    model = shard(CASE.build(), "node=3")
    with pytest.raises(ModelError, match=r"already sharded: call zm\.shard once"):
        shard(model, "node=3")
    with pytest.raises(ModelError, match=r"AwkwardBlock is not sharded \(or is a part of a sharded model\)"):
        zm.zero_grad(model.layers[0])


@on_ranks(3)
def test_rank_outside_the_mesh():
    mesh = kept(DeviceMesh, "cpu", (0, 1), mesh_dim_names=("node",))
    if dist.get_rank() == 2:
        with pytest.raises(MeshError, match="rank 2 is not in the mesh"):
            shard(CASE.build(), "node=3", mesh)


@on_ranks(4)
def test_a_rank_with_another_strategy():
    strategy = "node=3,cluster=1" if dist.get_rank() != 2 else "node=3,cluster=0"
    with pytest.raises(
        MismatchError,
        match=r"all ranks must have the same strategy; rank 0 has .*cluster=1.* rank 2 has .*cluster=0.*: "
        r"start every rank with the same arguments",
    ):
        shard(CASE.build(), strategy, mesh_of(2, 2))


def _tie(net: Any) -> None:
    net.scales[0].factor = net.scales[1].factor


# One rank differs in its model, or in its arguments of zm.shard.
OTHER_MODELS = {
    "shape": lambda net: setattr(net, "head", nn.Linear(7, 12)),
    "frozen": lambda net: net.head.requires_grad_(False),
    "missing": lambda net: setattr(net, "norm", nn.LayerNorm(7, elementwise_affine=False)),
    "own dtype": lambda net: net.head.double(),
    "tied": _tie,
    "buffer": lambda net: net.head.register_buffer("table", torch.zeros(3)),
    "buffer's shape": lambda net: setattr(net, "steps", torch.zeros(5)),
    "buffer's dtype": lambda net: setattr(net, "steps", torch.zeros(4, dtype=torch.int64)),
    "unsharded": lambda net: setattr(net, "codes", nn.Parameter(torch.zeros(9, dtype=torch.int8), requires_grad=False)),
}
OTHER_ARGUMENTS = {
    "param_dtype": torch.bfloat16,
    "reduce_dtype": torch.bfloat16,
    "grad_dtype": torch.bfloat16,
    "master_dtype": torch.bfloat16,
    "units": ["AwkwardBlock"],
    "resident": ["layers.1"],
}


@on_ranks(4)
def test_a_rank_with_another_model():
    for name in (*OTHER_MODELS, *OTHER_ARGUMENTS):
        net, options = CASE.build(), {}
        net.register_buffer("steps", torch.zeros(4))
        net.codes = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
        if dist.get_rank() == 1:
            OTHER_MODELS.get(name, lambda net: None)(net)
            options = {name: OTHER_ARGUMENTS[name]} if name in OTHER_ARGUMENTS else {}
        before = [param.clone() for param in net.parameters()]
        with pytest.raises(MismatchError, match=r"all ranks must have the same model; rank 0 has .* rank 1 has ") as it:
            shard(net, "node=3,cluster=1", mesh_of(2, 2), **options)
        said = {"buffer": "buffer head.table (3,)", "resident": "resident unit 'layers.1'"}
        assert said.get(name, "") in str(it.value)
        assert all(param.equal(value) for param, value in zip(net.parameters(), before, strict=True))


@on_ranks(4)
def test_a_rank_that_joins_other_units():
    """`bucket_bytes` counts where it joins other units; elsewhere ranks may differ in it, as in `debug` and `init`."""
    rank = dist.get_rank()
    with pytest.raises(MismatchError, match=r"the same model; rank 0 has .* of 8 module.*rank 1 has .* of 1 module"):
        shard(CASE.build(), "node=1,cluster=1", mesh_of(2, 2), bucket_bytes=0 if rank == 1 else 1 << 20)
    shard(CASE.build(), "node=3,cluster=1", mesh_of(2, 2), bucket_bytes=rank, debug=rank == 1, init=nn.Module.float)


FAILURES = {
    "strategy": (NotationError, r"stage must be one of .*; got '4'"),
    "units": (ModelError, r"the model has no module of class Blok"),
    "resident": (ModelError, r"resident unit 'layers\.9' is not a unit"),
    "param_dtype": (InputError, r"param_dtype must be one of fp64, fp32, bf16, fp16; got 'int32'"),
    "sharded": (ModelError, r"already sharded"),
    "trained": (ModelError, r"parameters that are trained must be fp64, fp32, bf16 or fp16"),
}


@on_ranks(4)
def test_wrong_input_on_one_rank_only():
    """The others do not wait for it: they say which rank it was, and why; nothing has been sharded."""
    arguments = {"units": ["Blok"], "resident": ["layers.9"], "param_dtype": torch.int32}
    for kind, (error, message) in FAILURES.items():
        wrong = dist.get_rank() == 2
        net, strategy = CASE.build(), "node=3,cluster=1"
        options = {kind: arguments[kind]} if wrong and kind in arguments else {}
        if kind == "sharded":
            done = shard(CASE.build(), strategy, mesh_of(2, 2))
            net = done if wrong else net
        elif kind == "trained" and wrong:
            net.codes = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        expected, text = (
            (error, message) if wrong else (MismatchError, rf"on rank 2 it did not: {error.__name__}: .*{message}")
        )
        with pytest.raises(expected, match=text):
            shard(net, "node=4" if wrong and kind == "strategy" else strategy, mesh_of(2, 2), **options)


@on_ranks(4)
def test_a_cluster_that_one_rank_does_not_know():
    """With "auto", all hear of a refusal by the planner on one rank."""
    wrong = dist.get_rank() == 2
    workload = zm.Workload(seq_len=8, global_batch_tokens=64, micro_batch=1)
    found = r"cluster 'gloo-labtop'.*did you mean gloo-laptop\?"
    expected, text = (
        (ClusterError, found) if wrong else (MismatchError, rf"on rank 2 it did not: ClusterError: .*{found}")
    )
    with pytest.raises(expected, match=text):
        name = "gloo-labtop" if wrong else "gloo-laptop"
        zm.shard(plain_net(), mesh_of(4), "auto", cluster=name, workload=workload)


class Derived(optim.SGD):
    """Steps as torch's does, with an option of its own."""

    def __init__(self, params, lr=0.1, tag=0):
        super().__init__(params, lr=lr)
        self.tag = tag


class Overriding(Derived):
    def step(self, closure=None):
        return super().step(closure)


@on_ranks(2)
def test_optimizers_that_would_be_wrong_are_refused():
    net = CASE.build()
    early = optim.AdamW(net.parameters())
    model = shard(net, "node=3")
    backward(model, CASE, 0)
    before = zm.full_state_dict(model)
    with pytest.raises(OptimizerError, match=r"AdamW holds 'embed.weight' as it was before zm\.shard.*after zm\.shard"):
        early.step()
    matrices = [param for param in model.parameters() if param.ndim == 2]
    for kind, params in (
        (optim.LBFGS, model.parameters()),
        (optim.Adafactor, model.parameters()),
        (optim.Muon, matrices),
        (Overriding, model.parameters()),
    ):
        message = rf"must work element by element; .*{kind.__name__} is not known to.*zm\.elementwise"
        with pytest.raises(OptimizerError, match=message):
            kind(params).step(lambda: 0.0)
    with pytest.raises(OptimizerError, match=r"must work element by element; .*LBFGS is not known to"):
        zm.memory_report(model, optim.LBFGS(model.parameters()))
    with pytest.raises(OptimizerError, match=r"needs all of"):
        zm.elementwise(optim.Adafactor(model.parameters())).step()
    after = zm.full_state_dict(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    for optimizer in (Derived(model.parameters()), zm.elementwise(Overriding(model.parameters()))):
        optimizer.step()  # with gradients of before


@on_ranks(2)
def test_step_with_partial_gradients():
    model = shard(CASE.build(), "node=3")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with zm.accumulate(model, last=False):
        loss_of(model, CASE.data_of(0, 0, dist.get_rank())).backward()
    with pytest.raises(OptimizerError, match=r"holds gradients of micro-batches that were not reduced: .*last=True"):
        optimizer.step()
    zm.zero_grad(model)
    backward(model, CASE, 0)
    optimizer.step()


@on_ranks(2)
def test_whole_tensors_and_slices():
    model = shard(CASE.build(), "node=3")
    param = next(iter(model.parameters()))
    with pytest.raises(OptimizerError, match=r"cumsum needs all of embed\.weight \(11, 7\).*use zm\.full_state_dict"):
        param.cumsum(0)
    assert param.shape == (11, 7) and param.ndim == 2 and param.local.dim() == 1
    good = CASE.build().state_dict()
    rest = {name: 2 * value for name, value in good.items() if name != "embed.weight"}
    for state, message in (
        (rest | {"embed.weigth": rest["norm.bias"]}, r"no parameter or buffer 'embed.weigth': did you mean embed.w"),
        (rest | {"embed.weight": torch.ones(3, 7)}, r"embed.weight must have shape \(11, 7\); the state's has \(3, 7"),
        (rest, r"has no 'embed\.weight'"),
    ):
        with pytest.raises(ModelError, match=message):
            zm.load_full_state_dict(model, state if dist.get_rank() == 0 else {})
    assert all(torch.equal(value, good[name]) for name, value in zm.full_state_dict(model).items())
