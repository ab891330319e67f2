"""Trains one model plainly and sharded on the same global batch, and holds the two against each other.

The first rank runs the plain forwards and backwards of all ranks' data, in fp64, so that differences are zeromesh's
doing, and tells the others its gradients, since processes outnumber cores. After each backward all gradients are
compared, after each step all parameters: this rank's slices with the same parts of the whole tensors, and at the end
the whole state dict.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.pool import kept
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.launch.device import SHARE, set_variables

STRATEGIES = ("node=3,cluster=1", "node=3,cluster=3", "node=0,cluster=1")
"""The main job's; every parameter in four parts; no parameter sharded."""

DEFERRED = "node=3d,cluster=3d"

BOUND = 1e-10
"""Largest difference of fp64 parameters after several steps."""

LossOf = Callable[[nn.Module, Any], Tensor]
DataOf = Callable[[int, int, int], Any]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


ONE_AXIS = ("node=3", "node=0", "node=3d", "node=3k")
"""On two ranks: for features that do not depend on the number of levels."""


def mesh_of(*shape: int, device: str = "cpu") -> DeviceMesh:
    """A mesh with the shape given innermost first, made once: node, cluster, region, site. Ranks share devices."""
    if device == "cuda":
        os.environ[SHARE] = "1"
        set_variables(dist.get_rank())
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    names = ("node", "cluster", "region", "site")[: len(shape)]
    return kept(init_device_mesh, device, tuple(reversed(shape)), mesh_dim_names=tuple(reversed(names)))


def mesh_of_world(device: str = "cpu") -> DeviceMesh:
    world = dist.get_world_size()
    return mesh_of(*(2, 2) if world == 4 else (world,), device=device)


class Block(nn.Module):
    """Odd sizes, a parameter of one element, and a bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, dim + 2)
        self.down = nn.Linear(dim + 2, dim, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Part(nn.Module):
    """Anything: parts by name, and a forward."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


class Unit(Part):
    """One that is a unit."""


class Net(nn.Module):
    """A small language model: embedding, blocks, head. Its blocks take further arguments of a forward too."""

    def __init__(
        self, dim: int = 5, num_blocks: int = 3, vocabulary: int = 11, block: Callable[[int], nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor, *args: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, *args)
        return self.head(self.norm(x))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(step: int, micro: int, rank: int, vocabulary: int = 11, shape: tuple[int, ...] = (2, 4)) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=seeded(1000 * step + 10 * micro + rank))


def vectors(width: int) -> DataOf:
    """Data of three vectors."""
    return lambda step, micro, rank: torch.randn(3, width, generator=seeded(100 * step + 10 * micro + rank)).double()


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, -2), batch.flatten().roll(1))


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-1)


def local_part(param: ShardedParameter, whole: Tensor) -> Tensor:
    """The part of a tensor of the whole parameter's shape that this rank's slice covers.

    Where the parameter was a plain tensor of this rank's part alone, `divided` says which: its number, and of how many.
    """
    part, parts = getattr(param, "divided", (0, 1))
    whole = whole.chunk(parts)[part] if parts > 1 else whole
    region = whole.detach()[param.region.index].reshape(-1)
    return region[param.flat_start :][: param.local.numel()]


Models = nn.Module | Sequence[nn.Module]
"""A sharded model, or the stages of one that this rank has."""


def sharded_params(model: Models) -> dict[str, ShardedParameter]:
    """By original name, tied ones under each of their names."""
    models = [model] if isinstance(model, nn.Module) else model
    return {
        name: param
        for each in models
        for buffer in (buffer for unit in engine_of(each).units for buffer in unit.buffers)
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True)
        for name in place.info.names
    }


def both_params(model: Models, plain: nn.Module) -> Iterator[tuple[str, ShardedParameter, Tensor]]:
    """Name, sharded and plain parameter: of all of `plain`, or of those that this rank's stages have."""
    params, named = sharded_params(model), dict(plain.named_parameters(remove_duplicate=False))
    for name in named if isinstance(model, nn.Module) else params:
        yield name, params[name], named[name]


def close(ours: Tensor, theirs: Tensor, what: str, bound: float = BOUND) -> None:
    ours = ours.cpu()
    torch.testing.assert_close(
        ours, theirs.to("cpu", ours.dtype), rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}"
    )


def shown(model: nn.Module) -> list[bool]:
    """For each parameter, whether an optimizer would see a gradient."""
    return [param.grad is not None for param in model.parameters()]


def share_grads(model: nn.Module) -> None:
    """The first rank's gradients of a plain model of real numbers, on all ranks."""
    params = list(model.parameters())
    there = torch.tensor([param.grad is not None for param in params])
    dist.broadcast(there, src=0)
    having = [param for param, has in zip(params, there.tolist(), strict=True) if has]
    whole = torch.cat([(param if param.grad is None else param.grad).detach().double().flatten() for param in having])
    dist.broadcast(whole, src=0)
    for param in params:
        param.grad = None
    for param, grad in zip(having, whole.split([param.numel() for param in having]), strict=True):
        param.grad = grad.view_as(param).to(param.dtype)


def same_grads(model: Models, plain: nn.Module, bound: float = BOUND) -> None:
    """This rank's gradients are slices of the plain model's; both have one, or neither has."""
    for name, param, expected in both_params(model, plain):
        grad: Any = param.grad
        assert (grad is None) == (expected.grad is None), f"{name}: grad is {grad}, should be {expected.grad}"
        if expected.grad is not None:
            close(grad.local, local_part(param, expected.grad), f"gradient of {name}", bound)


def same_params(model: Models, plain: nn.Module, bound: float = BOUND) -> None:
    for name, param, expected in both_params(model, plain):
        close(param.local, local_part(param, expected), name, bound)


def same_optimizer_states(
    model: Models,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    plain_optimizer: torch.optim.Optimizer,
    bound: float = BOUND,
) -> None:
    """Moments are slices of the plain optimizer's, and all else of a parameter's state, such as its steps, is equal."""
    for name, param, expected in both_params(model, plain):
        ours, theirs = optimizer.state.get(param, {}), plain_optimizer.state.get(expected, {})
        assert ours.keys() == theirs.keys(), f"optimizer states of {name}: {sorted(ours)}, should be {sorted(theirs)}"
        for key, value in theirs.items():
            whole = not isinstance(value, Tensor) or value.shape != expected.shape or key == "step"
            if not whole:
                close(ours[key], local_part(param, value), f"{key} of {name}", bound)
            else:
                assert ours[key] == value, f"{key} of {name} is {ours[key]}, should be {value}"


def same_state(model: nn.Module, plain: nn.Module, bound: float = BOUND) -> None:
    """The full state dict is the plain model's: names, shapes, values."""
    state = zm.full_state_dict(model)
    if dist.get_rank() == 0:
        expected = plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert state[name].shape == value.shape
            close(state[name], value, name, bound)
    else:
        assert state == {}


@dataclass(kw_only=True)
class Pair:
    """One model, plain and sharded.

    Args:
        base: the model; not changed, but trained as the plain one where `model` is given.
        strategy: of the sharded copy.
        model: sharded already, or this rank's stages of it; None: a copy of `base` is sharded.
        loss_of: loss of a model on one batch.
        data_of: batch by step, micro-batch and place among the data-parallel ranks.
        micro_batches: of a step.
        run: all backwards of a step on this rank; None: those of `loss_of`, one micro-batch after another.
        counts: the weight of a loss by micro-batch and place, where losses are not all alike.
        prepare: changes both copies before sharding.
        wrap: changes the sharded copy alone, before sharding: the plain one keeps its names.
        options: of `zm.shard`.
        bound: largest difference, relative or absolute.
        clip: norm to clip to; None neither clips nor looks at the norm.
        device: of the sharded copy; batches are tensors where it is not the host.
    """

    base: nn.Module
    strategy: str = ""
    model: Any = None
    loss_of: LossOf = next_token_loss
    data_of: DataOf = tokens
    micro_batches: int = 2
    run: Callable[[int], object] | None = None
    counts: Callable[[int, int], float] | None = None
    prepare: Callable[[nn.Module], object] = lambda model: None
    wrap: Callable[[Any], object] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    bound: float = BOUND
    clip: float | None = None
    device: str = "cpu"
    plain: Any = field(init=False)
    places: int = field(init=False)
    own: int = field(init=False)

    def __post_init__(self) -> None:
        self.plain = self.base
        if self.model is None:
            self.plain, self.model = copy.deepcopy(self.base), copy.deepcopy(self.base)
            self.prepare(self.plain)
            self.prepare(self.model)
            self.wrap(self.model)
            zm.shard(self.model, mesh_of_world(self.device), self.strategy, **self.options)
        control = engine_of(self.model if isinstance(self.model, nn.Module) else self.model[0]).control
        self.places, self.own = control.size, control.rank

    @property
    def total(self) -> float:
        """The sum of `counts` over a step."""
        count = self.counts or (lambda micro, place: 1.0)
        return float(sum(count(micro, place) for micro in range(self.micro_batches) for place in range(self.places)))

    def plain_backward(self, step: int, micros: Iterable[int] | None = None) -> None:
        if dist.get_rank() == 0:
            for micro in range(self.micro_batches) if micros is None else micros:
                for place in range(self.places):
                    loss = self.loss_of(self.plain, self.data_of(step, micro, place))
                    (loss * (self.counts(micro, place) if self.counts else 1.0) / self.total).backward()
        share_grads(self.plain)

    def backward(self, step: int) -> None:
        if self.run is not None:
            self.run(step)
            return
        before = shown(self.model)
        for micro in range(self.micro_batches):
            last = micro == self.micro_batches - 1
            weight = {"weight": self.counts(micro, self.own), "total": self.total} if self.counts else {}
            with zm.accumulate(self.model, last=last, **weight) as weigh:
                self.micro_backward(step, micro, weigh if self.counts else None)
            assert last or shown(self.model) == before, "gradients are shown before the last micro-batch"

    def micro_backward(self, step: int, micro: int, weigh: Callable[[Tensor], Tensor] | None = None) -> None:
        batch = self.data_of(step, micro, self.own)
        loss = self.loss_of(self.model, batch if self.device == "cpu" else batch.to(self.device))
        (loss / self.micro_batches if weigh is None else weigh(loss)).backward()

    def same_grads(self) -> None:
        same_grads(self.model, self.plain, self.bound)

    def same_params(self) -> None:
        same_params(self.model, self.plain, self.bound)

    def same_state(self) -> None:
        same_state(self.model, self.plain, self.bound)

    def params(self) -> list[Any]:
        """Parameters of the sharded model, or of all stages."""
        models = [self.model] if isinstance(self.model, nn.Module) else self.model
        return [param for each in models for param in each.parameters()]

    def train(self, **arguments: Any) -> list[torch.optim.Optimizer]:
        """See `train_side_by_side`."""
        return train_side_by_side([self], **arguments)


def train_side_by_side(
    pairs: Sequence[Pair],
    steps: int = 2,
    make_optimizer: MakeOptimizer = adamw,
    after_step: Callable[[int], object] = lambda step: None,
    set_to_none: bool = True,
) -> list[torch.optim.Optimizer]:
    """Steps of several sharded copies of one model and of one plain copy, which costs most; compared all along.

    Returns:
        The plain copy's optimizer, and that of each pair.
    """
    first = pairs[0]
    for pair in pairs:
        pair.plain = first.plain
    plain_optimizer = make_optimizer(first.plain.parameters())
    optimizers = [make_optimizer(pair.params()) for pair in pairs]
    for step in range(steps):
        first.plain_backward(step)
        for pair in pairs:
            pair.backward(step)
            pair.same_grads()
        if first.clip is not None:
            norm = nn.utils.clip_grad_norm_(first.plain.parameters(), first.clip)
            for pair in pairs:
                close(zm.clip_grad_norm_(pair.model, first.clip), norm, f"norm of {pair.strategy}", pair.bound)
        for optimizer in (plain_optimizer, *optimizers):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        for pair in pairs:
            pair.same_params()
            assert set_to_none or not any(p.grad.local.any() for p in pair.params() if p.grad is not None)
        after_step(step)
    for pair, optimizer in zip(pairs, optimizers, strict=True):
        same_optimizer_states(pair.model, optimizer, pair.plain, plain_optimizer, pair.bound)
        if isinstance(pair.model, nn.Module) and not any(hasattr(param, "divided") for param in pair.params()):
            pair.same_state()
    return [plain_optimizer, *optimizers]


TRAINING = ("steps", "make_optimizer", "after_step", "set_to_none")


def check(base: nn.Module, *strategies: str, **arguments: Any) -> list[Pair]:
    """Trains a `Pair` for each strategy, side by side, and returns them."""
    training = {name: arguments.pop(name) for name in TRAINING if name in arguments}
    pairs = [Pair(base=base, strategy=strategy, **arguments) for strategy in strategies]
    train_side_by_side(pairs, **training)
    return pairs
