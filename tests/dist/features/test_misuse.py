"""Cases that plain torch refuses or gets right, and that sharded training could get wrong silently."""

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd

import zeromesh as zm
from tests.dist.parity import BOUND, Part, Unit, close, local_part, mesh_of, sgd
from tests.dist.pool import on_ranks
from zeromesh.errors import ModelError

WIDTH = 6
STAGES = pytest.mark.parametrize("strategy", ["node=3", "node=1", "node=0"])


def mesh():
    return mesh_of(2)


def chain(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))).double()


def sharded(base: nn.Module, strategy: str, **options) -> nn.Module:
    return zm.shard(copy.deepcopy(base), mesh(), strategy, bucket_bytes=0, **options)


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def same_grads(model: nn.Module, plain: nn.Module) -> None:
    """`plain` has this rank's gradients; the sharded ones are the mean over ranks."""
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        mean = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
        dist.all_reduce(mean)
        close(ours.grad.local, local_part(ours, mean / dist.get_world_size()), name, BOUND)


# ---- autograd's work on parameters outside a unit's forward


@STAGES
@on_ranks(2)
def test_a_penalty_on_weights_is_refused(strategy):
    model = sharded(chain(), strategy)
    weight = next(model.parameters())
    for penalty in (
        lambda: weight.pow(2).sum(),
        lambda: torch.mul(input=weight, other=3).sum(),
        lambda: weight.clone().abs().sum(),
        lambda: sum(part.sum() for part in torch._foreach_mul(list(model.parameters()), 2.0)),
        lambda: torch.linalg.vector_norm(weight),
    ):
        with pytest.raises(ModelError, match=r"\d\.0\.\w+ is differentiated.*weight_decay"):
            (model(inputs()).sum() + penalty()).backward()
        zm.zero_grad(model)
    copies = [param.clone().detach() for param in model.parameters()]  # their values may be looked at
    loss = model(inputs()).sum()
    loss.backward()
    scaled = [loss * param.grad for param in model.parameters()]
    assert all(torch.isfinite(part).all() for part in (*copies, *scaled))


# ---- gradients of a backward that raised


class Boom(torch.autograd.Function):
    """Raises in the backward while `armed` has something."""

    armed: list[bool]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Boom.armed:
            raise ValueError("boom")
        return grad


class Fragile(nn.Module):
    def forward(self, x):
        return Boom.apply(x)


@contextmanager
def booming() -> Iterator[None]:
    """The body runs a backward, which raises."""
    Boom.armed.append(True)
    with pytest.raises(ValueError, match="boom"):
        yield
    Boom.armed.clear()


def fragile() -> nn.Sequential:
    Boom.armed = []
    base = chain()
    base.insert(1, Fragile())
    return base


@STAGES
@on_ranks(2)
def test_what_a_backward_left_before_it_raised_is_dropped(strategy):
    """Only `zm.zero_grad` drops half a micro-batch. A forward that ran before the error stays valid after it."""
    base, x = fragile(), inputs(dist.get_rank())
    model = sharded(base, strategy)
    optimizer = sgd(model.parameters())
    with zm.accumulate(model, last=False):
        model(x).sum().backward()
    with booming(), zm.accumulate(model, last=False):
        model(x).sum().backward()
    optimizer.zero_grad()  # knows nothing of gradients that are not shown yet
    with pytest.raises(ModelError, match=r"part of its micro-batch.*zm\.zero_grad"):
        model(x).sum().backward()
    zm.zero_grad(model)
    loss, later = model(x).sum(), model(x).sum()
    with booming():
        loss.backward()
    optimizer.zero_grad()
    for each in (later, model(x).sum(), 2 * base(x).sum()):
        each.backward()
    same_grads(model, base)


# ---- weights


@pytest.mark.parametrize("strategy", ["node=3", "node=0"])
@on_ranks(2)
def test_weights_count_where_gradients_do(strategy):
    """In all turns of a micro-batch: two backwards, none, an error after its own, one that is given up."""
    base, rank = fragile(), dist.get_rank()
    model = sharded(base, strategy)
    weight = 1.0 + 2 * rank  # 1 and 3

    def expect(*terms):
        base.zero_grad()
        for seed, share in terms:
            (base(inputs(2 * seed + rank)).sum() * weight * share / 4.0 * 2).backward()
        same_grads(model, base)
        zm.zero_grad(model)

    with zm.accumulate(model, last=True, weight=weight, total=4.0):
        out = model(inputs(rank)).sum()
        out.backward(retain_graph=True)
        (out * 2).backward()
    expect((0, 3))
    with zm.accumulate(model, last=False, weight=5.0, total=8.0):
        pass  # a batch without a loss
    with pytest.raises(KeyError), zm.accumulate(model, last=False, weight=weight, total=8.0):
        model(inputs(rank)).sum().backward()
        raise KeyError  # its gradient is in the sums
    with zm.accumulate(model, last=True, weight=weight, total=8.0):
        model(inputs(2 + rank)).sum().backward()
    expect((0, 0.5), (1, 0.5))
    with booming(), zm.accumulate(model, last=True, weight=weight, total=4.0):
        model(inputs(rank)).sum().backward()
    with zm.accumulate(model, last=True, weight=weight, total=4.0):
        model(inputs(rank)).sum().backward()
    expect((0, 1))


@on_ranks(2)
def test_a_weight_needs_its_total_and_its_backward():
    model = sharded(chain(), "node=1")
    total = zm.sum_over_ranks(model, 8.0)
    assert total == 16.0
    for wrong in ({"weight": 8.0}, {"weight": 8.0, "total": 4.0}, {"weight": -1.0, "total": 4.0}):
        with pytest.raises(ModelError, match=r"sum of weights over all micro-batches|must be zero or more"):
            zm.accumulate(model, last=True, **wrong)
    with zm.accumulate(model, last=False, weight=8.0, total=total):
        model(inputs()).sum().backward()
        loss = model(inputs()).sum()
    with pytest.raises(ModelError, match=r"either every micro-batch of a step has a weight or none"):
        loss.backward()


@pytest.mark.parametrize("strategy", ["node=3", "node=0"])
@on_ranks(2)
def test_two_models_in_one_backward_keep_their_weights(strategy):
    """Each has a total of its own; in gradients, then in the loss. A loss that counts nothing is NaN."""
    rank, x = dist.get_rank(), inputs(dist.get_rank())
    torch.manual_seed(0)
    bases = [nn.Linear(WIDTH, 1, bias=False).double() for _ in range(2)]
    models, weights = [sharded(base, strategy) for base in bases], (float(rank), 10.0 - 2 * rank)
    totals = [zm.sum_over_ranks(models[0], weight) for weight in weights]
    for in_loss in (False, True):
        with (
            zm.accumulate(models[0], last=True, weight=weights[0], total=totals[0]) as weigh_first,
            zm.accumulate(models[1], last=True, weight=weights[1], total=totals[1]) as weigh_second,
        ):
            losses = models[0](x).sum() * (1.0 if rank else torch.nan), models[1](x).sum()
            (weigh_first(losses[0]) + weigh_second(losses[1]) if in_loss else sum(losses)).backward()
        for model, base, weight, total in zip(models, bases, weights, totals, strict=True):
            base.zero_grad()
            (base(x).sum() * weight / total * 2).backward()
            same_grads(model, base)
            zm.zero_grad(model)


# ---- modules that move


@on_ranks(2)
def test_modules_that_have_moved_are_neither_saved_nor_loaded(tmp_path):
    """They train as they are called, but are saved under the names that they had in zm.shard."""

    def reorder(blocks):
        blocks[0], blocks[1] = blocks[1], blocks[0]

    def remove(blocks):
        del blocks[1]

    def share(blocks):
        blocks[1] = blocks[2]

    for change in (reorder, remove, share):
        model = sharded(chain(), "node=3")
        state = zm.full_state_dict(model)
        with zm.Checkpoints(tmp_path / change.__name__, model) as checkpoints:
            checkpoints.save(0)
            checkpoints.wait()
            change(model)
            saving = partial(checkpoints.save, 1), partial(zm.full_state_dict, model)
            for use in (*saving, partial(checkpoints.load, "auto"), partial(zm.load_full_state_dict, model, state)):
                with pytest.raises(ModelError, match=r"is the parameter that zm.shard found as .*: reorder, share or"):
                    use()


@on_ranks(2)
def test_a_parameter_that_is_kept_in_a_list_is_refused_where_it_is_used():
    """It was emptied, and would count as zero."""
    base = chain()
    kept = next(base.parameters())
    zm.shard(base, mesh(), "node=3")
    assert kept.requires_grad and kept.grad is None
    for use in (torch.sum, torch.Tensor.clone, lambda param: param * inputs(0).sum(), lambda param: [*param]):
        with pytest.raises(ModelError, match=r"of a parameter from before zm\.shard, now without values"):
            use(kept)


# ---- values that a backward needs


@on_ranks(2)
def test_second_derivatives_need_whole_parameters():
    base = chain()
    for strategy in ("node=1", "node=0"):
        plain, model = copy.deepcopy(base), sharded(base, strategy)
        for each in (plain, model):
            x = inputs(dist.get_rank()).requires_grad_()
            (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            (slope.square().sum() + each(x).sum()).backward()
        same_grads(model, plain)
    x, model = inputs().requires_grad_(), sharded(base, "node=3")
    with pytest.raises(ModelError, match=r"create_graph=True .* stages 0, 1 and 2"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()
    model = sharded(base, "node=1")
    with pytest.raises(ModelError, match=r"create_graph=True .* no torch\.func"):
        torch.func.grad(lambda x: model(x).square().sum())(inputs())


@on_ranks(2)
def test_gradients_that_carry_a_graph_are_summed_without_it():
    base = chain()
    plain, model, x = copy.deepcopy(base), sharded(base, "node=1"), inputs(dist.get_rank())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*create_graph=True will create a reference cycle")
        for last in (False, True):
            with zm.accumulate(model, last=last):
                model(x).sum().backward(create_graph=True)
    (2 * plain(x).sum()).backward()
    same_grads(model, plain)
    assert not any(param.grad.local.requires_grad for param in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(1)
def test_compiled_autograd_is_refused(compiled):
    """It calls hooks, but not at a backward's end, so all gradients would be lost. On one rank, as tracing takes
    seconds."""

    def step(model, x):
        model(x).sum().backward()

    torch._dynamo.reset()
    base = chain(1)  # each block costs seconds of tracing
    plain, model, x = copy.deepcopy(base), zm.shard(base, mesh_of(1), "node=1", bucket_bytes=0), inputs()
    with torch._dynamo.config.patch(compiled_autograd=compiled), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        stands = nullcontext() if compiled else compiled_autograd._enable(torch.compile(backend="eager"))
        with stands, pytest.raises(ModelError, match="compiled autograd does not tell when a backward ends"):
            (torch.compile(step, backend="eager") if compiled else step)(model, x)
    zm.zero_grad(model)
    for each in (model, plain):
        step(each, x)
    same_grads(model, plain)


@on_ranks(2)
def test_a_block_whose_output_cannot_be_seen_is_refused():
    """As its tensor is in an object that no hook can look into."""

    def compute(self, x):
        box = SimpleNamespace(h=x)
        for block in self.blocks:
            box = block(box)
        return box.h

    boxed = [Unit(lambda self, box: SimpleNamespace(h=self.inner(box.h)), inner=block) for block in chain()]
    x, base = inputs(dist.get_rank()), Part(compute, blocks=nn.ModuleList(boxed))
    model = sharded(base, "node=3")
    with pytest.raises(ModelError, match=r"the backward of unit 'blocks\.\d' began unseen.*return tensors"):
        model(x).sum().backward()
    base(x).sum().backward()
    for strategy in ("node=1", "node=3k"):  # values that stay where they are
        model = sharded(base, strategy)
        model(x).sum().backward()
        same_grads(model, base)


class ActorCritic(nn.Module):
    """Two networks in one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


@STAGES
@on_ranks(2)
def test_a_backward_after_the_step_that_followed_its_forward_is_refused(strategy):
    model, x = sharded(chain(), strategy), inputs()
    optimizer = sgd(model.parameters())
    model(x).sum().backward()
    loss = model(x).square().sum()
    optimizer.step()
    optimizer.zero_grad()
    # Torch's own words where the gathered parameters are the masters.
    with pytest.raises((ModelError, RuntimeError), match=r"has changed since the forward|modified by an inplace"):
        loss.backward()
    if strategy == "node=3":
        loss = model(x).square().sum()
        zm.refresh(model)
        with pytest.raises(ModelError, match="has changed since the forward"):
            loss.backward()
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["node=2", "node=1", "node=0"])
@on_ranks(2)
def test_ranks_may_differ_in_every_backward_of_forwards(strategy):
    def compute(self, x, path):
        for index in path:
            x = self.blocks[index](x)
        return x

    base, rank = Part(compute, blocks=nn.ModuleList(chain())), dist.get_rank()
    model, x = sharded(base, strategy), inputs(rank)
    for paths in (([[0, 1, 2]], [[0, 2]]), ([[1, 3]], [[0, 1, 2]]), ([[0, 1, 2], [0, 1]], [[0], [0, 1, 2]])):
        base.zero_grad()
        zm.zero_grad(model)
        for each in (model, base):
            outs = [each(x, path) for path in paths[rank]]
            each.zero_grad()  # between forward and backward, as some write it
            torch.cat(outs).sum().backward(retain_graph=True)
            torch.cat(outs).square().sum().backward()
        shown = [param.grad is not None for param in model.parameters()]
        used = {index for own in paths for path in own for index in path}
        assert shown == [index in used for index in range(4) for _ in ("weight", "bias")]
        for name, ours in model.named_parameters():
            theirs = base.get_parameter(name)
            mean = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
            dist.all_reduce(mean)
            if ours.grad is None:
                assert not mean.any()
            else:
                close(ours.grad.local, local_part(ours, mean / 2), name, BOUND)


# ---- state dicts of parts


@STAGES
@on_ranks(2)
def test_a_part_shows_slices_of_whole_tensors(strategy):
    model = sharded(chain(), strategy)
    second = model.get_submodule("1")
    whole, part = model.state_dict(), second.state_dict()
    assert list(part) == ["0.weight", "0.bias"]
    for key, value in part.items():
        assert type(value) is type(whole[f"1.{key}"]) and value.shape == whole[f"1.{key}"].shape
        assert value.full_name == f"1.{key}"
    saved = io.BytesIO()
    model.load_state_dict(whole)
    torch.save({key: value.shape for key, value in part.items()}, saved)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"1.0.weight": torch.zeros(1, 1)}, strict=False)


@pytest.mark.parametrize(("strategy", "assign"), [("node=3", True), ("node=1", False), ("node=0", True)])
@on_ranks(2)
def test_what_is_loaded_is_computed_with(strategy, assign):
    """Whole, in part, into a part, into a module around the model; slices, parameters, or tensors of another dtype."""
    plain = chain()
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(param.add(1).float())  # which both dtypes hold
    full, x = plain.state_dict(), inputs()
    around = nn.ModuleDict({"inner": sharded(chain(), strategy), "other": nn.Linear(1, 1)})
    inner = around["inner"]
    slices = sharded(plain, strategy).state_dict()
    for load in (
        lambda: inner.load_state_dict(full, assign=assign),
        lambda: inner.load_state_dict(dict(plain.named_parameters()), strict=False, assign=assign),
        lambda: inner.load_state_dict({key: value.float() for key, value in full.items()}, assign=assign),
        lambda: inner.load_state_dict(slices, assign=assign),
        lambda: around.load_state_dict({f"inner.{k}": v for k, v in full.items()}, strict=False, assign=assign),
        lambda: [part.load_state_dict(plain.get_submodule(n).state_dict()) for n, part in inner.named_children()],
    ):
        with torch.no_grad():
            for param in inner.parameters():
                param.zero_()
        held = [*inner.parameters()]
        load()
        assert all(one is other for one, other in zip(inner.parameters(), held, strict=True))
        for ours, theirs in zip(inner.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.local, local_part(ours, theirs.detach()).view(-1))
        assert torch.equal(inner(x), plain(x))
    found = inner.load_state_dict({"1.0.bias": full["1.0.bias"], "none": x}, strict=False, assign=assign)
    assert found.unexpected_keys == ["none"] and set(found.missing_keys) == {*full} - {"1.0.bias"}
