"""Memory that saving and loading take: the copy of a save is what is said of it, and loading makes no second states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zeromesh as zm


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zm.shard(nn.Linear(64, 100), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_copy_is_12_bytes_a_parameter(tmp_path: Path) -> None:
    model, optimizer = make(0)
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        assert checkpoints.staging_bytes == 0
        checkpoints.save(1)
        parameters = 12 * (64 * 100 + 100)
        # The generators' states: torch's 5056 bytes, Python's 627 and numpy's 627 words of 8; steps.
        assert checkpoints.staging_bytes == parameters + 5056 + 2 * 627 * 8 + 2 * 4
    assert checkpoints.staging_bytes == 0


def test_states_that_are_there_are_filled_in_place(tmp_path: Path) -> None:
    model, optimizer = make(0)
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(1)
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
