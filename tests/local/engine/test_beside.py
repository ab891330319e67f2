"""The step on the host, beside the next forward: whoever looks comes after it, and numbers are those of plain torch."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeromesh as zm
from zeromesh.comm.host import HostLink
from zeromesh.comm.lane import Lane
from zeromesh.engine import beside
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import UNSETTLED, ShardedParameter, settle
from zeromesh.errors import CommunicationError, ModelError, OptimizerError
from zeromesh.simulator import memory

HOST = "host=1,node=0,cluster=0"
STREAMED = f"{HOST};step=device"
DEVICE = "node=0,cluster=0"


def make(strategy: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))).double()
    return model if strategy is None else zm.shard(model, None, strategy)


def backward(model: nn.Module, seed: int) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    model(inputs).square().sum().backward()


def stepped(optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
    """One step, which makes the states, and gradients for the next."""
    for seed in 1, 2:
        for model in models:
            backward(model, seed)
        if seed == 1:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def held(model: nn.Module) -> Iterator[threading.Event]:
    """The model's steps wait for the event."""
    gate, lanes = threading.Event(), engine_of(model).backend.lanes
    for name in (name for name in lanes if name.startswith("step")):
        lanes[name].submit(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


def first(model: nn.Module) -> Any:
    return next(iter(model.parameters()))


LOOKS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Tensor]] = {
    "a sum": lambda model, optimizer: first(model).sum(),
    "the slice": lambda model, optimizer: getattr(first(model), "local", first(model)).sum(),
    "a copy": lambda model, optimizer: first(model).clone().sum(),
    "its data": lambda model, optimizer: first(model).data.sum(),
    "the gradient": lambda model, optimizer: first(model).grad.sum(),
    "a state": lambda model, optimizer: optimizer.state[first(model)]["exp_avg"].sum(),
    "all states": lambda model, optimizer: sum(state["exp_avg"].sum() for state in optimizer.state.values()),
    "the optimizer's state dict": lambda model, optimizer: optimizer.state_dict()["state"][0]["exp_avg"].sum(),
    "the model's state dict": lambda model, optimizer: model.state_dict()["0.0.weight"].sum(),
    "another forward": lambda model, optimizer: model(torch.ones(1, 5, dtype=torch.double)).sum(),
}


@pytest.mark.parametrize("host", [HOST, STREAMED])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_whoever_looks_comes_after_the_step(look, host):
    found = []
    for strategy in None, host:
        model = make(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        stepped(optimizer, model)
        if strategy is None:
            optimizer.step()
        else:
            kept, before = first(model).local, first(model).local.clone()
            with held(model) as gate:
                optimizer.step()
                rates.step()  # a step goes on with the rate that it was given
                assert torch.equal(kept, before)  # it has not begun
                threading.Timer(0.05, gate.set).start()
                found.append(look(model, optimizer).item())
            continue
        found.append(look(model, optimizer).item())
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("host", [HOST, STREAMED])
@pytest.mark.parametrize("change", ["clear", "__delitem__", "__setitem__", "update"])
def test_states_that_are_dropped_meanwhile_are_stepped_on(change, host):
    model, plain = make(host), make(None)
    for each in model, plain:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        stepped(optimizer, each)
        with held(model) as gate:
            optimizer.step()
            threading.Timer(0.05, gate.set).start()
            given = {"__delitem__": [first(each)], "__setitem__": [first(each), {}], "update": [{first(each): {}}]}
            getattr(optimizer.state, change)(*given.get(change, []))
        assert not optimizer.state[first(each)]
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.local, expected.detach().view(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("strategy", [HOST, STREAMED])
def test_gradients_that_are_dropped_meanwhile_are_stepped_on(strategy):
    model, plain = make(strategy), make(None)
    for each in model, plain:
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        stepped(optimizer, each)
        with held(model) as gate:
            optimizer.step()
            optimizer.zero_grad()
            threading.Timer(0.05, gate.set).start()
            backward(each, 3)  # whose gradients take the memory of those before
            assert each is plain or not UNSETTLED
        optimizer.step()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.local, expected.detach().view(-1), rtol=1e-12, atol=1e-15)


class Some(nn.Module):
    """Computes with the first of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.count = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), 3

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks[: self.count]:
            value = block(value).tanh()
        return value


def test_a_backward_comes_after_the_steps_of_units_that_its_forward_leaves_out():
    found, kernel = [], torch._fused_adamw_
    for strategy in None, HOST:
        torch.manual_seed(0)
        model = Some().double() if strategy is None else zm.shard(Some().double(), None, strategy, bucket_bytes=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stepped(optimizer, model)
        gate, calls = threading.Event(), iter(range(9))

        def held_later(*args, gate=gate, calls=calls, **options):
            if next(calls):  # the first block's has no need to wait
                gate.wait()
            kernel(*args, **options)

        with mock.patch("torch._fused_adamw_", held_later):
            optimizer.step()
            optimizer.zero_grad()
            model.count = 1
            threading.Timer(0.3, gate.set).start()
            backward(model, 3)  # which writes zeros where the other blocks' gradients lie
        found.append([param.sum().item() for param in model.parameters()])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("host", [HOST, STREAMED])
def test_one_optimizer_over_the_host_the_device_and_a_plain_tensor(host):
    found = []
    for strategies in (None, None), (host, DEVICE):
        models, extra = [make(strategy) for strategy in strategies], nn.Parameter(torch.ones(3, dtype=torch.double))
        groups = [{"params": list(models[0].parameters()), "lr": torch.tensor(0.1)}, {"params": [extra]}]
        optimizer = torch.optim.SGD([*groups, {"params": list(models[1].parameters())}], lr=0.01, momentum=0.9)
        for seed in range(3):
            for model in models:
                backward(model, seed)
            extra.square().sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.5)  # in place, as a scheduler of tensors does
            optimizer.zero_grad()
        found.append([p.sum().item() for model in models for p in model.parameters()] + [extra.sum().item()])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("host", [HOST, STREAMED, STREAMED.replace("=1", "=2")])
def test_a_loss_scaler_skips_and_scales_steps_beside_the_forward(host):
    found = []
    for strategy in None, host:
        model = make(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for seed in range(4):
            loss = model(torch.full((2, 5), 1.0 + seed, dtype=torch.double)).square().sum()
            scaler.scale(loss * (float("inf") if seed == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            grads = [p.grad.sum().item() for p in model.parameters()]  # a step leaves them unscaled
            optimizer.zero_grad()
        found.append([*(p.sum().item() for p in model.parameters()), *grads, scaler.get_scale()])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


KINDS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(
    ("host", "elements"), [("1", beside.STREAMED_ELEMENTS), ("2", 7), ("3", 7), ("3d", beside.STREAMED_ELEMENTS)]
)
def test_a_step_on_the_device_is_that_of_plain_torch_to_the_bit(monkeypatch, kind, host, elements):
    """With a write by hand, states that are loaded, and a parameter that has no gradient for once; also in pieces that
    cut parameters, of which vectors on a CPU may round differently."""
    monkeypatch.setattr(beside, "STREAMED_ELEMENTS", elements)
    found = []
    for strategy in None, f"host={host},node=0,cluster=0;step=device":
        model = make(strategy)
        params = list(model.parameters())
        optimizer = kind(params)
        for seed in range(5):
            backward(model, seed)
            if seed == 2:
                with torch.no_grad():
                    params[1].mul_(0.5)
                params[1].grad = None
            if seed == 3:
                states = optimizer.state_dict()
                optimizer = kind(params)
                optimizer.load_state_dict(states)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([param.local if strategy else param.detach().flatten() for param in params]))
        held = [value for param in params for value in optimizer.state[param].values()]
        found.append(torch.cat([torch.zeros(0), *(value.flatten() for value in held if isinstance(value, Tensor))]))
    assert found[1].numel() == found[3].numel()
    exact = elements > 7
    torch.testing.assert_close(found[0], found[2], rtol=0.0 if exact else 1e-14, atol=0.0 if exact else 1e-15)
    torch.testing.assert_close(found[1], found[3], rtol=0.0 if exact else 1e-14, atol=0.0 if exact else 1e-15)


@pytest.mark.parametrize("elements", [beside.STREAMED_ELEMENTS, 7])
@pytest.mark.parametrize("host", ["3", "3d"])
def test_the_device_s_memory_for_a_step_there_is_predicted(monkeypatch, host, elements):
    alive, peaks, real = Counter[int](), Counter[int](), HostLink.brought

    def brought(link: HostLink, source: Tensor) -> Tensor:
        made, lane = real(link, source), threading.get_ident()
        alive[lane] += made.nbytes
        peaks[lane] = max(peaks[lane], alive[lane])
        weakref.finalize(made, alive.subtract, {lane: made.nbytes})
        return made

    for module in beside, memory:
        monkeypatch.setattr(module, "STREAMED_ELEMENTS", elements)
    monkeypatch.setattr(HostLink, "brought", brought)
    model = make(f"host={host},node=0,cluster=0;step=device")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(optimizer, model)
    peaks.clear()  # of the first step, which brings no states
    optimizer.step()
    settle(None)
    assert len(peaks) == 2 and sum(peaks.values()) == memory.streamed_bytes(engine_of(model).schedule)


@pytest.mark.parametrize("host", [HOST, STREAMED])
def test_two_optimizers_of_the_same_parameters_have_states_of_their_own(host):
    found = []
    for strategy in None, host:
        model = make(strategy)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) for _ in range(2)]
        for seed in range(5):
            backward(model, seed)
            optimizers[seed % 2].step()
            model.zero_grad()
        found.append([param.sum().item() for param in model.parameters()])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_a_closure_is_evaluated_before_a_step_beside_the_forward():
    found = []
    for strategy in None, HOST, STREAMED:
        model = make(strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5, dtype=torch.double)).square().sum()
            loss.backward()
            return loss

        found.append([optimizer.step(closure).item() for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] == found[2]


def test_other_optimizers_do_not_step_on_the_device():
    model = make(STREAMED)
    backward(model, 0)
    with pytest.raises(OptimizerError, match="AdamW cannot step so; leave step=device out"):
        torch.optim.AdamW(model.parameters(), capturable=True, foreach=True).step()


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"foreach": False}, False), ({"fused": False}, False)])
def test_torch_s_fused_kernels_where_nothing_is_chosen(options, fused):
    model = make(HOST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    with mock.patch("torch._fused_adamw_", wraps=torch._fused_adamw_) as kernel:
        stepped(optimizer, model)
        assert kernel.called == fused
    assert optimizer.param_groups[0].get("fused") == options.get("fused")


def test_an_error_of_the_step_is_raised_at_the_next_call():
    """In its own type: others would be taken for a fault between ranks."""
    model = make(HOST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(optimizer, model)
    with mock.patch("torch._fused_adamw_", side_effect=MemoryError("no memory")):
        optimizer.step()
        with pytest.raises(MemoryError, match=r"^no memory$"):
            backward(model, 3)
    with pytest.raises((MemoryError, CommunicationError), match="no memory"):
        optimizer.step()


def test_an_error_of_the_first_step_is_raised_there():
    model = make(HOST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model, 1)
    with (
        mock.patch("torch._fused_adamw_", side_effect=MemoryError("no memory")),
        pytest.raises(MemoryError, match="no memory"),
    ):
        optimizer.step()


@pytest.mark.parametrize(("step", "most"), [("host", 1), ("device", 2)])
def test_a_first_step_ends_before_a_machine_s_memory_does(step, most):
    """Three units of 30 elements, with two states of 8 bytes an element: after the first, those of two are needed. On
    the device, another lane may have begun with the second."""
    for free in 2 * 30 * 8 * 2, 2 * 30 * 8 * 2 - 1:
        model = make(f"host=3,node=0,cluster=0;step={step}")  # whose units are not joined
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        backward(model, 1)
        said = r"1 rank\(s\) of this machine need 0\.0 GB more of its memory for the optimizer's states"
        fails = pytest.raises(ModelError, match=said) if free % 2 else nullcontext()
        with mock.patch("zeromesh.engine.beside.free_bytes", lambda device, free=free: free), fails:
            optimizer.step()
        made = sum(dict.__contains__(optimizer.state, param) for param in model.parameters())
        assert made <= 2 * most if free % 2 else made == 6


def values_of(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [getattr(each, "local", each).detach().flatten().clone() for each in tensors]


def clipped(kind: str, look: Callable[[nn.Module], object], strategy: str | None) -> tuple[list[Tensor], list[int]]:
    """Gradients after each of three steps, then parameters; and of each step how many tensors were multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    model = model if strategy is None else zm.shard(model, None, strategy)
    params = list(model.parameters())
    cut = 2 if kind == "two of AdamW" else 0
    optimizers = [getattr(torch.optim, kind.split()[-1])(own, lr=0.1) for own in (params[:cut], params[cut:]) if own]
    found, passes = list[Tensor](), list[int]()
    for seed in 1, 2, 3:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        with mock.patch.object(torch, "_foreach_mul_", side_effect=torch._foreach_mul_) as multiply:
            nn.utils.clip_grad_norm_(params, 0.1) if strategy is None else zm.clip_grad_norm_(model, 0.1)
            look(model)
            for optimizer in optimizers:
                optimizer.step()
            found += values_of(param.grad for param in params)
        passes.append(sum(len(call.args[0]) for call in multiply.call_args_list))
        model.zero_grad()
    return found + values_of(params), passes


CLIP_LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "nobody": lambda model: None,
    "a gradient": lambda model: first(model).grad.sum(),
    "a second clip": lambda model: zm.clip_grad_norm_(model, 1e9),
}


def test_an_error_between_ranks_keeps_its_cause():
    model = make(HOST)

    def failing() -> None:
        raise CommunicationError("no answer") from OSError("reset by peer")

    backend = engine_of(model).backend
    with pytest.raises(CommunicationError, match="no answer") as raised:
        backend.wait(Lane("other", device=torch.device("cpu")).submit(failing))
    assert isinstance(raised.value.__cause__, OSError)


def test_a_model_that_is_given_twice_is_clipped_twice():
    found = []
    for strategy in "node=0,cluster=0", HOST:
        torch.manual_seed(0)
        model = zm.shard(nn.Linear(5, 5), None, strategy)
        model(torch.ones(1, 5)).sum().backward()
        zm.clip_grad_norm_([model, model], 0.1)
        found.append(model.weight.grad.local.clone())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("look", CLIP_LOOKS)
@pytest.mark.parametrize("host", ["host=1", "host=2", "host=3"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "two of AdamW"])
def test_a_clip_is_left_to_the_step_or_done_before_somebody_looks(kind, host, look):
    """Fused kernels multiply in passing; others, a look, or a second optimizer cost a pass, of each gradient once."""
    expected, _ = clipped(kind, lambda model: None, None)
    found, passes = clipped(kind, CLIP_LOOKS[look], f"{host},node=0,cluster=0")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    assert passes == [0 if (kind, look) == ("AdamW", "nobody") else 6] * 3


@pytest.mark.parametrize("drop", [zm.zero_grad, nn.Module.zero_grad, None])
@pytest.mark.parametrize("host", ["host=1", "host=2", "host=3", "host[50%]=2"])
def test_a_clip_without_a_step_is_no_clip_of_later_gradients(host, drop):
    norms = list[float]()
    for strategy in None, f"{host},node=0,cluster=0":
        model = make(None).float()
        model = model if strategy is None else zm.shard(model, None, strategy)
        for seed in 1, 2:
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            norms.append(clip(model, 0.1).item())
            if drop is not None:
                (drop if strategy else nn.Module.zero_grad)(model)
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-6)


def test_a_clip_is_none_of_gradients_that_are_assigned_after_it():
    """Tried often, since a gradient that is gone leaves its id to another only now and then."""
    model = zm.shard(nn.Linear(5, 5, bias=False), None, HOST)
    param, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        param.grad = torch.ones(5, 5)
        zm.clip_grad_norm_(model, 0.1)
        param.grad = None
        param.grad = torch.ones(5, 5)
        optimizer.step()
        assert torch.equal(param.grad.local, torch.ones(25))


def test_gradients_of_a_step_that_a_loss_scaler_skips_are_clipped():
    """An infinite norm clips finite gradients to zero, as in plain torch."""
    model = zm.shard(nn.Linear(5, 5), None, HOST)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    model.bias.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    zm.clip_grad_norm_(model, 0.1)
    scaler.step(optimizer)
    assert not model.weight.grad.local.any() and model.bias.grad.local.isnan().all()


def test_gradients_of_a_step_that_lanes_cannot_run_are_clipped():
    """Masters in bf16, and gradients in fp32: SGD's own loop adds one to the other."""
    found = []
    for strategy in DEVICE, HOST:
        model = zm.shard(make(None).float(), None, strategy, master_dtype="bf16", param_dtype="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model(torch.ones(4, 5)).square().sum().backward()
        zm.clip_grad_norm_(model, 0.1)
        optimizer.step()
        found.append(values_of(model.parameters()))
    assert all(map(torch.equal, *found))


def test_copies_of_several_optimizers_that_step_on_one_buffer_are_predicted():
    """Each brings the whole buffer; SGD has the masters alone."""
    model = make("host=1,node=0,cluster=0;step=device")
    matrices, vectors = ([param for param in model.parameters() if (param.ndim == 2) == two] for two in (True, False))
    optimizers = torch.optim.AdamW(matrices), torch.optim.SGD(vectors, lr=0.1)
    for seed in 0, 1:  # the first step makes the states
        backward(model, seed)
        with zm.traffic_report(model, micro_batches=1) as traffic:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            backward(model, seed)
    numel = sum(placed.padded for unit in engine_of(model).schedule.placed for placed in unit)
    lines = [line for line in traffic.lines() if line.axis == "host"]
    assert [line.sent_bytes for line in lines] == [line.predicted_bytes for line in lines] == [8 * numel * (3 + 1)] * 2


def _dropped_between(model: nn.Module) -> None:
    model.zero_grad()
    sharded = isinstance(first(model), ShardedParameter)
    for last in False, True:
        with zm.accumulate(model, last=last) if sharded else nullcontext():
            backward(model, 6 + last)
        if not last:
            first(model).grad = None


def clip_and_go_on(drop: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    """A clip that no step follows, and then the next backward."""

    def change(model: nn.Module) -> None:
        clip(model, 0.3)
        drop(model)
        backward(model, 5)

    return change


def zeroed(model: nn.Module) -> None:
    (zm.zero_grad if isinstance(first(model), ShardedParameter) else nn.Module.zero_grad)(model)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "in place": lambda model: first(model).grad.mul_(3),
    "in place, of all": lambda model: torch._foreach_mul_([param.grad for param in model.parameters()], 3),
    "its data": lambda model: first(model).grad.data.mul_(3),
    "zeroed": lambda model: first(model).grad.zero_(),
    "dropped": lambda model: setattr(first(model), "grad", None),
    "another": lambda model: setattr(first(model), "grad", torch.full((5, 5), 0.5, dtype=torch.double)),
    "all dropped": lambda model: model.zero_grad(),
    "a further backward": lambda model: backward(model, 5),
    "dropped between micro-batches": _dropped_between,
    "clipped already": lambda model: clip(model, 0.3),
    "clipped, and added to": clip_and_go_on(lambda model: None),
    "clipped and dropped": clip_and_go_on(nn.Module.zero_grad),
    "clipped and dropped by ours": clip_and_go_on(zeroed),
    "the largest, clipped": lambda model: clip(model, 0.3, math.inf),
}


def clip(model: nn.Module, most: float, order: float = 2.0) -> Tensor:
    if isinstance(first(model), ShardedParameter):
        return zm.clip_grad_norm_(model, most, order)
    return nn.utils.clip_grad_norm_(model.parameters(), most, order)


@pytest.mark.parametrize("host", [HOST, "host=2,node=3", "host=3d,node=1;step=device", "host[40%]=1,node=0"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_norm_is_of_gradients_as_they_are(change, host):
    found = []
    for model in make(host), make(None):
        optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for seed in range(4):
            backward(model, seed)
            if seed:  # the first clip asks for norms
                change(model)
            norms.append(clip(model, 0.1).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed > 1)
        found.append((norms, [getattr(param, "local", param).detach().reshape(-1) for param in model.parameters()]))
    (norms, params), (expected, plain) = found
    assert norms == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(params, plain, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("host", [HOST, "host=2,node=3", "host=3,node=3;step=device"])
def test_the_device_finds_norms_unless_a_plain_tensor_kept_from_before_is_written_to(host):
    model, norms, kept = make(host), list[float](), list[Tensor]()
    for _ in range(3):
        backward(model, 0)
        kept += [] if norms else [first(model).grad.local]
        if len(norms) == 2:
            kept[0].mul_(3)
        reads = len(norms) != 1
        with mock.patch("torch._foreach_norm", side_effect=torch._foreach_norm if reads else AssertionError):
            norms.append(zm.clip_grad_norm_(model, math.inf).item())
        model.zero_grad()
    assert norms[0] == norms[1] < norms[2]


def test_a_clip_where_the_user_has_another_default_device():
    """Numbers that the clip makes for itself lie where it computes."""
    norms = []
    for device in "cpu", "meta":
        torch.manual_seed(0)
        model = zm.shard(nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 2)), None, HOST)
        for _ in range(2):  # read, then found on the device
            model(torch.ones(1, 80)).sum().backward()
            with torch.device(device):
                norms.append(zm.clip_grad_norm_(model, math.inf).item())
            zm.zero_grad(model)
    assert norms == [norms[0]] * 4
