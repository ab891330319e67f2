"""A small model with everything that is awkward to shard, plain training of it in one process, and their comparison.

`check(strategy, case)` runs on every rank of a pool: it trains the model sharded, trains it plainly on the same global
batch, and raises `Unequal` on all ranks alike if parameters, gradients, optimizer states, norms, padding or replicas
differ by more than the case allows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zeromesh as zm
from tests.dist.parity import local_part, mesh_of, shown
from tests.dist.pool import told_by_first
from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine

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


class Unequal(AssertionError):
    """Sharded and plain training differ."""


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
        device: where both trainings compute; expected values come from the host.
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
    def bound(self) -> float:
        """On a tensor's error, relative to its norm: each token of the global batch adds a term to each element."""
        return 8 * torch.finfo(torch.float32).eps * math.sqrt(self.world * self.micro_batches * BATCH * SEQUENCE)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizers:
    """One or two optimizers that step together."""

    members: list[torch.optim.Optimizer]

    def step(self) -> None:
        for optimizer in self.members:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.members:
            optimizer.zero_grad()

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        states = [optimizer.state.get(param, {}) for optimizer in self.members]
        return {key: value for state in states for key, value in state.items() if isinstance(value, Tensor)}


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
    """One step of plain training: gradients before the clip, the norm, and parameters after the step."""

    grads: dict[str, Tensor | None]
    norm: float
    params: dict[str, Tensor]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain training, step by step.

    Args:
        start: parameters before the first step.
        terms: for each gradient of the first step, the sum of the magnitudes of its terms.
        states: of the optimizer at the end, by parameter and name.
        state: the model's state dict at the end.
    """

    start: dict[str, Tensor]
    steps: tuple[Step, ...]
    terms: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    state: dict[str, Tensor]


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
    start = on_host(masters)
    steps, terms = [], {name: torch.zeros_like(value) for name, value in masters.items()}
    for step in range(case.steps):
        _accumulate(model, masters, case, step, terms if step == 0 else None)
        grads = {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in masters.items()}
        loss = evaluate(model, case, 0)
        norm = nn.utils.clip_grad_norm_(masters.values(), case.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters.get(name, param))
        steps.append(Step(grads=grads, norm=float(norm), params=on_host(masters), loss=loss))
    owners = {param: masters.get(name, param) for name, param in model.named_parameters()}
    return Plain(
        start=start,
        steps=tuple(steps),
        terms=on_host(terms),
        states={name: on_host(optimizer.tensors(p)) for name, p in masters.items()},
        state=on_host({name: owners[p] for name, p in model.named_parameters(remove_duplicate=False)}),
    )


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, to keep or to send to other ranks."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


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


@contextmanager
def sharded(strategy: str, case: Case, mesh: DeviceMesh, **options: Any) -> Iterator[tuple[Net, Optimizers]]:
    """The model of `case`, sharded, with its optimizer."""
    model = zm.shard(case.build(), mesh, strategy, **{**case.shard_options(), **options})
    yield model, case.make_optimizer(p for p in model.parameters() if p.requires_grad)
    engine_of(model).at_rest()


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
    with sharded(strategy, case, mesh_of(*shape), **options) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            having = [param for param in model.parameters() if param.grad is not None]
            bits += [(f"gradient {step} of {p.full_name}", _digest(p.grad.local)) for p in having]
            bits.append((f"norm {step}", str(float(zm.clip_grad_norm_(model, 0.5)))))
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).at_rest(follow=True)
        for param in (param for param in model.parameters() if param.requires_grad):
            where = f"of {param.full_name} from {param.flat_start}"
            held = {"parameter": param.local} | optimizer.tensors(param)
            bits += [(f"{key} {where}", _digest(value)) for key, value in held.items()]
    return bits


def require_same(what: str, ours: Bits, theirs: Bits) -> None:
    differ = [where for (where, one), (_, other) in zip(ours, theirs, strict=True) if one != other]
    assert ours and not differ, f"{what}: {len(differ)} differ: {differ[:8]}"


def check(strategy: str, case: Case, *shape: int, before_step: Callable[[], None] = lambda: None) -> None:
    """Trains with `strategy` on a mesh of `shape` (innermost first) and compares: see the module.

    Args:
        strategy: as for `zm.shard`.
        case: the training.
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
        if case.precision == "fp64":
            comparison.states(optimizer, expected.states)
            if case.device == "cpu" and case.debug:  # in one case of five: it costs as much as a step
                comparison.whole(zm.full_state_dict(model), expected.state)
        comparison.padding()
        comparison.finish(strategy, optimizer)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Collects differences on this rank; `finish` raises on all ranks if there are any on one."""

    engine: Engine
    case: Case
    start: dict[str, Tensor]
    terms: dict[str, Tensor]
    found: list[str] = field(default_factory=list)

    def number(self, what: str, got: float, expected: float) -> None:
        tolerance = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-3, "bf16-wire": 5e-2}[self.case.precision]
        if not abs(got - expected) <= tolerance * max(1.0, abs(expected)):
            self.found.append(f"{what}: {got} instead of {expected}")

    def gradients(self, step: int, record: Step) -> None:
        pairs = {}
        for param in self.engine.optimizer_params():
            expected = record.grads.get(param.full_name)
            if (param.grad is None) != (expected is None):
                self.found.append(f"gradient {step} of {param.full_name}: {param.grad} instead of {expected}")
            elif expected is not None:
                expected = _slice(param, expected).to(param.grads_on)
                pairs[param.full_name] = param.grad.local, expected  # type: ignore[union-attr]
        if self.case.precision == "bf16-wire" and step == 0:
            for param in self._trained():
                if param.full_name in pairs:
                    got, wanted = pairs[param.full_name]
                    if not bool(((got - wanted).abs() <= self._allowed(param, record).to(got.device)).all()):
                        self.found.append(f"first gradient of {param.full_name}: off by more than its roundings")
        elif self.case.precision == "fp64" or step == 0:
            self._compare(f"gradient {step}", pairs, record.grads)

    def parameters(self, step: int, record: Step) -> None:
        if self.case.precision.startswith("bf16"):
            return  # one ulp in a master flips a bf16 rounding, which changes later gradients by a bf16 ulp
        if self.case.precision == "fp32" and self.case.optimizer != "sgd":
            return  # AdamW magnifies the rounding of gradients that are mathematically zero
        pairs = {p.full_name: (p.local, _slice(p, record.params[p.full_name])) for p in self._trained()}
        self._compare(f"parameter {step}", pairs, record.params)

    def stepped(self, optimizer: Optimizers, record: Step, norm: float) -> None:
        """Parameters and moments after the first step are torch's for gradients within their bound.

        Each element of them rises or falls with its own gradient or with its magnitude. So they lie between the
        optimizer's results, in fp64, for the ends of the gradient's interval and the point in it that is nearest to
        zero, give or take the rounding of the optimizer's few operations.

        Args:
            optimizer: after its first step.
            record: of the first step.
            norm: as the engine has told it, by which it has clipped.
        """
        if self.case.precision == "fp64":
            return  # compared outright
        low, high = (
            {
                p.full_name: _slice(p, record.grads[p.full_name]).double() + sign * self._allowed(p, record)
                for p in self._trained()
                if record.grads[p.full_name] is not None
            }
            for sign in (-1, 1)
        )
        near = {name: torch.zeros_like(grad).clamp(grad, high[name]) for name, grad in low.items()}
        ends = [self._step_plainly(grads, norm) for grads in (low, high, near)]
        for param in self._trained():
            name = param.full_name
            got = {"parameter": param.local} | optimizer.tensors(param)
            if any(end[name].keys() != got.keys() for end in ends):
                self.found.append(f"states of {name}: {sorted(got)} instead of {sorted(ends[0][name])}")
                continue
            for key, value in got.items():
                found = torch.stack([end[name][key].double() for end in ends])
                size = found.abs().amax(0)
                if key == "parameter":
                    size = size + _slice(param, self.start[name]).abs()
                slack = 8 * torch.finfo(torch.float32).eps * size
                if not bool(((value >= found.amin(0) - slack) & (value <= found.amax(0) + slack)).all()):
                    self.found.append(f"{key} of {name} after the first step: not from a gradient within the bound")

    def _step_plainly(self, grads: dict[str, Tensor], norm: float) -> dict[str, dict[str, Tensor]]:
        """Parameters and states after one step from the start, of this rank's slices, given their gradients."""
        slices = {param.full_name: _slice(param, self.start[param.full_name]) for param in self._trained()}
        values = {name: slices[name].to(torch.float64, copy=True) for name in self.start}  # in the optimizer's order
        for name, grad in grads.items():
            values[name].grad = grad * min(1.0, (self.case.clip or math.inf) / (norm + 1e-6))
        optimizer = self.case.make_optimizer(values.values())
        optimizer.step()
        return {name: {"parameter": value} | optimizer.tensors(value) for name, value in values.items()}

    def states(self, optimizer: Optimizers, expected: dict[str, dict[str, Tensor]]) -> None:
        for param in self._trained():
            got, wholes = optimizer.tensors(param), expected[param.full_name]
            if got.keys() != wholes.keys():
                self.found.append(f"states of {param.full_name}: {sorted(got)} instead of {sorted(wholes)}")
                continue
            parts = {key: whole if key == "step" else _slice(param, whole) for key, whole in wholes.items()}
            self._elementwise(f"state of {param.full_name}", {key: (got[key], part) for key, part in parts.items()})

    def whole(self, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        """The full state dict, on the first rank, has the plain model's names, shapes and values."""
        shapes = {name: value.shape for name, value in expected.items() if dist.get_rank() == 0}
        if {name: value.shape for name, value in got.items()} != shapes:
            self.found.append(f"state dict: {sorted(got)} instead of {sorted(shapes)}")
        else:
            self._elementwise("state dict", {name: (value, expected[name]) for name, value in got.items()})

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
            where = (param.full_name, param.flat_start, param.local.numel())
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

    def _compare(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]], whole: Any) -> None:
        if self.case.precision == "fp64":
            self._elementwise(what, pairs)
            return
        device = self.case.device
        squares = torch.stack([(got.double() - e.double()).square().sum().to(device) for got, e in pairs.values()])
        dist.all_reduce(squares)  # every element once for each of its replicas
        layout = self.engine.schedule.layout
        errors = (squares / layout.degree(layout.replica_axes)).sqrt().tolist()
        for name, error in zip(pairs, errors, strict=True):
            norm = float(torch.linalg.vector_norm(whole[name].double()))
            if not error <= self.case.bound * norm:
                self.found.append(f"{what} of {name}: off by {error / norm:.3g} of its norm")

    def _elementwise(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (got, expected) in pairs.items():
            error = float((got - expected).abs().max()) if got.numel() else 0.0
            if not error <= 1e-10:
                self.found.append(f"{what}, {name}: off by {error}")

    def _allowed(self, param: Any, record: Step) -> Tensor:
        """How far each element of this rank's slice of a first gradient may be off.

        Each wire rounds partial sums to bf16, twice on each axis and once more: half an ulp, 2^-8, of at most the sum
        of the terms' magnitudes. Without such wires: no element is further off than the whole tensor may be.
        """
        grad = record.grads[param.full_name]
        assert grad is not None
        if self.case.precision == "bf16-wire":
            roundings = 2 * len(self.engine.schedule.layout.axes) + 1
            return _slice(param, self.terms[param.full_name]) * roundings * 2**-8 + 1e-12
        return torch.linalg.vector_norm(grad.double()) * self.case.bound

    def _trained(self) -> list[Any]:
        return [param for param in self.engine.optimizer_params() if param.requires_grad]


def _slice(param: Any, whole: Tensor | None) -> Tensor:
    assert whole is not None
    return local_part(param, whole).to(param.local.device)


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
