"""Arguments and memory of `zm.Checkpoints`, and states beside tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeromesh as zm
from zeromesh.errors import CheckpointError, ModelError


def test_steps_and_retention_that_cannot_be_meant(tmp_path: Path) -> None:
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    for options in ({"keep": 0}, {"keep": -1}, {"keep_every": -2}):
        with pytest.raises(CheckpointError, match="keep must be 1 or more and keep_every 0 or more; got keep="):
            zm.Checkpoints(tmp_path, model, **options)  # type: ignore[arg-type]
    wrong: tuple[Any, ...] = (20.0, -1, "3", None)
    with zm.Checkpoints(tmp_path, model) as checkpoints:
        for step in wrong:
            with pytest.raises(CheckpointError, match=r"step must be a whole number .*; got "):
                checkpoints.save(step)
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(np.int64(20))
        assert checkpoints.wait() == str(tmp_path / "step-00000020")
        found = checkpoints.load("auto")
    assert found is not None and found.step == 20


def test_the_model_alone_is_loaded_or_some_of_its_state(tmp_path: Path) -> None:
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        saved = zm.full_state_dict(model)
        checkpoints.save(0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        states = [state["exp_avg"].clone() for state in optimizer.state.values()]
        optimizer.param_groups[0]["lr"] = 0.25
        assert checkpoints.load("auto", optimizers=False) is not None
    for name, value in zm.full_state_dict(model).items():
        assert torch.equal(value, saved[name])
    left = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(left) == 2 and all(map(torch.equal, left, states)) and optimizer.param_groups[0]["lr"] == 0.25
    # Some of a state dict.
    model = zm.shard(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), None, "node=3")
    names = {"1.running_mean", "0.bias", "unknown"}
    found, whole = zm.full_state_dict(model, names=names), zm.full_state_dict(model)
    assert list(found) == ["0.bias", "1.running_mean"]
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


OTHERS: dict[str, Any] = {
    "SGD": lambda params: [torch.optim.SGD(params, lr=0.5, momentum=0.9)],
    "Adam": lambda params: [torch.optim.Adam(params, lr=0.5)],  # AdamW is a kind of it
    "Muon": lambda params: [zm.by_owner(torch.optim.Muon, params[:1], lr=0.5), torch.optim.AdamW(params[1:], lr=0.5)],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_class_of_optimizer_is_refused_and_nothing_changed(tmp_path: Path, kind: str) -> None:
    save_trained(zm.shard(torch.nn.Linear(2, 2), None, "node=3"), tmp_path)
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizers, before = OTHERS[kind]([*model.parameters()]), zm.full_state_dict(model)
    match = f"was saved with AdamW for weight, and here {kind} steps on it: make optimizers of the classes"
    with zm.Checkpoints(tmp_path, model, optimizers) as checkpoints, pytest.raises(CheckpointError, match=match):
        checkpoints.load()
    assert all(torch.equal(value, before[name]) for name, value in zm.full_state_dict(model).items())
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.5] * len(optimizers) and not optimizers[0].state


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """States and options are saved by its name: the last one's would be those of both."""
    model = zm.shard(nn.Linear(2, 2), None, "node=3")
    pair = [torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW([model.bias], lr=0.5)]
    match = r"two optimizers hold bias, and a checkpoint has one state for each parameter: let one of them"
    with pytest.raises(CheckpointError, match=match):
        zm.Checkpoints(tmp_path, model, pair)
    pair = [torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias])]
    with zm.Checkpoints(tmp_path, model, pair) as checkpoints:
        pair[0].add_param_group({"params": [model.bias]})
        with pytest.raises(CheckpointError, match=match):
            checkpoints.save(1)


def test_an_optimizer_of_two_models_is_saved_in_parts_with_each(tmp_path: Path) -> None:
    """Their parameters have the same names, and each model's group has a rate of its own."""

    def make_pair() -> tuple[list[nn.Module], torch.optim.Optimizer]:
        models: list[nn.Module] = [zm.shard(nn.Linear(2, 2), None, "node=3") for _ in range(2)]
        groups = [{"params": model.parameters(), "lr": 0.5 / (1 + i)} for i, model in enumerate(models)]
        return models, torch.optim.AdamW(groups)

    def states_of(models: list[nn.Module], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        held = [optimizer.state[param] for model in models for param in model.parameters()]
        return [state[key].detach().clone() for state in held for key in ("step", "exp_avg", "exp_avg_sq")]

    models, optimizer = make_pair()
    for steps, model in enumerate(models):
        for _ in range(1 + steps):
            optimizer.zero_grad()
            model(torch.randn(3, 2)).square().sum().backward()
            optimizer.step()
    saved, whole = states_of(models, optimizer), [zm.full_state_dict(model) for model in models]
    for name, model in zip("ab", models, strict=True):
        with zm.Checkpoints(tmp_path / name, model, optimizer) as checkpoints:
            checkpoints.save(1)
    models, optimizer = make_pair()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for name, model in zip("ba", reversed(models), strict=True):
        with zm.Checkpoints(tmp_path / name, model, optimizer) as checkpoints:
            checkpoints.load()
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 if name == "a" else 0.0, 0.25]
    assert all(map(torch.equal, states_of(models, optimizer), saved))
    for model, values in zip(models, whole, strict=True):
        assert all(torch.equal(value, values[key]) for key, value in zm.full_state_dict(model).items())


@pytest.mark.parametrize("of_another", [False, True])
def test_states_of_others_parameters_are_refused(tmp_path: Path, of_another: bool) -> None:
    """An optimizer of another model alone is a mistake: nothing of it would be saved."""
    (model, optimizer), (other, of_other) = make(0), make(1)
    if of_another:
        optimizer, found = of_other, "bias, weight"
        other(torch.ones(2, 64)).square().sum().backward()
    else:
        plain, found = nn.Parameter(torch.ones(2)), "Parameter"
        optimizer.add_param_group({"params": [plain]})
        plain.square().sum().backward()
    optimizer.step()
    match = rf"states of others than this model's parameters \({found}\): make it from parameters after zm.shard"
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints, pytest.raises(CheckpointError, match=match):
        checkpoints.save(1)


class Counting(torch.optim.Optimizer):
    """Keeps numbers of Python's beside a state of the parameter's shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["seen"], state["scale"] = state.get("seen", 0) + 1, 0.1  # which a tensor of fp32 would round
            state["sum"] = state["sum"] + param.grad if "sum" in state else param.grad.clone()
            param.sub_(state["sum"], alpha=0.1 / float(state["seen"]))


def test_a_count_is_no_slice_of_a_parameter_without_dimensions(tmp_path: Path) -> None:
    model = zm.shard(nn.ParameterList([torch.ones(()), torch.ones(2)]), None, "node=3")
    optimizer = zm.elementwise(Counting(model.parameters(), {}))
    for loads in (True, False):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        if loads:
            with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
                checkpoints.save(1)
                optimizer.state.clear()
                assert checkpoints.load() is not None
            optimizer.load_state_dict(optimizer.state_dict())
        assert all(type(state["seen"]) is int and state["scale"] == 0.1 for state in optimizer.state.values())
    assert [float(param.detach().max()) for param in model.parameters()] == pytest.approx([0.8, 0.8])


def save_trained(model: torch.nn.Module, path: Path) -> torch.optim.Optimizer:
    """After a step, at a rate that is no default."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    with zm.Checkpoints(path, model, optimizer) as checkpoints:
        checkpoints.save(1)
    return optimizer


def test_states_of_what_stays_trained_are_kept(tmp_path: Path) -> None:
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizer = save_trained(model, tmp_path)
    again = torch.nn.Linear(2, 2)
    again.weight.requires_grad_(False)
    zm.shard(again, None, "node=3")
    other = torch.optim.AdamW([again.bias])
    with zm.Checkpoints(tmp_path, again, other) as checkpoints:
        assert checkpoints.load() is not None
    assert other.param_groups[0]["lr"] == 0.25 and list(other.state) == [again.bias]
    assert all(torch.equal(other.state[again.bias][k], v) for k, v in optimizer.state[model.bias].items())
    assert all(map(torch.equal, zm.full_state_dict(again).values(), zm.full_state_dict(model).values()))


def test_states_of_what_is_frozen_are_left_out_with_it(tmp_path: Path) -> None:
    """Adagrad makes a state for every parameter that it is given."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model = zm.shard(model, None, "node=3")
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sums = [optimizer.state[param]["sum"].clone() for param in model[1].parameters()]
    with zm.Checkpoints(tmp_path, model, optimizer, frozen=False) as checkpoints:
        checkpoints.save(1)
        assert checkpoints.load("auto") is not None
    assert all(map(torch.equal, sums, [optimizer.state[param]["sum"] for param in model[1].parameters()]))
    assert not any(param in optimizer.state for param in model[0].parameters())


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zm.shard(nn.Linear(64, 100), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_states_that_are_there_are_filled_in_place(tmp_path: Path) -> None:
    """The copy of a save is 12 bytes a parameter, beside the generators' states."""
    model, optimizer = make(0)
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        assert checkpoints.staging_bytes == 0
        checkpoints.save(1)
        parameters = 12 * (64 * 100 + 100)
        # The generators' states: torch's 5056 bytes, Python's 627 and numpy's 627 words of 8; steps.
        assert checkpoints.staging_bytes == parameters + 5056 + 2 * 627 * 8 + 2 * 4
    assert checkpoints.staging_bytes == 0
    other, others = make(1)
    before = [{key: value.data_ptr() for key, value in values.items()} for values in others.state.values()]
    zm.Checkpoints(tmp_path, other, others).load()
    assert [{key: value.data_ptr() for key, value in values.items()} for values in others.state.values()] == before
    for param, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.local, saved.local)
        for key, value in optimizer.state[saved].items():
            assert torch.equal(others.state[param][key], value), key
    others.state.clear()  # and where there are none, they are made
    zm.Checkpoints(tmp_path, other, others).load()
    assert [len(values) for values in others.state.values()] == [3, 3]


STATES = {"amax": [1.5, 2], "name": "e4m3", "bytes": b"\x00pickled by somebody", "scale": torch.arange(3.0)}
STATES |= {"history": torch.ones(2, 2, dtype=torch.bfloat16)}


class Scaled(nn.Module):
    """Keeps state that is neither parameter nor buffer, as TransformerEngine's modules do; has its parameter last."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.zeros(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        return self.lin(x) + self.shift


def net(extra: Any = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Scaled(extra)).to(dtype)
    return zm.shard(model, None, "node=3", master_dtype=dtype, grad_dtype=dtype)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], value) for key, value in theirs.items())
    return torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_extra_states_are_saved_and_loaded(tmp_path: Path) -> None:
    for number, expected in enumerate((STATES, STATES["bytes"])):
        model, other, third = net(expected), net(), net()
        state = zm.full_state_dict(model)
        assert list(state) == list(model.state_dict()) and same(state["1._extra_state"], expected)
        zm.load_full_state_dict(other, state)
        with zm.Checkpoints(tmp_path, model) as checkpoints:
            checkpoints.save(number)
        with zm.Checkpoints(tmp_path, third) as checkpoints:
            assert checkpoints.load("auto") is not None
        for loaded in (other, third):
            assert same(loaded[1].extra, expected)  # type: ignore[index]
    with pytest.raises(ModelError, match=r"the state has no '1\._extra_state'"):
        zm.load_full_state_dict(other, {key: value for key, value in state.items() if "extra" not in key})


def test_what_of_extra_states_cannot_be_read_without_running_code_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(CheckpointError, match=r"1\._extra_state must be made of tensors.*got PosixPath")
    with zm.Checkpoints(tmp_path, net(Path("x"))) as checkpoints, refused:
        checkpoints.save(1)
    with zm.Checkpoints(tmp_path, net(io.BytesIO(b"abc"))) as checkpoints:
        checkpoints.save(2)  # as TransformerEngine has it
    model = net()
    with zm.Checkpoints(tmp_path, model) as checkpoints:
        assert checkpoints.load("auto") is not None
    assert model[1].extra.getvalue() == b"abc"  # type: ignore[index]


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_run_goes_on_in_other_dtypes(tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], make: Any) -> None:
    """Its optimizer has states as it would have made them; where nothing has changed, those that were saved."""
    for number, dtype in enumerate((*dtypes, *reversed(dtypes))):
        model = net(dtype=dtype)
        optimizer = make(model.parameters())
        with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
            assert (checkpoints.load("auto") is None) == (number == 0)
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.step()
            states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
            assert states and {value.dtype for value in states} == {dtype}
            checkpoints.save(number)
