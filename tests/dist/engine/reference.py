"""A small model with everything that is awkward to shard, plain training of it in one process, and their comparison.

`check(strategy, case)` runs on every rank of a pool: it trains the model sharded, trains it plainly on the same global
batch, and raises `Unequal` on all ranks alike if parameters, gradients, optimizer states, norms, padding or replicas
differ by more than the case allows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.engine.comparison import Comparison, Unequal
from tests.dist.pool import kept, told_by_first
from zeromesh.engine.api import engine_of

VOCABULARY, WIDTH, BATCH, SEQUENCE = 11, 7, 2, 5
TIMEOUT_S = 240.0
"""For whole batches of strategies; under the 60 s of a test."""


class Block(nn.Module):
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


class Net(nn.Module):
    """Blocks of unequal sizes, one wholly frozen, a weight tied across two of them, and units of one element."""

    def __init__(self, norm_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(hidden, norm_dtype) for hidden in (9, 5, 9))
        self.scales = nn.ModuleList(Scale() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.layers[1].requires_grad_(False)
        self.layers[2].down.weight = self.layers[0].down.weight  # type: ignore[union-attr]  # they are Blocks

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for module in (*self.layers, *self.scales):
            h = module(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to train and how exactly both trainings must agree.

    Args:
        optimizer: `sgd` (with momentum), `adamw`, or `both`: each for every second parameter.
        precision: `fp64`: 1e-10 on every element. `fp32`: 8*eps*sqrt(summands) of fp64, normwise; with SGD alone, which
            then has no momentum, after every step. `bf16`: bf16 compute, fp32 on the wires, against the same on one
            process. `bf16-wire`: bf16 on all wires. Of all but fp64, what the first step leaves: `Comparison.stepped`.
        world: number of ranks.
        weighted: unequal numbers of tokens on the ranks, one of them none.
        evaluate: a forward without a backward between each last backward and the optimizer's step.
        every_last: each micro-batch's gradients are reduced over all axes, and added, as without `zm.accumulate`.
        clip: norm to clip to; None does not.
        bucket_bytes: as for `zm.shard`.
        debug: as for `zm.shard`: slots are looked at before and after every use.
        device: where both trainings compute; what is compared with comes from the host.
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
    def summands(self) -> int:
        """Tokens in the global batch: each adds one term to each element of a gradient."""
        return self.world * self.micro_batches * BATCH * SEQUENCE

    def build(self) -> Net:
        """The model before sharding, the same on every rank."""
        torch.manual_seed(0)
        net = Net()
        for param in net.parameters():
            torch.nn.init.normal_(param, mean=0.3 if param.dim() < 2 else 0.0, std=0.4)
        if self.precision == "fp64":
            net.double()
            for block in net.layers:
                block.norm.float()  # a second dtype in each unit
        return net

    def shard_options(self) -> dict[str, Any]:
        return {"bucket_bytes": self.bucket_bytes} | ({"debug": True} if self.debug else {}) | self._dtypes()

    def _dtypes(self) -> dict[str, Any]:
        if self.precision == "fp64":
            return {"reduce_dtype": torch.float64, "grad_dtype": torch.float64, "master_dtype": torch.float64}
        if self.precision == "fp32":
            return {}
        return {"param_dtype": torch.bfloat16} | (
            {} if self.precision == "bf16-wire" else {"reduce_dtype": torch.float32}
        )

    def make_optimizer(self, params: Iterable[Tensor]) -> Optimizers:
        params = list(params)
        even, odd = (params[::2], params[1::2]) if self.optimizer == "both" else (params, params)
        made: list[torch.optim.Optimizer] = []
        if self.optimizer != "sgd":
            made.append(torch.optim.AdamW(even, lr=1e-2))
        if self.optimizer != "adamw":
            plain_sgd = self.precision == "fp32" and self.optimizer == "sgd"
            made.append(torch.optim.SGD(odd, lr=0.05, momentum=0.0 if plain_sgd else 0.9))
        return Optimizers(made)


class Optimizers:
    """One or two optimizers that step together."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = members

    def step(self) -> None:
        for optimizer in self.members:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.members:
            optimizer.zero_grad()

    def state(self, param: Tensor) -> dict[str, Any]:
        return {key: value for optimizer in self.members for key, value in optimizer.state.get(param, {}).items()}

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        return {key: value for key, value in self.state(param).items() if isinstance(value, Tensor)}


def batch(case: Case, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, int]:
    """Tokens, targets (-100 where they do not count), and how many count; different for every rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(case.device)
    targets = tokens.roll(1, dims=1)
    if case.weighted:
        # From all ten tokens to none: the loss of none is NaN, and must not count.
        count = (3 * rank + 5 * micro + step) % (BATCH * SEQUENCE + 1)
        targets.view(-1)[count:] = -100
        return tokens, targets, count
    return tokens, targets, tokens.numel()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What plain training shows of one step: gradients before the clip, the norm, and what the step leaves."""

    grads: dict[str, Tensor | None]
    norm: float
    params: dict[str, Tensor]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain training, step by step.

    Args:
        start: parameters before the first step.
        terms: for each gradient of the first step, the sum of the magnitudes of what was added up.
        states: of the optimizer at the end, by parameter and name.
    """

    start: dict[str, Tensor]
    steps: tuple[Step, ...]
    terms: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


@functools.cache
def plain(case: Case) -> Plain:
    """Plain training, done by rank 0 for all."""
    return told_by_first(train_plainly, case)


def train_plainly(case: Case) -> Plain:
    """Trains in one process on every rank's batches in turn, with masters and sums in `case.wide`."""
    model = case.build().to(case.device)
    if case.precision == "fp32":
        model.double()  # the truth that fp32 is held against
    masters = {n: p.detach().to(case.wide, copy=True) for n, p in model.named_parameters() if p.requires_grad}
    if case.precision.startswith("bf16"):
        model.bfloat16()
    optimizer = case.make_optimizer(masters.values())
    start = {name: on_host(value) for name, value in masters.items()}
    steps, terms = [], {name: torch.zeros_like(value) for name, value in masters.items()}
    for step in range(case.steps):
        _accumulate(model, masters, case, step, terms if step == 0 else None)
        grads = {name: None if p.grad is None else on_host(p.grad) for name, p in masters.items()}
        loss = evaluate(model, case, 0)
        norm = nn.utils.clip_grad_norm_(masters.values(), case.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters.get(name, param))
        steps.append(Step(grads=grads, norm=float(norm), params={n: on_host(p) for n, p in masters.items()}, loss=loss))
    states = {name: {key: on_host(value) for key, value in optimizer.tensors(p).items()} for name, p in masters.items()}
    return Plain(
        start=start,
        steps=tuple(steps),
        terms={name: on_host(value) for name, value in terms.items()},
        states=states,
    )


def on_host(tensor: Tensor) -> Tensor:
    """A copy, to keep or to send to other ranks."""
    return tensor.detach().to("cpu", copy=True)


def _accumulate(
    model: nn.Module, masters: dict[str, Tensor], case: Case, step: int, terms: dict[str, Tensor] | None
) -> None:
    batches = [batch(case, step, micro, rank) for micro in range(case.micro_batches) for rank in range(case.world)]
    total = sum(count for *_, count in batches)
    for tokens, targets, count in batches:
        if not count:
            continue
        model.zero_grad()
        # Divided before the backward, as the sharded training does it: fp32 parts then round alike.
        (loss_of(model, tokens, targets) / (1 if case.weighted else case.micro_batches)).backward()
        share = count / total if case.weighted else 1 / case.world
        for name, param in model.named_parameters():
            if param.grad is not None:
                master, grad = masters[name], param.grad.to(case.wide) * share
                master.grad = grad if master.grad is None else master.grad + grad
                if terms is not None:
                    terms[name] += grad.abs()


def evaluate(model: nn.Module, case: Case, rank: int) -> float:
    """The loss of a batch that nothing is trained on."""
    tokens = batch(case, 99, 0, rank)[0]
    model.eval()
    with torch.no_grad():
        loss = float(loss_of(model, tokens, tokens))
    model.train()
    return loss


Sharded = tuple[Net, Optimizers]


@contextmanager
def sharded(strategy: str, case: Case, mesh: DeviceMesh) -> Iterator[Sharded]:
    """The model of `case`, sharded, with its optimizer."""
    model = zm.shard(case.build(), mesh, strategy, **case.shard_options())
    yield model, case.make_optimizer(p for p in model.parameters() if p.requires_grad)
    engine_of(model).at_rest()


def mesh_of(*shape: int, device: str = "cpu") -> DeviceMesh:
    """A mesh with the shape given innermost first, made once: node, cluster, region, site. Ranks share devices."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    names = ("node", "cluster", "region", "site")[: len(shape)]
    return kept(init_device_mesh, device, tuple(reversed(shape)), mesh_dim_names=tuple(reversed(names)))


def backward(model: nn.Module, case: Case, step: int) -> None:
    """All micro-batches of one step on this rank."""
    before = shown(model)
    batches = [batch(case, step, micro, dist.get_rank()) for micro in range(case.micro_batches)]
    total = zm.sum_over_ranks(model, float(sum(count for _, _, count in batches))) if case.weighted else None
    for micro, (tokens, targets, count) in enumerate(batches):
        last = case.every_last or micro == case.micro_batches - 1
        with zm.accumulate(model, last=last, weight=float(count) if case.weighted else None, total=total):
            loss = loss_of(model, tokens, targets)
            (loss if case.weighted else loss / case.micro_batches).backward()
        if not last and shown(model) != before:
            raise Unequal(f"micro-batch {micro} is not the last of step {step}, but gradients are shown after it")


def shown(model: nn.Module) -> list[bool]:
    """Of which parameters an optimizer would see a gradient."""
    return [param.grad is not None for param in model.parameters()]


def check(strategy: str, case: Case, *shape: int, before_step: Callable[[], None] = lambda: None) -> None:
    """Trains with `strategy` on a mesh of `shape` (innermost first) and compares: see the module.

    Args:
        strategy: as for `zm.shard`.
        case: what to train.
        shape: of the mesh, innermost first.
        before_step: called between the comparison of gradients and the optimizer's step; for faults.
    """
    expected = plain(case)
    with sharded(strategy, case, mesh_of(*shape, device=case.device)) as (model, optimizer):
        comparison = Comparison(engine=engine_of(model), case=case, start=expected.start, terms=expected.terms)
        for step, record in enumerate(expected.steps):
            backward(model, case, step)
            comparison.gradients(step, record)
            if case.evaluate:
                comparison.number(f"loss after backward {step}", evaluate(model, case, 0), record.loss)
            norm = float(zm.clip_grad_norm_(model, case.clip or math.inf))
            comparison.number(f"norm {step}", norm, record.norm)
            before_step()
            optimizer.step()
            optimizer.zero_grad()
            comparison.parameters(step, record)
            if step == 0:
                comparison.stepped(optimizer, record, norm)
        comparison.states(optimizer, expected.states)
        comparison.padding()
        comparison.finish(strategy, optimizer)
