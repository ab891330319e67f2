"""Which parameters a unit may hold, and which of them a step uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.parity import (
    DEFERRED,
    ONE_AXIS,
    Block,
    Net,
    Pair,
    Part,
    Unit,
    check,
    mean_square,
    mesh_of,
    net,
    next_token_loss,
    sgd,
    sharded_params,
    tokens,
    vectors,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import ModelError
from zeromesh.schedule.program import PointKind

# ---- frozen


def freeze_all_but(*keep: str) -> Any:
    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(any(part in name for part in keep))

    return freeze


@on_ranks(2)
def test_frozen_parameters():
    for base, keep, strategies in (
        (net(), ("down", "norm"), ONE_AXIS),
        (net(), ("blocks.1",), ("node=3d",)),
        (net(), ("head",), ("node=3",)),
        (net(), ("embed",), ("node=0",)),
        (with_lora(), (".a.", ".b."), ("node=3d", "node=3k")),
    ):
        for pair in check(base, *strategies, prepare=freeze_all_but(*keep)):
            frozen = [p for p in pair.model.parameters() if not p.requires_grad]
            assert frozen and all(p.grad is None for p in frozen)
            buffers = [b for unit in engine_of(pair.model).units for b in unit.buffers if not b.spec.trainable]
            assert all(b.master is None and b.grads is None and b.waiting is None for b in buffers)


def lora(base: nn.Linear) -> nn.Module:
    """A frozen linear layer and a trainable update of low rank."""
    a, b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
    return Part(lambda self, x: self.base(x) + self.b(self.a(x)), base=base.requires_grad_(False), a=a, b=b).double()


def with_lora(num_blocks: int = 3) -> Net:
    model = net(num_blocks=num_blocks)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = lora(block.up), lora(block.down)  # type: ignore[assignment]
    return model


@on_ranks(2)
def test_units_with_frozen_parameters_are_reduced_as_the_backward_passes_them():
    """Joined ones too."""
    for strategy in ("node=3", "node=0"):
        model = zm.shard(with_lora(num_blocks=6), mesh_of(2), strategy, bucket_bytes=2500)
        engine, ended = engine_of(model), list[int]()
        for _ in range(2):
            next_token_loss(model, tokens(0, 0, dist.get_rank())).backward()
            zm.zero_grad(model)
            engine.interpreter.watched(
                lambda point, unit, ended=ended: ended.append(unit) if point is PointKind.POST_BACKWARD else None
            )
        trainable = [index for index, unit in enumerate(engine.schedule.units) if unit.trainable]
        assert len(trainable) > 2 and sorted(unit for unit in ended if unit in trainable) == trainable


@on_ranks(2)
def test_changing_what_is_frozen_after_sharding_is_refused():
    model = net()
    model.embed.requires_grad_(False)
    zm.shard(model, mesh_of(2), "node=3")
    with pytest.raises(ModelError, match=r"embed\.weight was frozen when zm\.shard.*before zm\.shard"):
        model.embed.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"embed\.weight was frozen"):
        model.embed.weight.requires_grad = True
    with pytest.raises(ModelError, match=r"head\.weight was trainable"):
        model.head.requires_grad_(False)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(True)


@pytest.mark.parametrize("strategy", ["node=3", "node=1", "host=3,node=1"])
@pytest.mark.parametrize("trained", [True, False])
@on_ranks(2)
def test_changing_what_is_frozen_inside_a_forward_is_refused(strategy, trained):
    """It would stay, and nobody could change it from outside, where modules show slices."""

    def compute(self, x):
        if self.now is not None:
            self.weight.requires_grad = self.now
        return x * self.weight

    weights = [nn.Parameter(torch.ones(4), requires_grad=trained) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 4), *(Part(compute, weight=weight, now=None) for weight in weights))
    zm.shard(model, mesh_of(2), strategy)
    model[2].now = not trained
    with pytest.raises(ModelError, match=rf"2\.weight was {'trainable' if trained else 'frozen'} when zm\.shard"):
        model(torch.ones(2, 4))
    model[2].now = None
    model(torch.ones(2, 4)).sum().backward()
    assert (model[2].weight.grad is not None) is trained


# ---- tied


class Tied(Net):
    """Ties across units (embedding and head, a weight of the first and last block) and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].other_norm = self.blocks[1].norm


@on_ranks(2)
def test_tied_weights():
    torch.manual_seed(0)
    for pair in check(Tied().double(), *ONE_AXIS):
        params = sharded_params(pair.model)
        assert params["head.weight"] is params["embed.weight"]
        assert pair.model.head.weight is pair.model.embed.weight
        assert len(list(pair.model.parameters())) == len(list(pair.plain.parameters()))
        # The root's, or of the unit that takes over its parameters; one place for both names.
        infos = [place.info for unit in engine_of(pair.model).units for b in unit.buffers for place in b.places]
        assert [info.names for info in infos if "embed.weight" in info.names] == [("embed.weight", "head.weight")]
        assert len(infos) == len({name for info in infos for name in info.names[:1]})


# ---- dtypes and sizes


def mixed() -> nn.Module:
    """fp64 and fp32 parameters in one unit, frozen ones of both dtypes among them."""

    def compute(self, x):
        narrow = self.narrow(self.wide(x).float()) * self.scale
        return torch.tanh(narrow.double() + self.shift) + x

    linear = {"wide": nn.Linear(6, 6).double(), "narrow": nn.Linear(6, 6)}
    frozen = {"scale": torch.ones(6), "shift": torch.zeros(6).double()}
    return Part(compute, **linear, **{name: nn.Parameter(value, requires_grad=False) for name, value in frozen.items()})


@on_ranks(2)
def test_dtypes_mixed_in_a_unit():
    torch.manual_seed(0)
    base = nn.Sequential(mixed(), mixed(), mixed())
    arguments = {"loss_of": mean_square, "data_of": vectors(6), "bound": 2e-6}
    for pair in check(base, *ONE_AXIS, make_optimizer=sgd, **arguments):
        assert {len(unit.buffers) for unit in engine_of(pair.model).units if unit.buffers} == {4}
        found, dtypes = (dict(model.named_parameters()) for model in (pair.model, base))
        assert {name: p.dtype for name, p in found.items()} == {name: p.dtype for name, p in dtypes.items()}


def sizes() -> nn.Module:
    """Parameters of 0, 1 and 3 elements, a 0-d one, and one whose strides are not contiguous."""

    def compute(self, x):
        return torch.tanh(x @ self.turned * self.three * self.one + self.none.sum()) @ self.turned.t() * self.scalar

    values = {"none": torch.empty(0, 4), "scalar": torch.tensor(0.5), "one": torch.full((1, 1), 0.5)}
    values |= {"three": torch.ones(3), "turned": torch.randn(3, 5).t()}
    return Unit(compute, **{name: nn.Parameter(value) for name, value in values.items()})


@on_ranks(4)
def test_parameters_smaller_than_the_world():
    torch.manual_seed(0)
    hollow = Unit(lambda self, x: x + self.none.sum(), none=nn.Parameter(torch.empty(0, 4)))  # nothing is gathered
    base, units = nn.Sequential(sizes(), nn.Linear(5, 5), hollow, sizes()).double(), ["Linear", "Unit"]
    strategies = ("node=3,cluster=3", "node=2,cluster=1", DEFERRED)
    check(base, *strategies, options={"units": units}, loss_of=mean_square, data_of=vectors(5))


@on_ranks(2)
def test_dtypes_that_cannot_train():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"phase has dtype torch\.complex64.*fp64, fp32, bf16 or fp16.*requires_grad"):
        zm.shard(model, mesh_of(2), "node=3")
    model.phase = None
    codes = torch.arange(4, dtype=torch.int8) + dist.get_rank()
    model.codes = nn.Parameter(codes, requires_grad=False)
    zm.shard(model, mesh_of(2), "node=3")
    state = zm.full_state_dict(model)
    assert dist.get_rank() or state["codes"].tolist() == [0, 1, 2, 3]  # the first rank's, like every value


# ---- unused


def gated() -> nn.Module:
    """Blocks of which a batch uses those it names, in that order."""

    def compute(self, batch):
        tokens, path = batch
        x = self.embed(tokens)
        for index in path:
            x = self.blocks[index](x)
        return self.head(x + self.extra(x) if len(path) % 2 else x)

    torch.manual_seed(0)
    blocks, embed = nn.ModuleList(Block(5) for _ in range(4)), nn.Embedding(11, 5)
    return Part(compute, embed=embed, blocks=blocks, extra=nn.Linear(5, 5), head=nn.Linear(5, 11)).double()


def gated_loss(model: nn.Module, batch: tuple[Tensor, list[int]]) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, -2), batch[0].flatten().roll(1))


def on_paths(paths: Any) -> Any:
    """Data whose path depends on (step, micro-batch, rank)."""
    return lambda step, micro, rank: (tokens(step, micro, rank), paths(step, micro, rank))


PATHS: dict[str, Any] = {
    "always the same part": lambda step, micro, rank: [0, 2],
    "more each step": lambda step, micro, rank: list(range(1 + step)),
    "less each step": lambda step, micro, rank: list(range(4 - step)),
    "other ones each micro-batch": lambda step, micro, rank: [[0, 1], [3, 2]][(step + micro) % 2],
    "called twice": lambda step, micro, rank: [0, 1, 0, 2, 1, 3],
    "called three times in a row": lambda step, micro, rank: [1, 1, 1, 2],
    "backwards": lambda step, micro, rank: [3, 2, 1, 0],
    "another order each step": lambda step, micro, rank: [[0, 1, 2, 3], [2, 0, 3, 1], [3, 1]][step],
    "none at all": lambda step, micro, rank: [] if step else [0],
}


@pytest.mark.parametrize("turn", range(2))
@on_ranks(2)
def test_units_unused_repeated_and_out_of_order(turn):
    for at, (name, paths) in enumerate([*PATHS.items()][turn::2]):
        steps = 3 if name == "another order each step" else 2
        check(gated(), ONE_AXIS[(at + turn) % 4], steps=steps, loss_of=gated_loss, data_of=on_paths(paths))


DIVERGENT: dict[str, Any] = {
    "a part of the ranks": lambda step, micro, rank: [0, 1] if rank < 2 else [0, 1, 2],
    "one rank in one micro-batch": lambda step, micro, rank: [1, 3] if (rank, micro) == (2, 0) else [0, 1],
    "each its own": lambda step, micro, rank: [rank],
    "another order": lambda step, micro, rank: [0, 1, 2, 3] if rank % 2 else [3, 2, 1, 0],
    "one rank none": lambda step, micro, rank: [0, 1, 0] if rank else [],
}


@on_ranks(4)
def test_ranks_may_differ_where_parameters_are_whole():
    whole = ("node=0,cluster=1", "node=1,cluster=2", "node=2,cluster=2", "node=1,cluster=0")
    for at, paths in enumerate(DIVERGENT.values()):
        check(gated(), whole[at % 4], loss_of=gated_loss, data_of=on_paths(paths))


@on_ranks(2)
def test_momentum_of_unused_parameters():
    """Plain torch moves a parameter whose gradient was zeroed, and leaves one alone whose gradient is None."""
    for set_to_none, strategy in enumerate(ONE_AXIS[:2]):
        check(
            gated(),
            strategy,
            steps=3,
            loss_of=gated_loss,
            data_of=on_paths(PATHS["less each step"]),
            make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
            set_to_none=bool(set_to_none),
        )


# ---- nested


@on_ranks(2)
def test_units_inside_units_and_with_slots_of_their_own():
    for pair in check(net(), "node=3", "node=3d", options={"units": [Block, "Linear"], "resident": ["blocks.1"]}):
        names = [unit.name for unit in engine_of(pair.model).units]
        assert {"blocks.0", "blocks.0.up", "blocks.0.down", "head"} <= set(names) and "embed" not in names


class Caller(Block):
    def forward(self, x: Tensor, other: nn.Module | None = None) -> Tensor:
        x = super().forward(x)
        return x if other is None else self.down(self.up(other(x)))


@on_ranks(2)
def test_a_unit_called_from_another_that_does_not_enclose_it():
    """Though it is registered beside it."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Caller(5) for _ in range(3))
    base = Part(lambda self, x: self.blocks[0](x, self.blocks[2]), blocks=blocks).double()
    arguments: dict[str, Any] = {"loss_of": mean_square, "data_of": vectors(5)}
    check(base, "node=0", **arguments)
    check(base, "node=3", options={"resident": ["blocks.0"]}, **arguments)
    pair = Pair(base=base, strategy="node=3", **arguments)
    with pytest.raises(ModelError, match=r"'blocks\.0' and 'blocks\.2' are in use at once.*resident"):
        pair.backward(0)
