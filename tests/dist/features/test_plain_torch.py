"""Uses of parameters and gradients that plain torch allows: zeromesh does the same, or says that it cannot."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.features.test_misuse import (
    STAGES,
    WIDTH,
    ActorCritic,
    booming,
    chain,
    fragile,
    inputs,
    mesh,
    same_grads,
    sharded,
)
from tests.dist.parity import (
    Pair,
    Part,
    Unit,
    check,
    close,
    local_part,
    mean_square,
    same_params,
    sgd,
    vectors,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError, InputError, ModelError, OptimizerError

SOME = pytest.mark.parametrize("strategy", ["node=3", "node=0"])


def backward(model: nn.Module, seed: int = 0) -> None:
    mean_square(model, inputs(seed)).backward()


# ---- hooks and attributes


@on_ranks(2)
def test_hooks_on_parameters_are_refused_and_what_users_write_on_them_stays():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        base = chain()
        handle = getattr(base.get_submodule("1.0").weight, register)(lambda grad: None)
        with pytest.raises(ModelError, match=r"1\.0\.weight has hooks for its gradient"):
            zm.shard(base, mesh(), "node=3")
        handle.remove()
        base.get_submodule("0.0").bias.own = True
        seen = []
        base.get_submodule("0.0").register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(module.bias.own)
        )
        model = zm.shard(base, mesh(), "node=3")
        with pytest.raises(ModelError, match=r"a hook on 1\.0\.weight would never be called"):
            getattr(dict(model.named_parameters())["1.0.weight"], register)(lambda grad: None)
        model(inputs()).sum().register_hook(lambda grad: None)  # on activations they are called
        assert [name for name, param in model.named_parameters() if getattr(param, "own", False)] == ["0.0.bias"]
        assert seen == [True]


# ---- gradients that autograd is asked for


@SOME
@on_ranks(2)
def test_gradients_for_listed_parameters_are_refused(strategy):
    model = sharded(chain(), strategy)
    optimizer = sgd(model.parameters())
    with pytest.raises(ModelError, match=r"torch\.autograd\.grad with respect to 0\.0\.weight"):
        torch.autograd.grad(model(inputs()).sum(), list(model.parameters()), allow_unused=True)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ModelError, match=r"torch\.autograd\.backward with respect to 0\.0\.weight.*without inputs="):
        model(inputs()).sum().backward(inputs=list(model.parameters()))
    backward(model)
    optimizer.step()


@on_ranks(2)
def test_a_step_without_gradients_is_one_where_nothing_waits_for_them():
    model = sharded(chain(), "node=3")
    optimizer = sgd(model.parameters())
    optimizer.step()
    with torch.no_grad():
        model(inputs())
    optimizer.step()

    def closure():
        optimizer.zero_grad()
        loss = model(inputs()).sum()
        loss.backward()
        return loss

    model(inputs())  # for its value alone
    optimizer.step(closure)
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_an_optimizer_of_two_models_steps_where_one_has_gradients():
    first, second = sharded(chain(), "node=3"), sharded(chain(), "node=1")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    second(first(inputs()).detach()).sum().backward()
    optimizer.step()
    assert all(param.grad is None for param in first.parameters())


@SOME
@on_ranks(2)
def test_a_backward_adds_to_gradients_that_were_set_by_hand(strategy):
    plain, model = chain(), sharded(chain(), strategy)
    for seed in (0, 1):
        for each in (plain, model):
            backward(each, seed)
            for param in each.parameters():
                param.grad = param.grad * 2
    held = [param.grad for param in model.parameters()]
    backward(model, 2)
    backward(plain, 2)
    same_grads(model, plain)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), held, strict=True))
    plain.zero_grad()
    model.zero_grad(set_to_none=False)
    for zeros in (torch.zeros_like, lambda grad: grad * 0):
        backward(plain, 1)
        backward(model, 1)
        same_grads(model, plain)
        plain.zero_grad()
        for param in model.parameters():
            param.grad = zeros(param.grad)


HELD: dict[str, Any] = {
    "node=3": lambda names: names[-2:],
    "node=1": lambda names: [name for name in names if name.endswith("bias")],
    "node=0": lambda names: names[-1:],
}


@STAGES
@on_ranks(2)
def test_some_gradients_are_of_no_optimizer_and_some_are_dropped_or_zeroed(strategy):
    """Neither those of an optimizer that holds some of the parameters, or more from a later step on, nor the others',
    which nobody drops, may be lost, or reduced twice."""
    for partly in (True, False):
        plain, model, optimizers = chain(), sharded(chain(), strategy), list[torch.optim.Optimizer]()
        for each in (plain, model):
            named = dict(each.named_parameters())
            names = HELD[strategy]([*named]) if partly else [*named]
            optimizers.append(torch.optim.SGD([named[name] for name in names], lr=0.1))
        for step in range(3):
            for micro in range(2):
                with zm.accumulate(model, last=micro == 1):
                    backward(model, 2 * step + micro)
                backward(plain, 2 * step + micro)
            same_grads(model, plain)
            for optimizer, each in zip(optimizers, (plain, model), strict=True):
                optimizer.step()
                if partly:
                    optimizer.zero_grad()
                if partly and step == 0 and strategy == "node=0":
                    optimizer.add_param_group({"params": [next(each.parameters())]})
                for index, param in enumerate(each.parameters()):
                    if not partly and (index + step) % 3 == 0:
                        param.grad = None
                    elif not partly and (index + step) % 3 == 1:
                        param.grad.zero_()
        same_params(model, plain)


# ---- replacements of parameters


@SOME
@on_ranks(2)
def test_other_weights_in_the_place_of_parameters_are_refused(strategy):
    model = sharded(chain(), strategy)
    average = {name: torch.ones(param.shape).double() for name, param in model.named_parameters()}
    held = dict(average)
    with pytest.raises(ModelError, match=r"something else where zm\.shard has put 0\.0\.weight"):
        torch.func.functional_call(model, average, (inputs(),))
    assert all(average[name] is held[name] for name in held)
    backward(model)
    layer = model.get_submodule("2.0")
    own = layer.bias
    layer.bias = nn.Parameter(torch.zeros(WIDTH).double())
    with pytest.raises(ModelError, match=r"something else where zm\.shard has put 2\.0\.bias"):
        model(inputs())
    layer.bias = own
    zm.zero_grad(model)
    backward(model)
    plain = chain()
    backward(plain)
    same_grads(model, plain)


@on_ranks(2)
def test_parameters_that_come_after_sharding_are_refused():
    model = zm.shard(chain(), mesh(), "node=1")
    backward(model)
    model.append(nn.Linear(WIDTH, 1).double())
    for params in (model.parameters(), model[-1].parameters()):
        with pytest.raises(
            OptimizerError, match=r"SGD holds '4\.weight', which was added to the model after zm\.shard"
        ):
            torch.optim.SGD(params, lr=0.1).step()
    for save in (zm.full_state_dict, lambda model: zm.save_safetensors(model, "not-made")):
        with pytest.raises(ModelError, match=r"4\.weight was added to the model after zm\.shard.*would not be saved"):
            save(model)
    other = nn.Linear(2, 2)  # of no sharded model
    torch.optim.SGD([*list(model.parameters())[:-2], *other.parameters()], lr=0.1).step()


@on_ranks(2)
def test_an_optimizer_is_looked_at_again_when_its_parameters_change():
    base = chain()
    held = list(base.parameters())
    model = zm.shard(base, mesh(), "node=3")
    optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": held[2:]})
    with pytest.raises(OptimizerError, match=r"SGD holds '1\.0\.weight' as it was before zm\.shard"):
        optimizer.step()
    student = chain()
    early = sgd(student.parameters())
    early.step()
    zm.shard(student, mesh(), "node=3")
    with pytest.raises(OptimizerError, match=r"SGD holds '0\.0\.weight' as it was before zm\.shard"):
        early.step()


# ---- functions of slices


@SOME
@on_ranks(2)
def test_what_is_computed_of_gradients_is_guarded_like_them(strategy):
    model = sharded(chain(), strategy)
    backward(model)
    first: Any = next(model.parameters())
    for mixing in (
        lambda: torch._foreach_mul([torch.ones_like(first.local)], [first.grad])[0],
        lambda: first.detach().mul(first.grad).sum(0),
    ):
        with torch.no_grad(), pytest.raises(OptimizerError, match=r"of 0\.0\.weight \(6, 6\)"):
            mixing()


# ---- norms


@on_ranks(2)
def test_a_norm_over_models_in_other_layouts():
    plain = [chain(depth) for depth in (3, 2, 3)]
    models = [sharded(base, stage) for base, stage in zip(plain, ("node=3", "node=0", "node=1"), strict=True)]
    for model in (*models, *plain):
        backward(model)  # the same data on every rank, so means are one rank's
        grads = [param.grad for param in model.parameters()]
        for param, half in zip(model.parameters(), torch._foreach_div(grads, 2.0), strict=True):
            param.grad = half
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for model in plain for p in model.parameters()]))
    params = [param for model in models for param in model.parameters()]
    for foreach in (True, False):
        close(torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=foreach), expected, f"foreach={foreach}", 1e-12)


@SOME
@on_ranks(2)
def test_norms_that_no_sum_over_ranks_gives(strategy):
    """Those of some orders are refused. A gradient that is no number on one rank is none in any norm."""
    model = sharded(chain(), strategy)
    backward(model)
    grad = next(model.parameters()).grad
    for order in (-math.inf, 0.0, -1.0, math.nan):
        with torch.no_grad(), pytest.raises(InputError, match=r"order of a norm .* must be above 0, or inf; got"):
            torch.linalg.vector_norm(grad, order)
        with pytest.raises(InputError, match="order of a norm"):
            zm.clip_grad_norm_(model, 1.0, order)
    for culprit in range(2):
        zm.zero_grad(model)
        backward(model)
        if dist.get_rank() == culprit:
            next(param for param in model.parameters() if param.grad.local.numel()).grad.local[0] = math.nan
        for norm_type in (math.inf, 2.0):
            assert math.isnan(zm.clip_grad_norm_(model, 1.0, norm_type))
            with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
                zm.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)


# ---- modules


def lin(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, WIDTH)


def units(number: int, compute: Callable[..., Any]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Unit(compute, lin=lin()) for _ in range(number))


def trains_as_plain(base: nn.Module, *strategies: str, **arguments: Any) -> list[Pair]:
    """Different data on the ranks, two steps."""
    return check(
        base, *strategies, make_optimizer=sgd, **{"loss_of": mean_square, "data_of": vectors(WIDTH)} | arguments
    )


@on_ranks(2)
def test_a_parameter_that_blocks_hand_on():
    """From the root through all blocks, unchanged."""

    def compute(self, x):
        memory = self.memory
        for block in self.blocks:
            x, memory = block(x, memory)
        return x + memory

    blocks = units(3, lambda self, x, memory: (torch.tanh(self.lin(x)) * memory, memory))
    base = Part(compute, memory=nn.Parameter(torch.ones(WIDTH)), blocks=blocks).double()
    for pair in trains_as_plain(base, "node=3", "node=1", options={"units": [Unit]}):
        buffers = [buffer for unit in engine_of(pair.model).units for buffer in unit.buffers]
        assert max(len(leaf._backward_hooks or ()) for buffer in buffers for leaf in buffer.leaves) <= 3


# ---- reads of gathered parameters outside their unit's turn


@on_ranks(2)
def test_a_penalty_inside_the_forward_is_right_where_it_is_returned():
    """Not where a block keeps it for the loss, by a way that no hook sees."""

    def compute(self, x, penalty, returned):
        own = self.lin.weight.pow(2).sum()
        out = torch.tanh(self.lin(x))
        self.penalty = 0.0 if returned else self.lin.weight.pow(2).sum()
        return out, penalty + own if returned else penalty

    def loss_of(model, x, returned):
        penalty = torch.zeros(()).double()
        for block in model.blocks:
            x, penalty = block(x, penalty, returned)
        return x.mean() + penalty + sum(block.penalty for block in model.blocks)

    base = Part(loss_of, blocks=units(5, compute)).double()
    strategies = [f"node=3;prefetch={prefetch}" for prefetch in (0, 1, 2)]
    for returned in (True, False):
        with nullcontext() if returned else pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trains_as_plain(
                base, *strategies, loss_of=lambda m, x, returned=returned: m(x, returned), options={"units": [Unit]}
            )


@on_ranks(2)
def test_rows_that_a_forward_renormalises_in_place():
    model = nn.Sequential(nn.Embedding(8, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 2))
    with pytest.raises(ModelError, match=r"0\.weight is renormalised in place by each forward .*max_norm=0\.5"):
        zm.shard(model, mesh(), "node=0")
    model[0].requires_grad_(False)
    zm.shard(model, mesh(), "node=3")(torch.arange(8)).sum().backward()


@pytest.mark.parametrize(("strategy", "way"), [("node=3", "in place"), ("node=1", "data"), ("node=0", "in place")])
@on_ranks(2)
def test_a_forward_that_writes_to_its_weights_is_told(strategy, way):
    def compute(self, x):
        out = torch.tanh(self.lin(x))
        with torch.no_grad():
            (self.lin.weight if way == "in place" else self.lin.weight.data).clamp_(-0.1, 0.1)
        return out

    said = r"the forward of unit '0', .* has written to its parameters.*between steps.*parametrize"
    for debug in (False, True):
        blocks = nn.Sequential(*units(2, compute)).double()
        model = zm.shard(blocks, mesh(), strategy, units=[Unit], bucket_bytes=0, debug=debug)
        with pytest.raises(ModelError, match=said):
            model(inputs().requires_grad_()).sum().backward()


@on_ranks(2)
def test_a_gathered_parameter_that_was_kept_computes_nothing():
    """In memory that another block's parameters are in by now; where it has its own it is as it was."""
    kept: dict[str, torch.Tensor] = {}

    def keep(self, x):
        kept.setdefault("bias", self.lin.bias)
        return torch.tanh(self.lin(x))

    def compute(self, x):
        for block in self.blocks:
            x = block(x)
        return x + kept.pop("bias")

    base = Part(compute, blocks=units(4, keep)).double()
    model = zm.shard(copy.deepcopy(base), mesh(), "node=3", units=[Unit], bucket_bytes=0)
    for grad in (True, False):
        said = r"add of the gathered blocks\.0\.lin\.bias, which was kept"
        with torch.set_grad_enabled(grad), pytest.raises(ModelError, match=said):
            model(inputs())
    trains_as_plain(base, "node=1", options={"units": [Unit], "bucket_bytes": 0})


def box(self: Any, held: Any) -> Any:
    """An output that no hook can see."""
    return SimpleNamespace(x=torch.tanh(self.lin(held.x)))


@on_ranks(2)
def test_frozen_blocks_whose_outputs_no_hook_can_see_are_not_used_unseen():
    blocks = nn.Sequential(*units(5, box)).double().requires_grad_(False)
    model = zm.shard(blocks, mesh(), "node=3", units=[Unit])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(SimpleNamespace(x=inputs().requires_grad_())).x.sum().backward()


@on_ranks(2)
def test_a_model_whose_outputs_no_hook_can_see():
    """The loss is made of tensors in an object that is no container, as training loops of Hugging Face's may get.
    Tensors are returned too, of which the loss uses none, or that have no gradient."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(SimpleNamespace(x=x))
        return (out[0] if isinstance(out, tuple) else out).x.square().sum()

    torch.manual_seed(0)
    for compute in (box, lambda self, held: (out := box(self, held), out.x.detach())):
        base = Part(compute, lin=lin()).double()
        trains_as_plain(base, "node=3", "node=0", loss_of=loss_of, micro_batches=1)
    for strategy in ("node=3", "node=0"):
        unused = Part(lambda self, held: (out := box(self, held), out.x.sum()), lin=lin())
        model = sharded(unused.double(), strategy)
        loss_of(model, inputs()).backward()
        with pytest.raises(OptimizerError, match="a backward that zeromesh did not see"):
            sgd(model.parameters()).step()


# ---- parameters of units that are not open


@on_ranks(2)
def test_what_a_forward_needs_of_other_units_is_gathered():
    """In the order in which all ranks ask for it; outside of a forward it is refused. Blocks' forwards are never
    called, and a head's weight is taken by rows, as chunked losses do."""

    def compute(self, x, again):
        for block in self.blocks:
            x = torch.tanh(functional.linear(x, block.weight, block.bias)) + self.blocks[1].bias
        if again:
            x = checkpoint(lambda x: torch.tanh(x @ self.blocks[2].weight), x, use_reentrant=False)
        parts = [x @ self.lm_head.weight[rows].t() for rows in (slice(0, 5), slice(5, 8))]
        penalty = self.blocks[0].weight.sum() + self.blocks[1].weight.norm()
        return (torch.cat(parts, -1) + self.lm_head.weight.sum()).square().mean() + penalty

    torch.manual_seed(0)
    base = Part(compute, blocks=nn.ModuleList(lin() for _ in range(4)), lm_head=nn.Linear(WIDTH, 8)).double()
    options = {"units": [nn.Linear], "resident": ["lm_head"], "bucket_bytes": 0}
    for again, strategies in ((False, ("node=3", "node=0")), (True, ("node=3", "node=1"))):
        for pair in trains_as_plain(base, *strategies, options=options, loss_of=lambda m, x, again=again: m(x, again)):
            with torch.no_grad():
                close(pair.model(inputs(), again), pair.plain(inputs(), again), "outputs")
            with pytest.raises(OptimizerError, match=r"sum over a dimension.* needs all of lm_head\.weight"):
                pair.model.lm_head.weight.sum(0)


class Fused(torch.autograd.Function):
    """A loss that computes its gradients in its forward, as fused heads do."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (x, weight)]
            loss = functional.linear(*given).square().mean()
            ctx.grads = torch.autograd.grad(loss, given)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad * each for each in ctx.grads)


class Borrowing(nn.Module):
    """The root, and a block, compute with weights of other units in ways that torch tells nobody of."""

    class Head(nn.Linear):
        pass

    class Block(nn.Module):
        def __init__(self, head: list[nn.Module]) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(WIDTH, WIDTH), head

        def forward(self, x):
            return torch.tanh(self.lin(x)) + self.head[0].weight.detach().sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(WIDTH, 8)
        self.blocks = nn.ModuleList(self.Block([self.head]) for _ in range(4))
        self.way = "right"

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        if self.way == "written":
            self.head.weight.data.clamp_(-0.1, 0.1)
        weight: Any = self.blocks[0].lin.weight
        if self.way == "shared":
            return Fused.apply(x, weight)
        x = x @ weight.t() + weight[0] + weight.detach().sum(0)
        return Fused.apply(x, self.head.weight) + self.head(x).square().mean()


@pytest.mark.parametrize("strategy", ["node=3d", "node=1"])
@on_ranks(2)
def test_a_forward_uses_weights_of_other_units_as_it_would_its_own(strategy):
    torch.manual_seed(0)
    plain = Borrowing().double()
    options = {"units": [Borrowing.Block, Borrowing.Head], "resident": ["head"], "bucket_bytes": 0}
    (pair,) = trains_as_plain(plain, strategy, options=options, loss_of=lambda m, x: m(x))
    meta = zm.shard(Borrowing().double().to("meta"), mesh(), strategy, **options)
    zm.load_full_state_dict(meta, pair.plain.state_dict())
    with torch.no_grad():
        for model in (meta, pair.model):
            close(model(inputs()), pair.plain(inputs()), "loss")
    if strategy == "node=3d":
        meta.way = "shared"
        with pytest.raises(ModelError, match=r"Function is given blocks\.0\.lin\.weight.*resident=.*units="):
            meta(inputs())
    meta.way = "written"
    with pytest.raises(ModelError, match="has written to its parameters"):
        meta(inputs())


class Coder(nn.Module):
    """Computes with parameters of the root in methods, and in a layer that is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.full((WIDTH,), 1.3)), nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(WIDTH)
        self.encoder, self.decoder = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))) for _ in range(2))

    def encode(self, x):
        return self.norm(self.encoder(x * self.scale)) * self.temperature.exp()

    def decode(self, x):
        return torch.tanh(self.decoder(functional.linear(x, self.encoder[1].weight)))

    def penalty(self):
        return self.scale.square().sum() + self.decoder[0].weight.square().sum()

    def forward(self, x):
        return self.decode(self.encode(x))


@pytest.mark.parametrize("strategy", ["node=3", "node=0"])
@on_ranks(2)
def test_methods_that_are_registered_compute_as_a_forward_does(strategy):
    torch.manual_seed(0)
    plain = Coder().double()
    with pytest.raises(ModelError, match="Coder has no sharded parameters"):
        zm.register_forward_method(plain, "encode")
    options = {"units": [nn.Linear], "bucket_bytes": 0}
    pair = Pair(base=plain, strategy=strategy, data_of=vectors(WIDTH), options=options)
    for module, name in (
        (pair.model, "encode"),
        (pair.model, "decode"),
        (pair.model, "penalty"),
        (pair.model.norm, "forward"),
    ):
        zm.register_forward_method(module, name)

    def loss_of(each: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            each.decode(each.encode(x))
        z = each.encode(x)
        return each.decode(z).square().mean() + each.penalty() + each.norm(z).mean()

    pair.loss_of = loss_of
    pair.train(make_optimizer=sgd)
    close(pair.model(inputs()), pair.plain(inputs()), "outputs")
    with pytest.raises(OptimizerError, match=r"linear needs all of encoder\.1\.weight.*register_forward_method"):
        functional.linear(inputs(), pair.model.encoder[1].weight)


# ---- forwards that replace or write to parameters


@SOME
@on_ranks(2)
def test_parameters_that_a_forward_replaces_are_refused(strategy):
    """As codebooks of moving averages do."""

    def compute(self, x):
        self.lin = self.lin.to(x.dtype)  # which it has
        out = self.lin(x)
        if self.way == "assigned":
            self.lin.weight = nn.Parameter(torch.zeros_like(self.lin.weight))
        elif self.way == "data":
            self.lin.weight.data = torch.zeros(WIDTH, WIDTH).double()
        return out

    for way in ("assigned", "data"):
        blocks = nn.Sequential(*(Unit(compute, lin=lin(), way="") for _ in range(4)))
        model = zm.shard(blocks.double(), mesh(), strategy, units=[Unit], bucket_bytes=0)
        blocks[2].way = way
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(ModelError, match=r"zm\.shard has put 2\.lin\.weight"):
                model(inputs())
        blocks[2].way = ""
        if way == "assigned":  # else the layer's memory is another for good
            model(inputs()).sum().backward()
        root = zm.shard(Part(compute, lin=lin(), tanh=nn.Tanh(), way=way).double(), mesh(), strategy, units=[nn.Tanh])
        with pytest.raises(ModelError, match=r"where zm\.shard has put lin\.weight"):
            root(inputs())
        assert all(isinstance(param, ShardedParameter) for param in root.parameters())


@pytest.mark.parametrize("strategy", ["node=3", "node=1"])
@on_ranks(2)
def test_a_forward_may_cast_its_module(strategy):
    """As routers of experts do: the same bits as a cast of the values; a unit's slot is others' meanwhile."""

    def cast_module(self, x):
        self.lin = self.lin.to(torch.float32)
        return self.lin(x.float()).tanh().to(x.dtype)

    def cast_values(self, x):
        return functional.linear(x.float(), self.lin.weight.float(), self.lin.bias.float()).tanh().to(x.dtype)

    found = []
    for compute in (cast_module, cast_values):
        blocks = nn.Sequential(*units(4, compute))
        model = zm.shard(blocks, mesh(), strategy, units=[Unit], bucket_bytes=0, param_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            for last in (False, True):
                with zm.accumulate(model, last=last):
                    loss = model(inputs(step).float()).float().square().mean()
                    loss.backward()
                    losses.append(loss.item())
            with torch.no_grad():
                losses.append(model(inputs(step).float()).float().sum().item())
            optimizer.step()
            optimizer.zero_grad()
        assert all(param.dtype == torch.float32 for param in model.parameters())
        found.append((losses, [param.local for param in model.parameters()]))
    (losses, params), (expected, others) = found
    assert losses == expected and all(map(torch.equal, params, others))


@on_ranks(2)
def test_a_unit_that_returns_its_parameter_needs_a_place_of_its_own():
    def compute(self, x):
        for found in [position() for position in self.positions]:
            x = x + found
        return self.head(x)

    for position in (lambda self: self.weight, lambda self: self.weight[:WIDTH]):
        torch.manual_seed(0)
        positions = nn.ModuleList(Unit(position, weight=nn.Parameter(torch.randn(WIDTH))) for _ in range(4))
        plain = Part(compute, positions=positions, head=lin()).double()
        model = zm.shard(copy.deepcopy(plain), mesh(), "node=3", units=[Unit], bucket_bytes=0)
        for grad in (True, False):
            said = r"returns a parameter of its own.*resident"
            with torch.set_grad_enabled(grad), pytest.raises(ModelError, match=said):
                model(inputs())
        resident = [f"positions.{index}" for index in range(4)]
        trains_as_plain(plain, "node=3", "node=1", options={"units": [Unit], "resident": resident})


@on_ranks(2)
def test_a_model_that_calls_itself():
    """For a first guess."""

    def compute(self, x, guess=None):
        if guess is None:
            with torch.no_grad():
                guess = self(x, torch.zeros_like(x))
        return self.second(self.tanh(self.first(torch.cat([x, guess], -1))))

    torch.manual_seed(0)
    base = Part(compute, first=lin(2 * WIDTH), second=lin(), tanh=nn.Tanh()).double()
    for apart, strategies in (([nn.Linear], ("node=3", "node=1")), ([nn.Tanh], ("node=3", "node=0"))):
        trains_as_plain(base, *strategies, options={"units": apart, "bucket_bytes": 0})


@on_ranks(2)
def test_a_forward_that_runs_a_backward_and_goes_on():
    """For forces, the slopes of an energy: in the model's forward, through its blocks, and in those of the blocks."""

    def compute(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.inner(x).square() * self.scale
            (force,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.scale * (energy + self.last(force))

    def made(kind, inner):
        return kind(compute, inner=inner, last=lin(), scale=nn.Parameter(torch.ones(1)))

    torch.manual_seed(0)
    base = made(Part, nn.Sequential(*(made(Unit, nn.Sequential(lin(), nn.Tanh())) for _ in range(3)))).double()
    for pair in trains_as_plain(base, "node=3", "node=1", "node=0", "host=3,node=3", options={"units": [Unit]}):
        with torch.no_grad():
            close(pair.model(inputs()), pair.plain(inputs()), "evaluated")


@on_ranks(2)
def test_a_forward_under_vmap():
    """Tensors there require no gradient; those that they stand for do."""
    torch.manual_seed(0)
    base = nn.Sequential(*units(4, lambda self, x: x + torch.tanh(self.lin(x)))).double()

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (torch.vmap(torch.vmap(model))(x[None]) * model(x)).mean()

    trains_as_plain(base, "node=3", "node=0", loss_of=loss_of, options={"units": [Unit]})


@pytest.mark.parametrize("options", [{}, {"debug": True}])
@on_ranks(2)
def test_a_forward_under_torch_func(options):
    """Without lanes' threads, parameters are gathered there too."""
    model = sharded(chain(), "node=3;overlap=none", **options)
    close(torch.func.vjp(model, inputs())[0], chain()(inputs()), "torch.func.vjp")
    backward(model)


@on_ranks(2)
def test_losses_of_directional_derivatives():
    torch.manual_seed(0)
    base = nn.Sequential(*units(4, lambda self, x: x + torch.tanh(self.lin(x)))).double()

    def of_tangents(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.square().mean()

    def wrapped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(model, x)[0].square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where it loads its rules for tangents
        for loss_of in (of_tangents, wrapped):
            pair, _ = trains_as_plain(base, "node=3", "node=0", loss_of=loss_of, options={"units": [Unit]})
        forward = partial(torch.autograd.functional.jacobian, vectorize=True, strategy="forward-mode")
        close(forward(pair.model, inputs()), forward(pair.plain, inputs()), "jacobian")  # tangents are of torch.vmap


@on_ranks(2)
def test_a_loss_of_derivatives_alone():
    """Its backward reaches parameters, but no output."""
    torch.manual_seed(0)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()

    trains_as_plain(nn.Linear(WIDTH, WIDTH, bias=False).double(), "node=1", "node=0", loss_of=loss_of)


@on_ranks(2)
def test_recurrent_layers():
    torch.manual_seed(0)
    base = nn.Sequential(nn.LSTM(WIDTH, WIDTH)).double()
    for pair in trains_as_plain(base, "node=3", "node=0", loss_of=lambda m, x: m(x)[0].pow(2).mean()):
        assert "flatten_parameters" in vars(pair.model[0])  # cuDNN's would take the weights out of the gathered memory


# ---- two optimizers of one unit


@SOME
@on_ranks(2)
def test_a_gradient_that_was_dropped_stays_away_while_others_gather(strategy):
    model = zm.shard(ActorCritic().double(), mesh(), strategy)
    pi, v = model(inputs())
    (pi.sum() + v.sum()).backward()
    model.actor.weight.grad = model.actor.bias.grad = None
    model(inputs())[1].sum().backward()
    assert model.actor.weight.grad is None and model.actor.bias.grad is None
    plain = 2 * inputs().sum(0)
    close(model.critic.weight.grad.local, local_part(model.critic.weight, plain[None]), "critic", 1e-12)


@STAGES
@on_ranks(2)
def test_a_step_of_one_optimizer_between_the_backwards_of_two(strategy):
    """Weights that autograd has saved for one of them lie beside those that the other's optimizer changes."""
    torch.manual_seed(0)
    plain = ActorCritic().double()
    plain.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy)
    for each in (model, plain):
        actor, critic = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (each.actor, each.critic))
        for step in range(2):
            pi, v = each(inputs(step))
            pi.sum().backward()
            actor.step()
            actor.zero_grad()
            v.sum().backward()
            critic.step()
            critic.zero_grad()
    same_params(model, plain, 1e-12)
    pi, v = model(inputs())
    v.sum().backward(retain_graph=True)
    critic = torch.optim.SGD(model.critic.parameters(), lr=0.1)
    critic.step()
    with pytest.raises((RuntimeError, ModelError), match=r"changed since the forward|modified by an inplace operation"):
        v.sum().backward()


# ---- checkpoints of others


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> nn.Module:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, 10 * step + dist.get_rank())
        optimizer.step()
    return model


@pytest.mark.parametrize("strategy", ["node=1", "node=0"])
@on_ranks(2)
def test_states_of_optimizers_are_saved_as_slices(strategy):
    model = sharded(chain(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zm.memory_report(model, optimizer)
    trained(model, optimizer)
    zm.memory_report(model, optimizer)
    state, stream = optimizer.state_dict(), io.BytesIO()
    for each in (model.state_dict(), state):
        if strategy != "node=0":
            with pytest.raises(CheckpointError, match=r"one rank's slice.*zm.Checkpoints"):
                torch.save(each, stream)
        else:
            stream = io.BytesIO()
            torch.save(each, stream)
            stream.seek(0)
            (chain() if each is not state else optimizer).load_state_dict(torch.load(stream))  # of whole tensors
            assert all(value.dim() < 2 for param in model.parameters() for value in optimizer.state[param].values())
    other = sharded(chain(), strategy)
    other.load_state_dict(model.state_dict())
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    again.load_state_dict(copy.deepcopy(state))
    trained(model, optimizer), trained(other, again)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.local, two.local)
        assert all(type(value) is torch.Tensor for value in again.state[two].values())


@on_ranks(2)
def test_whole_states_are_taken_by_slices():
    stream = io.BytesIO()
    whole, model = (sharded(chain(), stage) for stage in ("node=0", "node=1"))
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (whole, model))
    trained(whole, optimizer)
    model.load_state_dict(whole.state_dict())
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream))
    trained(whole, optimizer), trained(model, other)
    for theirs, own in zip(whole.parameters(), model.parameters(), strict=True):
        close(own.local, local_part(own, theirs.local.view(theirs.shape)), own.full_name, 1e-12)
        moments = [value for value in other.state[own].values() if value.dim()]
        assert all(value.untyped_storage().nbytes() == own.local.nbytes for value in moments)
    again = torch.optim.AdamW(whole.parameters())
    again.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match=r"load_state_dict of state .* was given a slice .* of other elements"):
        trained(whole, again, 1)


class Scaled(nn.Linear):
    """With parameters of one element, which lie on one rank."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@on_ranks(2)
def test_whole_states_of_one_element_are_taken():
    torch.manual_seed(0)
    plain, x = Scaled().double(), torch.ones(2, 3, dtype=torch.float64)
    model = sharded(copy.deepcopy(plain), "node=1")
    theirs, ours = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model))
    for both in (False, True):
        for each, optimizer in ((plain, theirs), (model, ours))[: 1 + both]:
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not both:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            model.load_state_dict(plain.state_dict())
    for whole, own in zip(plain.parameters(), model.parameters(), strict=True):
        close(own.local, local_part(own, whole), own.full_name, 1e-12)
    copy.deepcopy(theirs.state_dict()), copy.deepcopy([*ours.state.values()])
    with pytest.raises(CheckpointError, match=r"zm.by_owner has whole states, but load_state_dict got slices"):
        owned = zm.by_owner(torch.optim.AdamW, model.parameters())
        owned.load_state_dict(ours.state_dict())
        model(x).mean().backward()
        owned.step()


# ---- others' wrappers, and backwards that raised before


@on_ranks(2)
def test_wrappers_and_parts_are_refused():
    model = sharded(chain(), "node=1")
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ModelError, match="DistributedDataParallel has nothing to do here"):
        nn.parallel.DistributedDataParallel(nn.Sequential(model, nn.Linear(1, 1).requires_grad_(False)))
    with pytest.raises(OptimizerError, match=r"stride needs all of 0\.0\.weight"):
        fully_shard(nn.Sequential(model), mesh=mesh())
    for part in (nn.Sequential(model), next(model.children())):
        with pytest.raises(ModelError, match="this model, or a part of it, is already sharded"):
            zm.shard(part, mesh(), "node=1")
    with pytest.raises(ModelError, match=r"0 is in torch's FSDPModule already, .*give zm.shard the plain model"):
        inner = nn.Linear(2, 2)
        fully_shard(inner, mesh=mesh())
        zm.shard(nn.Sequential(inner), mesh(), "node=1")


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


@pytest.mark.parametrize(("strategy", "wrap"), [("node=3", in_ddp), ("node=0", in_ddp), ("node=1", replicate)])
@on_ranks(2)
def test_a_sharded_part_of_a_replicated_model(strategy, wrap):
    """Each reduces its own gradients, from the first step on, and nothing is broadcast over slices."""
    torch.manual_seed(dist.get_rank())  # of replicated parameters, DDP takes the first rank's too
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), chain(2), nn.Linear(WIDTH, WIDTH).double())
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model = copy.deepcopy(plain)
    zm.shard(model[1], mesh(), strategy, bucket_bytes=0)
    wrapped = wrap(model)
    optimizers = [sgd(each.parameters()) for each in (model, plain)]
    for step in range(2):
        mean_square(wrapped, inputs(2 * step + dist.get_rank())).backward()
        (sum(mean_square(plain, inputs(2 * step + rank)) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
            close(*((ours.local, local_part(ours, param)) if isinstance(ours, ShardedParameter) else (ours, param)), "")


@SOME
@on_ranks(2)
def test_loading_after_a_backward_that_raised(strategy):
    model = sharded(fragile(), strategy)
    with booming():
        backward(model)
    model.load_state_dict({name: value.double() for name, value in fragile().state_dict().items()})
    backward(model)
