"""Modules' extra states, whole state dicts in the model's order, and states of optimizers in another run's dtypes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh as zm
from zeromesh.errors import CheckpointError, ModelError

STATES = {
    "numbers": {"amax": [1.5, 2], "name": "e4m3"},
    "tensors": {"scale": torch.arange(3.0), "history": torch.ones(2, 2, dtype=torch.bfloat16)},
    "bytes": b"\x00pickled by somebody",
}


class Scaled(nn.Module):
    """Keeps what is neither parameter nor buffer, as TransformerEngine's modules do; has its parameter last."""

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


@pytest.mark.parametrize("kind", STATES)
def test_extra_states_are_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    model, other, third = net(STATES[kind]), net(), net()
    state = zm.full_state_dict(model)
    assert list(state) == list(model.state_dict()) and same(state["1._extra_state"], STATES[kind])
    zm.load_full_state_dict(other, state)
    with zm.Checkpoints(tmp_path, model) as checkpoints:
        checkpoints.save(1)
    with zm.Checkpoints(tmp_path, third) as checkpoints:
        assert checkpoints.load("auto") is not None
    for loaded in (other, third):
        assert same(loaded[1].extra, STATES[kind])  # type: ignore[index]
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
