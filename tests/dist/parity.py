"""Trains one model plainly and sharded on the same global batch, and holds the two against each other.

The first rank runs the plain forwards and backwards of all ranks' data and tells the others its gradients, since
processes outnumber cores; a `Case` trains plainly once for all strategies. After each backward all gradients are
compared, after each step all parameters: this rank's slices with the same parts of the whole tensors.

`check(base, *strategies)` trains any model in fp64. `check_case(strategy, case)` trains one that is awkward to shard in
any precision, compares optimizer states, norms, padding and replicas too, and raises `Unequal` on all ranks alike.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

import zeromesh as zm
from tests.dist.pool import kept, told_by_first
from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine
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
    return region[param.elements.start :][: param.local.numel()]


def on_device(batch: Any, device: str) -> Any:
    return batch if device == "cpu" else tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


class Unequal(AssertionError):
    """Sharded and plain training differ."""


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


def all_close(compared: Sequence[tuple[Tensor, Tensor, str]], bound: float = BOUND) -> None:
    """All at once, since a comparison takes longer than its few elements do; one by one for the message."""
    pairs = [(ours.cpu(), theirs.to("cpu", ours.dtype)) for ours, theirs, _ in compared]
    if pairs and all(ours.shape == theirs.shape for ours, theirs in pairs):
        flat = [torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True)]
        if torch.allclose(*flat, rtol=bound, atol=bound):
            return
    for ours, theirs, what in compared:
        close(ours, theirs, what, bound)


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
    compared = []
    for name, param, expected in both_params(model, plain):
        grad: Any = param.grad
        assert (grad is None) == (expected.grad is None), f"{name}: grad is {grad}, should be {expected.grad}"
        if expected.grad is not None:
            compared.append((grad.local, local_part(param, expected.grad), f"gradient of {name}"))
    all_close(compared, bound)


def same_params(model: Models, plain: nn.Module, bound: float = BOUND) -> None:
    both = both_params(model, plain)
    all_close([(param.local.detach(), local_part(param, expected), name) for name, param, expected in both], bound)


def same_optimizer_states(
    model: Models,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    plain_optimizer: torch.optim.Optimizer,
    bound: float = BOUND,
) -> None:
    """Moments are slices of the plain optimizer's, and all else of a parameter's state, such as its steps, is equal."""
    compared = []
    for name, param, expected in both_params(model, plain):
        ours, theirs = optimizer.state.get(param, {}), plain_optimizer.state.get(expected, {})
        assert ours.keys() == theirs.keys(), f"optimizer states of {name}: {sorted(ours)}, should be {sorted(theirs)}"
        for key, value in theirs.items():
            whole = not isinstance(value, Tensor) or value.shape != expected.shape or key == "step"
            if not whole:
                compared.append((ours[key], local_part(param, value), f"{key} of {name}"))
            else:
                assert ours[key] == value, f"{key} of {name} is {ours[key]}, should be {value}"
    all_close(compared, bound)


def same_state(model: nn.Module, plain: nn.Module, bound: float = BOUND) -> None:
    """The full state dict is the plain model's: names, shapes, values."""
    state = zm.full_state_dict(model)
    if dist.get_rank() == 0:
        expected = plain.state_dict()
        assert state.keys() == expected.keys()
        all_close([(state[name], value, name) for name, value in expected.items()], bound)
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
        plain_loss: the loss of the plain model, where that is not computed as the sharded one's.
        every_last: each micro-batch's gradients are reduced over all axes, and added, as without `zm.accumulate`.
        terms: to be the sums of the magnitudes of the plain gradients' terms, by parameter; None adds up none.
        prepare: changes both copies before sharding.
        wrap: changes the sharded copy alone, before sharding: the plain one keeps its names.
        options: of `zm.shard`.
        weigh: losses are weighed, where `counts` says by how much; else gradients are.
        bound: largest difference, relative or absolute.
        clip: norm to clip to; None neither clips nor looks at the norm.
        device: of the sharded copy; batches are tensors where it is not the host.
        places: number of data-parallel ranks; 0: those of the sharded copy.
        plain: the plain copy of another pair; None: one of its own.
    """

    base: nn.Module
    strategy: str = ""
    model: Any = None
    loss_of: LossOf = next_token_loss
    data_of: DataOf = tokens
    micro_batches: int = 2
    run: Callable[[int], object] | None = None
    counts: Callable[[int, int], float] | None = None
    plain_loss: LossOf | None = None
    every_last: bool = False
    terms: list[Tensor] | None = None
    prepare: Callable[[nn.Module], object] = lambda model: None
    wrap: Callable[[Any], object] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    weigh: bool = True
    bound: float = BOUND
    clip: float | None = None
    device: str = "cpu"
    places: int = 0
    plain: Any = None
    own: int = field(init=False)

    def __post_init__(self) -> None:
        if self.model is not None:
            self.plain = self.base
        else:
            if self.plain is None:
                self.plain = copy.deepcopy(self.base)
                self.prepare(self.plain)
            self.model = copy.deepcopy(self.base)
            self.prepare(self.model)
            self.wrap(self.model)
            zm.shard(self.model, mesh_of_world(self.device), self.strategy, **self.options)
        if not self.places:
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
                    self._add_plainly(step, micro, place)
        share_grads(self.plain)
        for term in self.terms or ():
            dist.broadcast(term, src=0)

    def _add_plainly(self, step: int, micro: int, place: int) -> None:
        """Scales gradients after their backward, as they are sent: narrow parts then round alike."""
        share = self.counts(micro, place) / self.total if self.counts else 1 / self.places
        if not share:
            return
        params = list(self.plain.parameters())
        before = [param.grad for param in params]
        self.plain.zero_grad()
        batch = on_device(self.data_of(step, micro, place), params[0].device.type)
        loss = (self.plain_loss or self.loss_of)(self.plain, batch)
        (loss if self.counts else loss / self.micro_batches).backward()
        for at, (param, grad) in enumerate(zip(params, before, strict=True)):
            if param.grad is None:
                param.grad = grad
                continue
            term = param.grad * share
            param.grad = term if grad is None else grad + term
            if self.terms is not None:
                self.terms[at] += term.abs()

    def backward(self, step: int) -> None:
        if self.run is not None:
            self.run(step)
            return
        before, weights, total = shown(self.model), [0.0] * self.micro_batches, 0.0
        if self.counts:
            weights = [float(self.counts(micro, self.own)) for micro in range(self.micro_batches)]
            total = zm.sum_over_ranks(self.model, sum(weights))
        for micro, weight in enumerate(weights):
            last = self.every_last or micro == self.micro_batches - 1
            weighted = {"weight": weight, "total": total} if self.counts else {}
            with zm.accumulate(self.model, last=last, **weighted) as weigh:
                self.micro_backward(step, micro, weigh if self.counts and self.weigh else None)
            if not last and shown(self.model) != before:
                raise Unequal(f"micro-batch {micro} is not the last of step {step}, but gradients are shown after it")

    def micro_backward(self, step: int, micro: int, weigh: Callable[[Tensor], Tensor] | None = None) -> None:
        loss = self.loss_of(self.model, on_device(self.data_of(step, micro, self.own), self.device))
        (weigh(loss) if weigh else loss if self.counts else loss / self.micro_batches).backward()

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
    pairs = list[Pair]()
    for strategy in strategies:  # a copy takes as long as a step, so one plain copy serves all
        plain = pairs[0].plain if pairs else None
        pairs.append(Pair(base=base, strategy=strategy, plain=plain, **arguments))
    train_side_by_side(pairs, **training)
    return pairs


# ---- a model that is awkward to shard, in any precision

VOCABULARY, WIDTH, BATCH, SEQUENCE = 11, 7, 2, 5


class AwkwardBlock(nn.Module):
    """Odd shapes: numel 1, numel 0, an unused parameter, a frozen part, two names of one weight, two dtypes."""

    def __init__(self, hidden: int, norm_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).to(norm_dtype)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix_again = nn.Linear(WIDTH, WIDTH)
        self.mix_again.weight = self.mix.weight
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.unused = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        h = torch.tanh(self.mix_again(torch.tanh(self.mix(h))) + self.fixed(h))
        h = self.down(torch.tanh(self.up(h)))
        return torch.addcmul(x, h, self.gain) + self.empty.sum()


class Scale(nn.Module):
    """A unit of one element: smaller than any world."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Awkward(nn.Module):
    """Blocks of unequal sizes, one wholly frozen, a weight tied across two of them, and units of one element."""

    def __init__(self, norm_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(AwkwardBlock(hidden, norm_dtype) for hidden in (9, 5, 9))
        self.scales = nn.ModuleList(Scale() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.layers[1].requires_grad_(False)
        self.layers[2].down.weight = self.layers[0].down.weight  # type: ignore[union-attr]  # they are blocks

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for module in (*self.layers, *self.scales):
            h = module(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training, and how exactly its plain and its sharded run must agree.

    Args:
        optimizer: `sgd` (with momentum), `adamw`, or `both`: each for every second parameter.
        precision: `fp64`: 1e-10 on every element. `fp32`: 8*eps*sqrt(summands) of fp64, normwise; with SGD alone, which
            then has no momentum, after every step. `bf16`: bf16 compute, fp32 on the wires, against the same on one
            process. `bf16-wire`: bf16 on all wires. In all but fp64, after the first step: `Comparison.stepped`.
        world: number of ranks.
        weighted: unequal numbers of tokens on the ranks, one of them none.
        evaluate: a forward without a backward between each last backward and the optimizer's step.
        every_last: each micro-batch's gradients are reduced over all axes, and added, as without `zm.accumulate`.
        clip: norm to clip to; None does not.
        bucket_bytes: as for `zm.shard`.
        debug: as for `zm.shard`: slots are looked at before and after every use.
        device: where the sharded training computes.
    """

    optimizer: str = "adamw"
    precision: str = "fp64"
    world: int = 4
    steps: int = 2
    micro_batches: int = 2
    weighted: bool = False
    evaluate: bool = False
    every_last: bool = False
    clip: float | None = 0.5
    bucket_bytes: int = 0
    debug: bool = False
    device: str = "cpu"

    @property
    def wide(self) -> torch.dtype:
        return torch.float32 if self.precision.startswith("bf16") else torch.float64

    @property
    def plain_device(self) -> str:
        """Where narrow kernels round as on `device`: the simulated one has the host's."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def bound(self) -> float:
        """On a tensor's error, relative to its norm: each token of the global batch adds a term to each element."""
        return 8 * torch.finfo(torch.float32).eps * math.sqrt(self.world * self.micro_batches * BATCH * SEQUENCE)

    def build(self) -> Awkward:
        """The model before sharding, the same on every rank."""
        torch.manual_seed(0)
        net = Awkward()
        for param in net.parameters():
            torch.nn.init.normal_(param, mean=0.3 if param.dim() < 2 else 0.0, std=0.4)
        if self.precision == "fp64":
            net.double()
            for block in net.layers:
                block.norm.float()  # a second dtype in each unit
        return net

    def shard_options(self) -> dict[str, Any]:
        dtypes: dict[str, dict[str, torch.dtype]] = {
            "fp64": {"reduce_dtype": torch.float64, "grad_dtype": torch.float64, "master_dtype": torch.float64},
            "fp32": {},
            "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
            "bf16-wire": {"param_dtype": torch.bfloat16},
        }
        return {"bucket_bytes": self.bucket_bytes} | ({"debug": True} if self.debug else {}) | dtypes[self.precision]

    def make_optimizer(self, params: Iterable[Tensor]) -> Optimizers:
        params = list(params)
        even, odd = (params[::2], params[1::2]) if self.optimizer == "both" else (params, params)
        made: list[torch.optim.Optimizer] = []
        if self.optimizer != "sgd":
            made.append(torch.optim.AdamW(even, lr=1e-2))
        if self.optimizer != "adamw":
            plain_sgd = self.precision == "fp32" and self.optimizer == "sgd"
            made.append(torch.optim.SGD(odd, lr=0.05, momentum=0.0 if plain_sgd else 0.9))
        return Optimizers(members=made)

    def data_of(self, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens, and targets (-100 where they do not count); different for every rank."""
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=seeded(10_000 * step + 100 * micro + rank))
        targets = tokens.roll(1, dims=1)
        if self.weighted:
            targets.view(-1)[self.count(micro, rank) :] = -100
        return tokens, targets

    def count(self, micro: int, rank: int) -> int:
        """How many targets count: up to all ten; of none the loss is NaN, and must not count."""
        return (3 * rank + 5 * micro) % (BATCH * SEQUENCE + 1) if self.weighted else BATCH * SEQUENCE

    def training(self) -> dict[str, Any]:
        """The case as arguments of `Pair`."""
        return {
            "loss_of": loss_of,
            "data_of": self.data_of,
            "micro_batches": self.micro_batches,
            "counts": self.count if self.weighted else None,
            "weigh": False,
            "every_last": self.every_last,
            "device": self.device,
        }

    def plain(self) -> tuple[nn.Module, LossOf]:
        """A model whose parameters are the masters, and its loss, computed in the dtypes of the case."""
        net = self.build()
        dtypes = {
            name: torch.bfloat16 if self.precision.startswith("bf16") else p.dtype for name, p in net.named_parameters()
        }
        if self.precision == "fp32":
            dtypes = dict.fromkeys(dtypes, torch.float64)  # the truth that fp32 is held against

        def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            narrow = {name: param.to(dtypes[name]) for name, param in model.named_parameters()}
            return loss_of(partial(functional_call, model, narrow), batch)

        return net.to(self.plain_device, self.wide), plain_loss


def loss_of(model: Callable[[Any], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0]).flatten(0, 1)
    return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[1].flatten())


@dataclass(kw_only=True)
class Optimizers:
    """One or several optimizers behind the methods that are called of one."""

    members: list[torch.optim.Optimizer]

    @property
    def state(self) -> dict[Any, Any]:
        return {param: state for optimizer in self.members for param, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.members:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.members:
            optimizer.zero_grad(set_to_none)

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.get(param, {}).items() if isinstance(value, Tensor)}


def evaluate(model: nn.Module, case: Case, device: str, loss: LossOf = loss_of) -> float:
    """The loss of a batch that nothing is trained on."""
    tokens = case.data_of(99, 0, 0)[0].to(device)
    model.eval()
    with torch.no_grad():
        found = float(loss(model, (tokens, tokens)))
    model.train()
    return found


@contextmanager
def sharded(strategy: str, case: Case, mesh: DeviceMesh, **options: Any) -> Iterator[tuple[Awkward, Optimizers]]:
    """The model of `case`, sharded, with its optimizer."""
    model = zm.shard(case.build(), mesh, strategy, **{**case.shard_options(), **options})
    yield model, case.make_optimizer(p for p in model.parameters() if p.requires_grad)
    engine_of(model).at_rest()


def backward(model: nn.Module, case: Case, step: int) -> None:
    """All micro-batches of one step on this rank."""
    Pair(base=model, model=model, **case.training()).backward(step)


def take_step(model: nn.Module, optimizer: Optimizers, case: Case, step: int) -> None:
    """One whole step on this rank."""
    backward(model, case, step)
    zm.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


Bits = list[tuple[str, str]]
"""Digests of this rank's slices, by name."""


def trained(strategy: str, case: Case, *shape: int, **options: Any) -> Bits:
    """On a rank: trains without comparing. The bits of its gradients in each step, and at the end of trained
    parameters and of the optimizer's states."""
    bits: Bits = []
    with sharded(strategy, case, mesh_of(*shape, device=case.device), **options) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            having = [param for param in model.parameters() if param.grad is not None]
            bits += [(f"gradient {step} of {p.full_name}", _digest(p.grad.local)) for p in having]
            bits.append((f"norm {step}", str(float(zm.clip_grad_norm_(model, 0.5)))))
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).at_rest(follow=True)
        for param in (param for param in model.parameters() if param.requires_grad):
            where = f"of {param.full_name} from {param.elements.start}"
            held = {"parameter": param.local} | optimizer.tensors(param)
            bits += [(f"{key} {where}", _digest(value)) for key, value in held.items()]
    return bits


def require_same(what: str, ours: Bits, theirs: Bits) -> None:
    differ = [where for (where, one), (_, other) in zip(ours, theirs, strict=True) if one != other]
    assert ours and not differ, f"{what}: {len(differ)} differ: {differ[:8]}"


@dataclass(kw_only=True)
class PlainStep:
    """One step of plain training: gradients before they are clipped, and parameters after it."""

    grads: list[Tensor | None]
    terms: list[Tensor] | None
    evaluated: float
    norm: float
    params: list[Tensor]

    def show_grads(self, plain: nn.Module) -> None:
        for param, grad in zip(plain.parameters(), self.grads, strict=True):
            param.grad = grad

    def show_params(self, plain: nn.Module) -> None:
        for param, value in zip(plain.parameters(), self.params, strict=True):
            param.data = value


@dataclass(kw_only=True)
class Plainly:
    """Plain training of a case: its model, whose values are those of the step last shown, and its optimizer."""

    model: nn.Module
    optimizer: Optimizers
    steps: list[PlainStep]


def plainly(case: Case) -> Plainly:
    model, loss = case.plain()
    pair = Pair(base=model, model=model, plain_loss=loss, places=case.world, **case.training())
    optimizer, steps = case.make_optimizer(param for param in model.parameters() if param.requires_grad), []
    for step in range(case.steps):
        pair.terms = [torch.zeros_like(p) for p in model.parameters()] if case.precision == "bf16-wire" else None
        pair.plain_backward(step)
        grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        evaluated = told_by_first(evaluate, model, case, case.plain_device, loss) if case.evaluate else 0.0
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or math.inf))
        optimizer.step()
        optimizer.zero_grad()
        params = [param.detach().clone() for param in model.parameters()]
        steps.append(PlainStep(grads=grads, terms=pair.terms, evaluated=evaluated, norm=norm, params=params))
    return Plainly(model=model, optimizer=optimizer, steps=steps)


def check_case(strategy: str, case: Case, *shape: int) -> None:
    """Trains with `strategy` on a mesh of `shape` (innermost first) and compares: see the module.

    Args:
        strategy: as for `zm.shard`.
        case: the training.
        shape: of the mesh, innermost first.
    """
    plain = kept(plainly, case)
    with sharded(strategy, case, mesh_of(*shape, device=case.device)) as (model, optimizer):
        pair = Pair(base=plain.model, model=model, **case.training())
        comparison, clip = Comparison(pair=pair, case=case), case.clip or math.inf
        for step, expected in enumerate(plain.steps):
            first = step == 0
            pair.backward(step)
            expected.show_grads(plain.model)
            pair.terms = expected.terms
            comparison.gradients(step)
            if case.evaluate:
                comparison.number(f"loss after backward {step}", evaluate(model, case, case.device), expected.evaluated)
            slices = comparison.slices() if first and case.precision != "fp64" else {}
            norm = float(zm.clip_grad_norm_(model, clip))
            comparison.number(f"norm {step}", norm, expected.norm)
            optimizer.step()
            optimizer.zero_grad()
            expected.show_params(plain.model)
            comparison.parameters()
            if slices:
                comparison.stepped(optimizer, slices, min(1.0, clip / (norm + 1e-6)))
        if case.precision == "fp64":
            comparison.tell(partial(same_optimizer_states, model, optimizer, plain.model, plain.optimizer))
            if case.device == "cpu" and case.debug:  # in one case of five: it costs as much as a step
                comparison.tell(pair.same_state)
        comparison.padding()
        comparison.finish(strategy, optimizer)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Collects differences on this rank; `finish` raises on all ranks if there are any on one."""

    pair: Pair
    case: Case
    found: list[str] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return engine_of(self.pair.model)

    def params(self) -> Iterator[tuple[Any, Tensor]]:
        """This rank's parameters, each once and in the model's order, with the plain ones."""
        own = {param.full_name: param for param in self.engine.optimizer_params()}
        for name, plain in self.pair.plain.named_parameters(remove_duplicate=False):
            if name in own:
                yield own[name], plain

    def number(self, what: str, got: float, expected: float) -> None:
        tolerance = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-3, "bf16-wire": 5e-2}[self.case.precision]
        if not abs(got - expected) <= tolerance * max(1.0, abs(expected)):
            self.found.append(f"{what}: {got} instead of {expected}")

    def tell(self, compare: Callable[[], None]) -> None:
        """Notes a failed assertion: raised on one rank only, it would leave the others waiting."""
        try:
            compare()
        except AssertionError as difference:
            self.found.append(str(difference))

    def gradients(self, step: int) -> None:
        if self.case.precision == "fp64":
            self.tell(self.pair.same_grads)
        elif step == 0:
            pairs = {}
            for param, plain in self.params():
                if (param.grad is None) != (plain.grad is None):
                    self.found.append(f"gradient of {param.full_name}: {param.grad} instead of {plain.grad}")
                elif plain.grad is not None:
                    pairs[param.full_name] = param, param.grad.local, plain.grad
            (self._within_roundings if self.case.precision == "bf16-wire" else self._near)(pairs)

    def parameters(self) -> None:
        if self.case.precision == "fp64":
            self.tell(self.pair.same_params)
        elif self.case.precision == "fp32" and self.case.optimizer == "sgd":
            self._near({p.full_name: (p, p.local, plain) for p, plain in self.params() if p.requires_grad})
        # AdamW magnifies the rounding of gradients that are mathematically zero; and one ulp in a master flips a bf16
        # rounding, which changes later gradients by a bf16 ulp.

    def slices(self) -> dict[str, Tensor]:
        """Copies of this rank's slices and their gradients, in fp64."""
        copies = {}
        for param, _ in self.params():
            if param.requires_grad:
                copies[param.full_name] = param.local.detach().to("cpu", torch.float64, copy=True)
                if param.grad is not None:
                    copies[param.full_name].grad = param.grad.local.detach().to("cpu", torch.float64, copy=True)
        return copies

    def stepped(self, optimizer: Optimizers, slices: dict[str, Tensor], factor: float) -> None:
        """The step was torch's on this rank's gradients times `factor`, but for the rounding of its few operations."""
        for copied in slices.values():
            copied.grad = None if copied.grad is None else copied.grad * factor
        sizes = {name: copied.abs() for name, copied in slices.items()}
        plainly = self.case.make_optimizer(slices.values())
        plainly.step()
        for param, _ in self.params():
            if param.full_name not in slices:
                continue
            copied, got = slices[param.full_name], {"parameter": param.local} | optimizer.tensors(param)
            expected = {"parameter": copied} | plainly.tensors(copied)
            if got.keys() != expected.keys():
                self.found.append(f"states of {param.full_name}: {sorted(got)} instead of {sorted(expected)}")
                continue
            for key, value in expected.items():
                size = value.abs() + (sizes[param.full_name] if key == "parameter" else 0)
                error = (got[key].detach().cpu().double() - value).abs()
                if not bool((error <= 16 * torch.finfo(torch.float32).eps * size + 1e-37).all()):
                    self.found.append(f"{key} of {param.full_name} after the first step: not that of its gradient")

    def padding(self) -> None:
        """Zeros in every shard: other values would leak into the next gather or reduction."""
        self.engine.at_rest()  # results that nobody has waited for may still be written
        for unit in self.engine.units:
            for buffer in unit.buffers:
                held = {"params": (buffer.params, buffer.param_range)}
                if buffer.master is not None and buffer.grads is not None:
                    # beside `reduced` are the sent values
                    held |= {
                        "master": (buffer.master, buffer.state_range),
                        "grads": (buffer.shown, buffer.state_range),
                    }
                for kind, (tensor, where) in held.items():
                    rest = tensor[max(0, buffer.spec.numel - where.start) :]
                    if rest.any() or rest.isnan().any():
                        self.found.append(f"padding of {kind} of unit {unit.name!r}: {rest.tolist()}")

    def finish(self, strategy: str, optimizer: Optimizers) -> None:
        """Compares replicas, every rank's slice by its bits, and raises on all ranks if any rank has found anything."""
        digests = {}
        for param in self.engine.optimizer_params():
            where = (param.full_name, param.elements.start, param.local.numel())
            held = {"value": param.local} | optimizer.tensors(param)
            digests |= {(key, *where): _digest(value) for key, value in held.items()}
        everyone: list[Any] = [None] * self.case.world
        dist.all_gather_object(everyone, (self.found, digests))
        lines = [f"rank {rank}: {line}" for rank, (found, _) in enumerate(everyone) for line in found]
        first: dict[Any, str] = {}
        for rank, (_, held_there) in enumerate(everyone):
            for key, digest in held_there.items():
                if first.setdefault(key, digest) != digest:
                    lines.append(f"rank {rank}: its replica of {key} is not that of the ranks before it")
        if lines:
            more = f"\n... and {len(lines) - 12} more" if len(lines) > 12 else ""
            raise Unequal(f"{strategy}, {self.case}\n" + "\n".join(lines[:12]) + more)

    def _near(self, pairs: dict[str, tuple[Any, Tensor, Tensor]]) -> None:
        """A tensor's error, relative to its norm."""
        squares = torch.stack(
            [
                (got.detach() - local_part(param, whole).to(got.device)).double().square().sum().to(self.case.device)
                for param, got, whole in pairs.values()
            ]
        )
        dist.all_reduce(squares)  # every element once for each of its replicas
        layout = self.engine.schedule.layout
        errors = (squares / layout.degree(layout.replica_axes)).sqrt().tolist()
        for (name, (_, _, whole)), error in zip(pairs.items(), errors, strict=True):
            norm = float(torch.linalg.vector_norm(whole.detach().double()))
            if not error <= self.case.bound * norm:
                self.found.append(f"{name}: off by {error / norm:.3g} of its norm")

    def _within_roundings(self, pairs: dict[str, tuple[Any, Tensor, Tensor]]) -> None:
        """Each wire rounds partial sums to bf16, twice on each axis and once more: half an ulp, 2^-8, of at most the
        sum of the terms' magnitudes."""
        terms = dict(zip(self.pair.plain.parameters(), self.pair.terms or (), strict=True))
        named = dict(self.pair.plain.named_parameters(remove_duplicate=False))
        roundings = 2 * len(self.engine.schedule.layout.axes) + 1
        for name, (param, got, whole) in pairs.items():
            allowed = local_part(param, terms[named[name]]) * roundings * 2**-8 + 1e-12
            if not bool(((got.cpu() - local_part(param, whole).cpu()).abs() <= allowed.cpu()).all()):
                self.found.append(f"first gradient of {name}: off by more than its roundings")


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
