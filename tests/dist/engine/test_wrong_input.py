"""Each wrong input gives one message that says what was required, what was got, what to do; on all ranks, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.engine.reference import Case, backward, batch, loss_of, mesh_of, sharded
from tests.dist.features.parity import net as plain_net
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


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("node=4", NotationError, r"stage must be one of 0, 1, 2, 3, 3k, 3d, 3dk; got '4'"),
        ("node:3", NotationError, r"a strategy is axis=stage terms.* or a preset; got 'node:3'"),
        ("hdsp", NotationError, r"got 'hdsp': did you mean hsdp"),
        ("hsdp", NotationError, r"preset hsdp has 2 levels, the mesh has 1: node"),
        ("nod=3", MeshError, r"the mesh has no axis 'nod' .*did you mean node\?"),
        ("node=3,cluster=0", MeshError, r"the mesh has no axis 'cluster'"),
        ("node[4]=3,node[2]=0", MeshError, r"needs node to have 8 ranks; this mesh has 2"),
    ],
)
@on_ranks(2)
def test_strategy(strategy, error, message):
    with pytest.raises(error, match=message):
        shard(CASE.build(), strategy)


@on_ranks(4)
def test_stages_that_cannot_stand_together():
    with pytest.raises(NotationError, match=r"node=2 cannot stand with cluster=3d: .* use cluster=3, or node=1 or 3d"):
        shard(CASE.build(), "node=2,cluster=3d", mesh_of(2, 2))


@on_ranks(2)
def test_mesh_without_names():
    mesh = kept(init_device_mesh, "cpu", (2,))
    with pytest.raises(MeshError, match=r"dimensions need names: init_device_mesh\(.*mesh_dim_names="):
        shard(CASE.build(), "node=3", mesh)


@on_ranks(2)
def test_no_mesh_on_two_ranks():
    with pytest.raises(MeshError, match="a mesh is needed on 2 ranks: make one with torch's init_device_mesh"):
        zm.shard(CASE.build(), None, "node=3")


@on_ranks(3)
def test_rank_outside_the_mesh():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = kept(DeviceMesh, "cpu", (0, 1), mesh_dim_names=("node",))
    if dist.get_rank() == 2:
        with pytest.raises(MeshError, match="rank 2 is not in the mesh"):
            shard(CASE.build(), "node=3", mesh)


@on_ranks(2)
def test_unknown_unit_class():
    with pytest.raises(ModelError, match=r"no module of class Blok is in the model.*did you mean Block\?"):
        shard(CASE.build(), "node=3", units=["Blok"])
    with pytest.raises(ModelError, match=r"resident unit 'layers\.9' is not a unit of the model: did you mean"):
        shard(CASE.build(), "node=3", resident=["layers.9"])


@on_ranks(2)
def test_sharded_twice_and_not_at_all():
    model = shard(CASE.build(), "node=3")
    with pytest.raises(ModelError, match=r"sharded already; zm\.shard is called once"):
        shard(model, "node=3")
    with pytest.raises(ModelError, match=r"Net is not sharded .*: call zm\.shard first"):
        zm.clip_grad_norm_(CASE.build(), 1.0)


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


# What one rank has otherwise: its model, or its arguments of zm.shard.
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
    "units": ["Block"],
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
    "mesh": (MeshError, r"the mesh has no axis 'rack'"),
    "stages": (NotationError, r"node=2 cannot stand with cluster=3d"),
    "units": (ModelError, r"no module of class Blok is in the model"),
    "resident": (ModelError, r"resident unit 'layers\.9' is not a unit"),
    "param_dtype": (InputError, r"param_dtype must be one of fp64, fp32, bf16, fp16; got 'int32'"),
    "sharded": (ModelError, r"sharded already"),
    "trained": (ModelError, r"parameters that are trained must be fp64, fp32, bf16 or fp16"),
}


@on_ranks(4)
def test_wrong_input_on_one_rank_only():
    """The others do not wait for it: they say which rank it was, and why; nothing has been sharded."""
    others = {
        "strategy": "node=4",
        "mesh": "node=3,rack=1",
        "stages": "node=2,cluster=3d",
    }
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
            shard(net, others.get(kind, strategy) if wrong else strategy, mesh_of(2, 2), **options)


@on_ranks(4)
def test_a_cluster_that_one_rank_does_not_know():
    """With "auto", what the planner refuses on one rank is heard of by all."""
    wrong = dist.get_rank() == 2
    workload = zm.Workload(seq_len=8, global_batch_tokens=64, micro_batch=1)
    found = r"cluster 'gloo-labtop'.*did you mean gloo-laptop\?"
    expected, text = (
        (ClusterError, found) if wrong else (MismatchError, rf"on rank 2 it did not: ClusterError: .*{found}")
    )
    with pytest.raises(expected, match=text):
        name = "gloo-labtop" if wrong else "gloo-laptop"
        zm.shard(plain_net(), mesh_of(4), "auto", cluster=name, workload=workload)


@on_ranks(4)
def test_wires_whose_regions_would_overlap():
    message = r"parameters in fp64 cannot be gathered over axes in fp32 and in bf16, of other widths"
    with pytest.raises(NotationError, match=message):
        shard(CASE.build().double(), "node=3@bf16/,cluster=3@fp32/", mesh_of(2, 2))
    shard(CASE.build().double(), "node=3@bf16/,cluster=3@fp16/", mesh_of(2, 2))


@on_ranks(2)
def test_optimizer_built_before_sharding():
    net = CASE.build()
    optimizer = torch.optim.AdamW(net.parameters())
    model = shard(net, "node=3")
    backward(model, CASE, 0)
    with pytest.raises(OptimizerError, match=r"AdamW holds 'embed.weight' as it was before zm\.shard.*after zm\.shard"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "Muon", "custom"])
@on_ranks(2)
def test_optimizer_that_is_not_elementwise(kind):
    model = shard(CASE.build(), "node=3")
    before = zm.full_state_dict(model)
    params = list(model.parameters())
    if kind == "Muon":
        params = [param for param in params if param.ndim == 2]
    if kind == "custom":
        optimizer = type("Lamb", (torch.optim.SGD,), {"__module__": "elsewhere", "step": lambda self, closure: None})(
            params, lr=0.1
        )
    else:
        optimizer = getattr(torch.optim, kind)(params)
    backward(model, CASE, 0)
    name = "Lamb" if kind == "custom" else kind
    with pytest.raises(
        OptimizerError, match=rf"must work element by element; .*{name} is not known to.*zm\.elementwise"
    ):
        optimizer.step(lambda: 0.0)
    after = zm.full_state_dict(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@on_ranks(2)
def test_optimizer_that_the_user_vouches_for():
    model = shard(CASE.build(), "node=3")
    step = torch.optim.SGD.step
    own = type("Mine", (torch.optim.SGD,), {"__module__": "elsewhere", "step": lambda self, closure=None: step(self)})
    optimizer = zm.elementwise(own(model.parameters(), lr=0.1))
    backward(model, CASE, 0)
    optimizer.step()


@on_ranks(2)
def test_step_with_partial_gradients():
    model = shard(CASE.build(), "node=3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets, _ = batch(CASE, 0, 0, dist.get_rank())
    with zm.accumulate(model, last=False):
        loss_of(model, tokens, targets).backward()
    with pytest.raises(OptimizerError, match=r"holds gradients of micro-batches that were not reduced: .*last=True"):
        optimizer.step()
    zm.zero_grad(model)
    backward(model, CASE, 0)
    optimizer.step()


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=0,cluster=2", "node=3,cluster=0"])
@on_ranks(4)
def test_plain_clipping_gives_the_same_norm(strategy, kind):
    case = Case(micro_batches=2)
    whole = case.build()
    for rank in range(4):
        for micro in range(2):
            tokens, targets, _ = batch(case, 0, micro, rank)
            (loss_of(whole, tokens, targets) / 8).backward()
    full = [param for param in whole.parameters() if param.numel()]  # torch has no infinity norm of nothing
    expected = float(torch.nn.utils.clip_grad_norm_(full, 0.3, norm_type=kind))
    with sharded(strategy, case, mesh_of(2, 2)) as (model, _):
        backward(model, case, 0)
        ours = float(zm.clip_grad_norm_(model, float("inf"), norm_type=kind))
        plain = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type=kind))
        again = float(zm.clip_grad_norm_(model, float("inf"), norm_type=kind))
    # The model mixes fp32 and fp64, whose gradients a single process adds up in fp32 for some.
    assert ours == pytest.approx(expected, rel=1e-6)
    assert plain == pytest.approx(ours, rel=1e-12)
    assert again == pytest.approx(min(0.3, ours), rel=1e-4)


@on_ranks(2)
def test_whole_tensor_functions_of_a_slice():
    model = shard(CASE.build(), "node=3")
    param = next(iter(model.parameters()))
    with pytest.raises(OptimizerError, match=r"cumsum needs all of embed\.weight \(11, 7\).*use zm\.full_state_dict"):
        param.cumsum(0)
    assert param.shape == (11, 7) and param.ndim == 2 and param.local.dim() == 1


@on_ranks(2)
def test_state_that_does_not_fit():
    model = shard(CASE.build(), "node=3")
    state = zm.full_state_dict(model)
    if dist.get_rank() == 0:
        state["embed.weigth"] = state.pop("embed.weight")
    with pytest.raises(ModelError, match=r"no parameter or buffer 'embed.weigth': did you mean embed.weight"):
        zm.load_full_state_dict(model, state)
    if dist.get_rank() == 0:
        state["embed.weight"] = state.pop("embed.weigth")[:3]
    with pytest.raises(ModelError, match=r"embed.weight must have shape \(11, 7\); the state's has \(3, 7\)"):
        zm.load_full_state_dict(model, state)


class Forked(nn.Module):
    """Two blocks that ranks may call in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, order):
        for index in order:
            x = self.blocks[index](x)
        return x


@on_ranks(2, timeout_s=60.0, spoils=True)
def test_units_in_another_order_on_another_rank():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("node",))
    model = zm.shard(Forked(), mesh, "node=3")
    order = (0, 1, 2) if dist.get_rank() == 0 else (1, 0, 2)
    with pytest.raises(
        RuntimeError, match=r"(?s)all ranks must call the units in the same order|failed on rank|timed out"
    ):
        model(torch.ones(2, 4), order).sum().backward()


@on_ranks(2)
def test_units_in_another_order_where_nothing_is_gathered():
    model = shard(Forked(), "node=1")
    order = (0, 1, 2) if dist.get_rank() == 0 else (1, 0, 2)
    model(torch.ones(2, 4), order).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
