"""Low-precision compute over fp32 masters, and gradient scaling whose skips all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.parity import (
    STRATEGIES,
    Pair,
    close,
    local_part,
    mesh_of,
    net,
    next_token_loss,
    sharded_params,
    share_grads,
    tokens,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of


def scaled_step(scaler: torch.amp.GradScaler, optimizer: optim.Optimizer, clip: Any) -> float:
    """The norm of gradients, unscaled, where they are clipped."""
    norm = 0.0
    if clip is not None:
        scaler.unscale_(optimizer)
        norm = clip().item()
    scaler.step(optimizer)
    scaler.update()
    return norm


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "foreach AdamW": lambda params: optim.AdamW(params, lr=0.01, foreach=True),
    "fused AdamW": lambda params: optim.AdamW(params, lr=0.01, fused=True),  # takes scale and found_inf itself
}


@pytest.mark.parametrize(("kind", "clip", "strategy"), [*zip(OPTIMIZERS, (True, False, True), STRATEGIES, strict=True)])
@on_ranks(4)
def test_all_ranks_skip_a_step_together(kind, clip, strategy):
    skip_together(kind, clip, [strategy])


def skip_together(kind: str, clip: bool, strategies: Sequence[str], device: str = "cpu") -> None:
    """An overflow in one element, which lies on one rank where everything is sharded."""
    world = dist.get_world_size()
    for strategy in strategies:
        pair = Pair(base=net().float(), strategy=strategy, bound=3e-5, device=device)
        models = (pair.plain, pair.model)
        optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
        scalers = [torch.amp.GradScaler(of, init_scale=64.0, growth_interval=2) for of in ("cpu", device)]
        clips = [
            lambda pair=pair: nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.2),
            lambda pair=pair: zm.clip_grad_norm_(pair.model, 0.2),
        ]
        scales = []
        for step in range(4):
            for micro in range(2):
                scalers[0].scale(torch.zeros(()))  # it begins with its first loss
                for rank in range(world) if dist.get_rank() == 0 else ():
                    loss = next_token_loss(pair.plain, tokens(step, micro, rank)) / 2 / world
                    scalers[0].scale(loss).backward()
                with zm.accumulate(pair.model, last=micro == 1):
                    batch = tokens(step, micro, dist.get_rank()).to(device)
                    scalers[1].scale(next_token_loss(pair.model, batch) / 2).backward()
            share_grads(pair.plain)
            if step == 1:
                plain: Any = pair.plain.get_parameter("blocks.1.up.weight")
                plain.grad[0, 0] = torch.inf
                ours: Any = sharded_params(pair.model)["blocks.1.up.weight"]
                if ours.elements.start == 0:
                    ours.grad.local[:1] = torch.inf
            before = [p.local.clone() for p in pair.model.parameters()]
            norms = []
            for scaler, optimizer, clipped in zip(scalers, optimizers, clips, strict=True):
                norms.append(scaled_step(scaler, optimizer, clipped if clip else None))
                optimizer.zero_grad()
            assert norms[1] == pytest.approx(norms[0], rel=1e-5)
            unchanged = all(p.local.equal(b) for p, b in zip(pair.model.parameters(), before, strict=True))
            assert unchanged == (step == 1)
            pair.same_params()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            scales.append(scalers[1].get_scale())
        assert scales == [64.0, 32.0, 32.0, 64.0]


class Watch(nn.Module):
    """Notes the dtypes that a forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor, *, scale: Tensor, index: Tensor) -> Tensor:
        self.seen |= {x.dtype, scale.dtype, self.inner.weight.dtype}
        assert index.dtype == torch.int64
        return x + self.inner(x) * scale


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watch() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=torch.ones(5), index=torch.arange(3))
        return x


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [("node=3", torch.bfloat16), ("node=0", torch.float16), ("node=3d", torch.float16)],
)
@on_ranks(2)
def test_compute_dtype_master_dtype_and_the_dtypes_of_inputs(strategy, dtype):
    torch.manual_seed(0)
    base = Watched()
    plain = Watched()
    plain.load_state_dict(base.state_dict())
    model = zm.shard(base, mesh_of(2), strategy, param_dtype=dtype)
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    data = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for rank in range(2):
        (plain(data[rank]).square().mean() / 2).backward()
    model(data[dist.get_rank()]).float().square().mean().backward()
    assert all(block.seen == {dtype} for block in model.blocks)
    reduced = {b.grads.dtype for unit in engine_of(model).units for b in unit.buffers if b.grads is not None}
    assert reduced == {torch.float32}
    for name, param in sharded_params(model).items():
        expected = plain.get_parameter(name)
        # 4 roundings on the way forward and back, and one for the wire
        bound = 8 * torch.finfo(dtype).eps * max(1.0, expected.grad.abs().max().item())
        assert param.dtype == torch.float32
        close(param.grad.local, local_part(param, expected.grad), name, bound)
        close(param.local, local_part(param, expected), name, 0.0)  # masters keep digits that bf16 would round
    before = zm.full_state_dict(model)
    optimizer.step()
    after = zm.full_state_dict(model)
    assert all(after[name].dtype == torch.float32 and not after[name].equal(before[name]) for name in after)


@on_ranks(2)
def test_updates_too_small_for_the_compute_dtype_add_up():
    """Masters exist for this: 1/4096 is less than half of bf16's spacing at 1."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model.parameters():
        nn.init.ones_(param)
    zm.shard(model, mesh_of(2), "node=3", param_dtype="bf16")
    optimizer = optim.SGD(model.parameters(), lr=2**-12)
    for _ in range(32):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    values = {value for param in model.parameters() for value in param.local.tolist()}
    assert values <= {1 - 32 * 2**-12}
    with torch.no_grad():
        # 1 - 2**-7 has an exact bf16, so the compute copies are just that.
        x = torch.ones(1, 4)
        weight = 1 - 2**-7
        assert model[0](x).tolist() == [[torch.tensor(5 * weight).bfloat16().item()] * 4]


class Quantised(nn.Module):
    """A frozen weight of few bits with its scales, beneath adapters, as QLoRA has it; recomputed in the backward."""

    def __init__(self, dtype: torch.dtype, width: int = 12) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        scale = weight.abs().amax(1, keepdim=True) / 100
        self.weight = nn.Parameter((weight / scale).to(dtype), requires_grad=False)
        self.register_buffer("scale", scale)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        return torch.tanh(
            nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)) + self.up(self.down(x))
        )


CODES = {  # in fp32, whose sums some processors round apart by 1.2e-6 here
    torch.int8: ("node=3,cluster=1", {}, 4e-6),
    torch.float8_e4m3fn: ("node=3,cluster=3k", {}, 4e-6),
    torch.int32: ("node=1,cluster=1", {}, 4e-6),
    torch.uint8: ("node=3@int8/,cluster=3k@int8/", {"debug": True}, 0.1),  # of adapters in 8 bits
    torch.float8_e5m2: ("node=3,cluster=3", {"param_dtype": torch.bfloat16}, 0.05),
}


@pytest.mark.parametrize("dtype", CODES)
@on_ranks(4)
def test_frozen_weights_of_few_bits_are_sharded_in_their_dtype_saved_and_loaded(dtype, tmp_path):
    strategy, options, bound = CODES[dtype]
    torch.manual_seed(0)
    plain = nn.Sequential(*(Quantised(dtype) for _ in range(3)))
    torch.manual_seed(dist.get_rank())  # values are the first rank's
    models = [nn.Sequential(*(Quantised(dtype) for _ in range(3))) for _ in range(2)]
    model = zm.shard(models[0], mesh_of(2, 2), strategy, **options)
    other = zm.shard(models[1], mesh_of(2, 2), "node=1,cluster=3")
    ours, theirs = (optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain))
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    with zm.traffic_report(model, micro_batches=1) as traffic:
        for _ in range(3):
            model(x[dist.get_rank() :: 4]).square().mean().backward()
            plain(x).square().mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    lines = traffic.lines(steps=3)
    assert [line.sent_bytes for line in lines] == [line.predicted_bytes for line in lines] != [0, 0]
    for part, whole in zip(model, plain, strict=True):
        assert part.weight.dtype == dtype and len(part.seen) == 6
        assert all(torch.equal(seen.float(), whole.weight.float()) for seen in part.seen)
    memory = zm.memory_report(model, ours)
    assert [line.allocated_bytes for line in memory] == [line.predicted_bytes for line in memory]
    held = [b for unit in engine_of(model).units for b in unit.buffers if b.params.dtype == dtype]
    degree = {"node=1,cluster=1": 1, "node=3,cluster=1": 2}.get(strategy, 4)
    assert [b.params.nbytes * degree for b in held] == [b.padded * dtype.itemsize for b in held] != []
    zm.check_replicas(model, ours)

    for part in other:
        part.weight.local.zero_()
    zm.refresh(other)
    with zm.Checkpoints(tmp_path / "states", model, ours, keep=1) as checkpoints:
        checkpoints.save(3)
    zm.Checkpoints(tmp_path / "states", other).load(optimizers=False)
    zm.save_safetensors(model, tmp_path / "files", dtype=torch.bfloat16)
    with torch.no_grad():
        for trained in (model, other):
            torch.testing.assert_close(trained(x).float(), plain(x), rtol=0, atol=bound)
    stored = load_file(tmp_path / "files" / "model.safetensors")
    assert stored["2.weight"].dtype == dtype and stored["2.up.weight"].dtype == torch.bfloat16
    state = zm.full_state_dict(model)
    assert dist.get_rank() or state["2.weight"].dtype == dtype
    for found in (stored, state) if dist.get_rank() == 0 else (stored,):
        assert torch.equal(found["2.weight"].float(), plain[2].weight.float())
    zm.load_full_state_dict(other, state)
    zm.load_safetensors(other, tmp_path / "files")
