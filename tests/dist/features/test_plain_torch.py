"""What plain torch lets users do with parameters and gradients: here it does the same, or says that it cannot."""

import copy
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.features.parity import BOUND, close, local_part
from tests.dist.features.test_misuse import STAGES, WIDTH, ActorCritic, chain, inputs, mesh, same_grads, sgd, sharded
from tests.dist.pool import Pool, on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError, InputError, ModelError, OptimizerError


def same_values(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(ours.local, local_part(ours, theirs.detach()), name)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(inputs(seed)).pow(2).mean().backward()


# ---- hooks and attributes


@STAGES
@on_ranks(2)
def test_hooks_on_parameters_are_refused(strategy):
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        base = chain()
        handle = getattr(base.get_submodule("1.0").weight, register)(lambda grad: None)
        with pytest.raises(ModelError, match=r"1\.0\.weight has hooks for its gradient"):
            zm.shard(base, mesh(), strategy)
        handle.remove()
        model = zm.shard(base, mesh(), strategy)
        with pytest.raises(ModelError, match=r"a hook on 1\.0\.weight would never be called"):
            getattr(dict(model.named_parameters())["1.0.weight"], register)(lambda grad: None)
        model(inputs()).sum().register_hook(lambda grad: None)  # on activations they are called


@STAGES
@on_ranks(2)
def test_what_users_write_on_parameters_stays(strategy):
    base = chain()
    base.get_submodule("0.0").bias._no_weight_decay = True
    base.get_submodule("0.0").bias.shape_as_built = tuple(base.get_submodule("0.0").bias.shape)
    seen = []
    base.get_submodule("0.0").register_forward_pre_hook(lambda module, args: seen.append(module.bias._no_weight_decay))
    model = zm.shard(base, mesh(), strategy)
    marked = [name for name, param in model.named_parameters() if getattr(param, "_no_weight_decay", False)]
    assert marked == ["0.0.bias"]
    assert dict(model.named_parameters())["0.0.bias"].shape_as_built == (WIDTH,)
    model(inputs())
    assert seen == [True]


# ---- gradients that autograd is asked for


@STAGES
@on_ranks(2)
def test_gradients_for_listed_parameters_are_refused(strategy):
    model = sharded(chain(), strategy)
    optimizer = sgd(model)
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
    optimizer = sgd(model)
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


@STAGES
@on_ranks(2)
def test_a_backward_adds_to_gradients_that_were_set_by_hand(strategy):
    plain, model = chain(), sharded(chain(), strategy)
    for seed in (0, 1):
        backward(model, seed)
        backward(plain, seed)
        for param in plain.parameters():
            param.grad = param.grad * 2
        for param in model.parameters():
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


@pytest.mark.parametrize("picks", ["head", "biases", "later group"])
@STAGES
@on_ranks(2)
def test_an_optimizer_may_hold_some_of_the_parameters(strategy, picks):
    """The others keep their gradients, which nobody drops; neither theirs nor its own may be lost, or reduced twice."""
    plain, model = chain(), sharded(chain(), strategy)
    optimizers = []
    for each in (plain, model):
        named = dict(each.named_parameters())
        last = list(named)[-1].rsplit(".", 1)[0]
        chosen = [p for n, p in named.items() if (n.endswith("bias") if picks == "biases" else n.startswith(last))]
        optimizers.append(torch.optim.SGD(chosen, lr=0.1))
    for step in range(3):
        if picks == "later group" and step == 1:
            for optimizer, each in zip(optimizers, (plain, model), strict=True):
                optimizer.add_param_group({"params": [next(each.parameters())]})
        for micro in range(2):
            with zm.accumulate(model, last=micro == 1):
                backward(model, 2 * step + micro)
            backward(plain, 2 * step + micro)
        same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_values(model, plain)


@pytest.mark.parametrize("how", ["mixed", "none", "zero"])
@STAGES
@on_ranks(2)
def test_gradients_are_dropped_kept_and_zeroed_side_by_side(strategy, how):
    plain, model = chain(), sharded(chain(), strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(4):
        for micro in range(3):
            with zm.accumulate(model, last=micro == 2):
                backward(model, 3 * step + micro)
            backward(plain, 3 * step + micro)
        same_grads(model, plain)
        for optimizer, each in zip(optimizers, (plain, model), strict=True):
            optimizer.step()
            for index, param in enumerate(each.parameters()):
                kind = (index + step) % 3
                if kind == 0 and how in ("mixed", "none"):
                    param.grad = None
                elif kind == 1 and how in ("mixed", "zero"):
                    param.grad.zero_()
    same_values(model, plain)


# ---- what takes the place of parameters


@STAGES
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
        with pytest.raises(OptimizerError, match=r"SGD holds '4\.weight', which came into the model after zm\.shard"):
            torch.optim.SGD(params, lr=0.1).step()
    for save in (zm.full_state_dict, lambda model: zm.save_safetensors(model, "not-made")):
        with pytest.raises(ModelError, match=r"4\.weight came into the model after zm\.shard.*would not be saved"):
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
    early = sgd(student)
    early.step()
    zm.shard(student, mesh(), "node=3")
    with pytest.raises(OptimizerError, match=r"SGD holds '0\.0\.weight' as it was before zm\.shard"):
        early.step()


# ---- what is computed of slices


@STAGES
@on_ranks(2)
def test_what_is_computed_of_gradients_is_guarded_like_them(strategy):
    model = sharded(chain(), strategy)
    backward(model)
    first: Any = next(model.parameters())
    for mixing in (
        lambda: torch._foreach_mul([torch.ones_like(first.local)], [first.grad])[0],
        lambda: torch.cummax(first, 0),
        lambda: torch.cummin(input=first, dim=0),
        lambda: first.detach().mul(first.grad).sum(0),
    ):
        with torch.no_grad(), pytest.raises(OptimizerError, match=r"of 0\.0\.weight \(6, 6\)"):
            mixing()
    plain = chain()
    backward(plain)
    mean = [param.grad.clone() for param in plain.parameters()]
    for grad in mean:
        dist.all_reduce(grad)
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in mean])) / (2 * dist.get_world_size())
    halves = torch._foreach_div([param.grad for param in model.parameters()], 2.0)
    close(torch.nn.utils.get_total_norm(halves), expected, "norm of what foreach returns", 1e-12)
    for param in model.parameters():
        param.grad = param.grad / 2
    for norm in (torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), zm.clip_grad_norm_(model, 1e9)):
        close(norm, expected, "norm", 1e-12)


@on_ranks(2)
def test_states_of_optimizers_are_plain_tensors():
    model = sharded(chain(), "node=3")
    backward(model)
    for make in (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Rprop(params, foreach=False),
        lambda params: torch.optim.NAdam(params, foreach=False),
    ):
        optimizer = make(model.parameters())
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        assert states and all(type(value) is torch.Tensor for value in states)


@on_ranks(2)
def test_drawing_values_for_a_slice_is_refused():
    model = sharded(chain(), "node=3")
    weight = next(model.parameters())
    with torch.no_grad():
        for draw in (weight.normal_, weight.uniform_, lambda: nn.init.xavier_uniform_(weight)):
            with pytest.raises(OptimizerError, match=r"_ needs all of 0\.0\.weight"):
                draw()
        weight.mul_(0.5)
    with pytest.raises(OptimizerError, match="T needs all of"):
        weight.T.pow(2)


# ---- norms


@pytest.mark.parametrize("stages", [("node=3", "node=0"), ("node=0", "node=3")])
@on_ranks(2)
def test_a_norm_over_models_in_other_layouts(stages):
    models = [sharded(chain(depth), stage) for depth, stage in zip((3, 2), stages, strict=True)]
    plain = [chain(depth) for depth in (3, 2)]
    for model in (*models, *plain):
        backward(model)  # the same data on every rank, so means are one rank's
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for model in plain for p in model.parameters()]))
    params = [param for model in models for param in model.parameters()]
    for foreach in (True, False):
        close(torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=foreach), expected, f"foreach={foreach}", 1e-12)


@STAGES
@on_ranks(2)
def test_norms_that_no_sum_over_ranks_gives_are_refused(strategy):
    model = sharded(chain(), strategy)
    backward(model)
    grad = next(model.parameters()).grad
    for order in (-math.inf, 0.0, -1.0, math.nan):
        with torch.no_grad(), pytest.raises(InputError, match=r"order of a norm .* must be above 0, or inf; got"):
            torch.linalg.vector_norm(grad, order)
        with pytest.raises(InputError, match="order of a norm"):
            zm.clip_grad_norm_(model, 1.0, order)


@STAGES
@on_ranks(2)
def test_a_gradient_that_is_no_number_on_one_rank_is_none_in_any_norm(strategy):
    model = sharded(chain(), strategy)
    for culprit in range(2):
        backward(model)
        if dist.get_rank() == culprit:
            next(param for param in model.parameters() if param.grad.local.numel()).grad.local[0] = math.nan
        for norm_type in (math.inf, 2.0):
            assert math.isnan(zm.clip_grad_norm_(model, 1.0, norm_type))
            with pytest.raises(RuntimeError, match="norm is nan"):
                zm.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        zm.zero_grad(model)


# ---- modules


class Flags(nn.Module):
    """Buffers of integers and flags, which its `reset_parameters` forgets or not."""

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("index", torch.arange(WIDTH), persistent=False)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))

    def reset_parameters(self) -> None:
        if self.complete:
            self.index.copy_(torch.arange(WIDTH))
            self.mask.fill_(True)

    def forward(self, x):
        return self.lin(x[:, self.index]) * self.mask


@on_ranks(2)
def test_integers_and_flags_on_the_meta_device_need_values_too():
    with torch.device("meta"):
        forgetful, complete = Flags(complete=False), Flags(complete=True)
    with pytest.raises(ModelError, match=r"index was on the meta device and its initialisation left it"):
        zm.shard(forgetful, mesh(), "node=3")
    zm.shard(complete, mesh(), "node=3")
    assert complete.index.tolist() == list(range(WIDTH)) and complete.mask.all()


class Carrying(nn.Module):
    """Hands a parameter of the root through all blocks, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(CarryingBlock() for _ in range(3))

    def forward(self, x):
        memory = self.memory
        for block in self.blocks:
            x, memory = block(x, memory)
        return x + memory


class CarryingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        return torch.tanh(self.lin(x)) * memory, memory


@STAGES
@on_ranks(2)
def test_a_parameter_that_blocks_hand_on(strategy):
    torch.manual_seed(0)
    plain = Carrying().double()
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=[CarryingBlock])
    ours, theirs = sgd(model), sgd(plain)
    for step in range(3):
        backward(model, step)
        backward(plain, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.local, local_part(param, whole.detach()), param.full_name, 1e-12)
    buffers = [buffer for unit in engine_of(model).units for buffer in unit.buffers]
    assert max(len(leaf._backward_hooks or ()) for buffer in buffers for leaf in buffer.leaves) <= 3


# ---- what a graph reads of gathered parameters outside their unit's turn


class Penalised(nn.Module):
    """Keeps a penalty on its weight for the loss, by a way that no hook sees, or among its outputs."""

    def __init__(self, *, returned: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.returned = returned

    def forward(self, pair):
        x, penalty = pair
        own = self.lin.weight.pow(2).sum()
        out = torch.tanh(self.lin(x))
        if not self.returned:
            self.penalty = self.lin.weight.pow(2).sum()
        return out, penalty + own if self.returned else penalty


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@on_ranks(2)
def test_a_penalty_inside_the_forward_is_right_where_it_is_returned(prefetch):
    for returned in (True, False):
        torch.manual_seed(0)
        plain = nn.Sequential(*(Penalised(returned=returned) for _ in range(5))).double()
        model = zm.shard(copy.deepcopy(plain), mesh(), f"node=3;prefetch={prefetch}", units=[Penalised])

        def loss_of(blocks, returned=returned):
            out, penalty = blocks((inputs(), torch.zeros(()).double()))
            return out.mean() + penalty + (0 if returned else sum(block.penalty for block in blocks))

        if returned:
            loss_of(model).backward()
            loss_of(plain).backward()
            same_grads(model, plain)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of(model).backward()


@on_ranks(2)
def test_rows_that_a_forward_renormalises_in_place():
    model = nn.Sequential(nn.Embedding(8, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 2))
    with pytest.raises(ModelError, match=r"0\.weight is renormalised in place by each forward .*max_norm=0\.5"):
        zm.shard(model, mesh(), "node=0")
    model[0].requires_grad_(False)
    zm.shard(model, mesh(), "node=3")(torch.arange(8)).sum().backward()


@pytest.mark.parametrize("way", ["in place", "data"])
@STAGES
@on_ranks(2)
def test_a_forward_that_writes_to_its_weights_is_told(strategy, way):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            out = torch.tanh(self.lin(x))
            with torch.no_grad():
                (self.lin.weight if way == "in place" else self.lin.weight.data).clamp_(-0.1, 0.1)
            return out

    blocks = nn.Sequential(Changing(), Changing()).double()
    model = zm.shard(blocks, mesh(), strategy, units=[Changing], bucket_bytes=0)
    with pytest.raises(ModelError, match=r"the forward of unit '0', .* has written to its parameters.*parametrize"):
        model(inputs().requires_grad_()).sum().backward()


@on_ranks(2)
def test_a_gathered_parameter_that_was_kept_computes_nothing():
    """In memory that another block's parameters are in by now; where it has its own it is what it was."""
    kept = {}

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            kept.setdefault("bias", self.lin.bias)
            return torch.tanh(self.lin(x))

    class Using(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Keeping() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x + kept["bias"]

    plain = Using().double()
    for strategy in ("node=3", "node=1"):
        model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=[Keeping], bucket_bytes=0)
        kept.clear()
        if strategy == "node=3":
            for grad in (True, False):
                with (
                    torch.set_grad_enabled(grad),
                    pytest.raises(ModelError, match=r"add of the gathered blocks\.0\.lin\.bias, which was kept"),
                ):
                    model(inputs())
            continue
        backward(model)
        kept.clear()
        backward(plain)
        same_grads(model, plain)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, held):
        return SimpleNamespace(x=torch.tanh(self.lin(held.x)))


@on_ranks(2)
def test_frozen_blocks_whose_outputs_no_hook_can_see_are_not_used_unseen():
    blocks = nn.Sequential(*(Wrapped() for _ in range(5))).double().requires_grad_(False)
    model = zm.shard(blocks, mesh(), "node=3", units=[Wrapped])
    x = inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(SimpleNamespace(x=x)).x.sum().backward()


class Partly(Wrapped):
    """Returns tensors too, of which the loss uses none, or that have no gradient."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, held):
        out = super().forward(held)
        return (out, out.x.detach() if self.beside == "detached" else out.x.sum()) if self.beside else out


@pytest.mark.parametrize("beside", ["", "detached", "unused"])
@STAGES
@on_ranks(2)
def test_a_model_whose_outputs_no_hook_can_see(strategy, beside):
    """The loss is made of what lies in an object that is no container, as training loops of Hugging Face's may get."""
    plain = Partly(beside).double()
    model = sharded(plain, strategy)
    expected, optimizer = sgd(plain), sgd(model)
    for step in range(2):
        for one in (model, plain):
            outputs = [one(SimpleNamespace(x=inputs(step * 10 + rank))) for rank in range(2)]
            losses = [(out[0] if isinstance(out, tuple) else out).x.square().sum() for out in outputs]
            (losses[dist.get_rank()] if one is model else sum(losses) / 2).backward()
        if beside == "unused":
            with pytest.raises(OptimizerError, match="a backward that zeromesh did not see"):
                optimizer.step()
            return
        same_grads(model, plain)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()


# ---- parameters of units that are not open


class Featured(nn.Module):
    """Blocks whose forward is never called, and a head whose weight is taken by rows, as chunked losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, 8)

    def forward(self, x, again=False):
        for block in self.blocks:
            x = torch.tanh(functional.linear(x, block.weight, block.bias)) + self.blocks[1].bias
        if again:
            x = checkpoint(lambda x: torch.tanh(x @ self.blocks[2].weight), x, use_reentrant=False)
        parts = [x @ self.lm_head.weight[rows].t() for rows in (slice(0, 5), slice(5, 8))]
        return torch.cat(parts, -1) + self.lm_head.weight.sum()


@pytest.mark.parametrize("again", [False, True])
@STAGES
@on_ranks(2)
def test_what_a_forward_needs_of_other_units_is_gathered(strategy, again):
    """In the order in which all ranks ask for it; outside of a forward it is refused."""
    torch.manual_seed(0)
    plain = Featured().double()
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=[nn.Linear], resident=["lm_head"], bucket_bytes=0)
    expected, optimizer = sgd(plain), sgd(model)
    for step in range(2):
        with torch.no_grad():
            close(model(inputs(step), again), plain(inputs(step), again), "outputs", BOUND)
        for each in (model, plain):
            each(inputs(10 * step + dist.get_rank()), again).square().sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, name
                continue
            dist.all_reduce(theirs.grad)
            theirs.grad /= 2
            close(ours.grad.local, local_part(ours, theirs.grad), name, BOUND)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    with pytest.raises(OptimizerError, match=r"sum over a dimension.* needs all of lm_head\.weight"):
        model.lm_head.weight.sum(0)


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


@pytest.mark.parametrize("strategy", ["node=3", "node=3d", "node=1", "node=0"])
@on_ranks(2)
def test_a_forward_uses_weights_of_other_units_as_it_would_its_own(strategy):
    torch.manual_seed(0)
    plain = Borrowing().double()
    model, meta = copy.deepcopy(plain), Borrowing().double().to("meta")
    options = {"units": [Borrowing.Block, Borrowing.Head], "resident": ["head"], "bucket_bytes": 0}
    for each in (model, meta):
        zm.shard(each, mesh(), strategy, **options)
    zm.load_full_state_dict(meta, plain.state_dict())
    with torch.no_grad():
        close(model(inputs()), plain(inputs()), "loss", BOUND)
    for each in (model, meta, plain):
        each(inputs()).backward()
    same_grads(model, plain)
    same_grads(meta, plain)
    if strategy in ("node=3", "node=3d"):
        model.way = "shared"
        with pytest.raises(ModelError, match=r"Function is given blocks\.0\.lin\.weight.*resident=.*units="):
            model(inputs())
    model.way = "written"
    with pytest.raises(ModelError, match="has written to its parameters"):
        model(inputs())


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


@pytest.mark.parametrize("strategy", ["node=3", "node=2", "node=0"])
@on_ranks(2)
def test_methods_that_are_registered_compute_as_a_forward_does(strategy):
    torch.manual_seed(0)
    plain = Coder().double()
    with pytest.raises(ModelError, match="Coder has no sharded parameters"):
        zm.register_forward_method(plain, "encode")
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=[nn.Linear], bucket_bytes=0)
    for module, name in ((model, "encode"), (model, "decode"), (model, "penalty"), (model.norm, "forward")):
        zm.register_forward_method(module, name)
    expected, optimizer = sgd(plain), sgd(model)
    for step in range(2):
        for each in (model, plain):
            with torch.no_grad():
                each.decode(each.encode(inputs(step)))
            z = each.encode(inputs(step))
            (each.decode(z).square().mean() + each.penalty() + each.norm(z).mean()).backward()
        same_grads(model, plain)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    close(model(inputs()), plain(inputs()), "outputs", BOUND)
    with pytest.raises(OptimizerError, match=r"linear needs all of encoder\.1\.weight.*register_forward_method"):
        functional.linear(inputs(), model.encoder[1].weight)


# ---- what a forward does with the parameters themselves


class Codebook(nn.Module):
    """Puts something else in the place of its weight, as codebooks of moving averages do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.tanh = nn.Tanh()
        self.way = way

    def forward(self, x):
        self.lin = self.lin.to(x.dtype)  # which it has
        out = self.lin(x)
        if self.way == "assigned":
            self.lin.weight = nn.Parameter(torch.zeros_like(self.lin.weight))
        elif self.way == "data":
            self.lin.weight.data = torch.zeros(WIDTH, WIDTH).double()
        return out


@STAGES
@on_ranks(2)
def test_parameters_that_a_forward_replaces_are_refused(strategy):
    for way, said in (
        ("assigned", "where zm.shard has put {}"),
        ("data", "where zm.shard has put {}"),
    ):
        blocks = nn.Sequential(*(Codebook("") for _ in range(4)))
        model = zm.shard(blocks.double(), mesh(), strategy, units=[Codebook], bucket_bytes=0)
        blocks[2].way = way
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ModelError, match=said.format(r"2\.lin\.weight")),
            ):
                model(inputs())
        blocks[2].way = ""
        if way == "assigned":  # else the layer's memory is another for good
            model(inputs()).sum().backward()
        root = zm.shard(Codebook(way).double(), mesh(), strategy, units=[nn.Tanh])
        with pytest.raises(ModelError, match=said.format(r"lin\.weight")):
            root(inputs())
        assert all(isinstance(param, ShardedParameter) for param in root.parameters())


class Router(nn.Module):
    """Computes in fp32, as routers of experts do: by a cast of its module, or of its values."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x):
        if self.way == "module":
            self.lin = self.lin.to(torch.float32)
            return self.lin(x.float()).tanh().to(x.dtype)
        return functional.linear(x.float(), self.lin.weight.float(), self.lin.bias.float()).tanh().to(x.dtype)


@STAGES
@on_ranks(2)
def test_a_forward_may_cast_its_module(strategy):
    """The same bits as a cast of the values; a unit's slot is others' meanwhile."""
    found = []
    for way in ("module", "values"):
        torch.manual_seed(0)
        model = zm.shard(
            nn.Sequential(*(Router(way) for _ in range(4))),
            mesh(),
            strategy,
            units=[Router],
            bucket_bytes=0,
            param_dtype=torch.bfloat16,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
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
        found.append((losses, zm.full_state_dict(model)))
    (losses, state), (expected, plain) = found
    assert losses == expected
    assert all(torch.equal(value, plain[name]) for name, value in (state or {}).items())


class Position(nn.Module):
    def __init__(self, part: slice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.part = part

    def forward(self):
        return self.weight[self.part] if self.part.stop else self.weight


class Positions(nn.Module):
    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.positions = nn.ModuleList(Position(slice(0, stop)) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for found in [position() for position in self.positions]:
            x = x + found
        return self.head(x)


@pytest.mark.parametrize("stop", [None, WIDTH])
@on_ranks(2)
def test_a_unit_that_returns_its_parameter_needs_a_place_of_its_own(stop):
    torch.manual_seed(0)
    plain = Positions(stop).double()
    names = [f"positions.{index}" for index in range(4)]
    model = zm.shard(copy.deepcopy(plain), mesh(), "node=3", units=[Position], bucket_bytes=0)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ModelError, match=r"returns a parameter of its own.*resident"):
            model(inputs())
    for strategy in ("node=3", "node=1"):
        model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=[Position], resident=names)
        plain.zero_grad()
        for each in (model, plain):
            backward(each)
        same_grads(model, plain)


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, losses, cache):
        x = torch.tanh(self.lin(x))
        losses.append(x.float().pow(2).mean())
        cache[len(losses)] = x
        return x


class Batched(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, batch):
        return super().forward(batch["x"])


@STAGES
@on_ranks(2)
def test_what_units_put_into_lists_and_dicts_is_there(strategy):
    blocks = nn.ModuleList(Collecting() for _ in range(3))
    model = zm.shard(nn.Sequential(blocks), mesh(), strategy, units=[Collecting], param_dtype=torch.bfloat16)
    x, losses, cache = inputs().float(), [], {}
    for block in model[0]:
        x = block(x, losses, cache=cache)
    assert len(losses) == len(cache) == 3 and x.dtype == torch.bfloat16
    whole = zm.shard(Batched(), mesh(), strategy, param_dtype=torch.bfloat16)
    assert whole({"x": inputs().float()}).dtype == torch.bfloat16


class Refining(nn.Module):
    """Calls itself for a first guess."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tanh = nn.Tanh()

    def forward(self, x, guess=None):
        if guess is None:
            with torch.no_grad():
                guess = self(x, torch.zeros_like(x))
        return self.second(self.tanh(self.first(torch.cat([x, guess], -1))))


@STAGES
@on_ranks(2)
def test_a_model_that_calls_itself(strategy):
    torch.manual_seed(0)
    plain = Refining().double()
    for units in ([nn.Linear], [nn.Tanh]):  # apart, and in the root
        plain.zero_grad()
        model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=units, bucket_bytes=0)
        for _ in range(2):
            for each in (model, plain):
                backward(each)
        same_grads(model, plain)


@STAGES
@on_ranks(2)
def test_recurrent_layers(strategy):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LSTM(WIDTH, WIDTH)).double()
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy)
    assert "flatten_parameters" in vars(model[0])  # cuDNN's would take the weights out of the gathered memory
    ours, theirs = sgd(model), sgd(plain)
    for step in range(3):
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            each(inputs(step))[0].pow(2).mean().backward()
            optimizer.step()
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.local, local_part(param, whole.detach()), param.full_name, 1e-12)


# ---- two optimizers of one unit


@STAGES
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
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.local, local_part(param, whole.detach()), param.full_name, 1e-12)
    pi, v = model(inputs())
    v.sum().backward(retain_graph=True)
    critic = torch.optim.SGD(model.critic.parameters(), lr=0.1)
    critic.step()
    with pytest.raises((RuntimeError, ModelError), match=r"changed since the forward|modified by an inplace operation"):
        v.sum().backward()


# ---- what is saved by others


@on_ranks(2)
def test_a_rank_does_not_save_its_slices_as_the_whole():
    model = sharded(chain(), "node=3")
    with pytest.raises(CheckpointError, match=r"one rank's slice.*zm.Checkpoints"):
        torch.save(model.state_dict(), io.BytesIO())
    model, stream = sharded(chain(), "node=0"), io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    chain().load_state_dict(torch.load(stream))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> nn.Module:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, 10 * step + dist.get_rank())
        optimizer.step()
    return model


@STAGES
@on_ranks(2)
def test_states_of_optimizers_are_saved_as_slices(strategy):
    model = sharded(chain(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zm.memory_report(model, optimizer)
    trained(model, optimizer)
    zm.memory_report(model, optimizer)
    state, stream = optimizer.state_dict(), io.BytesIO()
    if strategy != "node=0":
        with pytest.raises(CheckpointError, match=r"one rank's slice"):
            torch.save(state, stream)
    else:
        torch.save(state, stream)
        stream.seek(0)
        optimizer.load_state_dict(torch.load(stream))  # of whole tensors
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
    stages, stream = ("node=0", "node=1"), io.BytesIO()
    models = [sharded(chain(), stage) for stage in stages]
    optimizer, other = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in models)
    trained(models[0], optimizer)
    models[1].load_state_dict(models[0].state_dict())
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream))
    trained(models[0], optimizer), trained(models[1], other)
    for whole, own in zip(models[0].parameters(), models[1].parameters(), strict=True):
        close(own.local, local_part(own, whole.local.view(whole.shape)), own.full_name, 1e-12)
        moments = [value for value in other.state[own].values() if value.dim()]
        assert all(value.untyped_storage().nbytes() == own.local.nbytes for value in moments)


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
    with pytest.raises(CheckpointError, match=r"zm.by_owner has whole states, and load_state_dict was given slices"):
        owned = zm.by_owner(torch.optim.AdamW, model.parameters())
        owned.load_state_dict(ours.state_dict())
        model(x).mean().backward()
        owned.step()


@on_ranks(2)
def test_a_state_of_another_layout_is_refused():
    model, other = sharded(chain(), "node=1"), sharded(chain(), "node=0")
    optimizer, again = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    trained(model, optimizer)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"load_state_dict of state .* was given a slice .* of other elements"):
        trained(other, again, 1)


# ---- others' wrappers, and what went wrong before


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
        with pytest.raises(ModelError, match="this model, or a part of it, is sharded already"):
            zm.shard(part, mesh(), "node=1")
    with pytest.raises(ModelError, match=r"0 is in torch's FSDPModule already, .*give zm.shard the plain model"):
        inner = nn.Linear(2, 2)
        fully_shard(inner, mesh=mesh())
        zm.shard(nn.Sequential(inner), mesh(), "node=1")


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


@STAGES
@pytest.mark.parametrize("wrap", [in_ddp, replicate])
@on_ranks(2)
def test_a_sharded_part_of_a_replicated_model(strategy, wrap):
    """Each reduces what is its own, from the first step on, and nothing is broadcast over slices."""
    torch.manual_seed(dist.get_rank())  # of what is replicated, DDP takes the first rank's too
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), chain(2), nn.Linear(WIDTH, WIDTH).double())
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model = copy.deepcopy(plain)
    zm.shard(model[1], mesh(), strategy, bucket_bytes=0)
    wrapped = wrap(model)
    first, theirs = sgd(model), sgd(plain)
    for step in range(2):
        wrapped(inputs(2 * step + dist.get_rank())).square().mean().backward()
        (sum(plain(inputs(2 * step + rank)).square().mean() for rank in range(2)) / 2).backward()
        first.step()
        theirs.step()
        for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
            close(*((ours.local, local_part(ours, param)) if isinstance(ours, ShardedParameter) else (ours, param)), "")
        first.zero_grad()
        theirs.zero_grad()


@STAGES
@on_ranks(2)
def test_loading_after_a_backward_that_raised(strategy):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("out of memory, say")

    model = sharded(chain(), strategy)
    state = zm.full_state_dict(model)
    handle = model.get_submodule("1").register_forward_hook(lambda module, args, result: Failing.apply(result))
    with pytest.raises(ValueError, match="out of memory, say"):
        model(inputs()).sum().backward()
    handle.remove()
    whole = {name: value.double() for name, value in chain().state_dict().items()}
    model.load_state_dict(state or whole)
    backward(model)


def save_by_torch(path: Path, strategy: str) -> dict[str, torch.Tensor]:
    model = sharded(chain(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=path)
    trained(model, optimizer)
    return {param.full_name: param.local.clone() for param in model.parameters()}


def load_by_torch(path: Path, strategy: str) -> dict[str, torch.Tensor]:
    model = sharded(chain(), strategy)
    for param in model.parameters():
        param.local.zero_()
    zm.refresh(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    trained(model, optimizer)
    return {param.full_name: param.local.clone() for param in model.parameters()}


@pytest.mark.filterwarnings("ignore")  # torch's, about its own storage
def test_torch_saves_the_states_of_all_ranks(pool: Pool, tmp_path: Path):
    expected = pool.run(2, save_by_torch, tmp_path, "node=1")
    for strategy in ("node=1", "node=3"):
        for got, wanted in zip(pool.run(2, load_by_torch, tmp_path, strategy), expected, strict=True):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
