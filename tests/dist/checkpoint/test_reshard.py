"""A checkpoint of any strategy and world loads under any other, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeromesh as zm
from tests.dist.checkpoint.models import Mesh, Odd, assemble, make, require_equal, slices, train
from tests.dist.pool import Pool, kept, on_ranks
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.strategy import Layout

STRATEGIES = (
    *("node=0,cluster=0", "node=1,cluster=0", "node=2,cluster=2", "node=3,cluster=3"),
    *("node=3,cluster=0", "node=3,cluster=1", "node=3,cluster=3k", "node=0,cluster=3"),
)
ONE: Mesh = (("cluster", 1), ("node", 1))
TWO: Mesh = (("cluster", 1), ("node", 2))
THREE: Mesh = (("cluster", 3), ("node", 1))
FOUR: Mesh = (("cluster", 2), ("node", 2))
SIX: Mesh = (("cluster", 3), ("node", 2))
LAYOUTS = [ONE, TWO, THREE, FOUR, SIX]


def save(directory: Path, mesh: Mesh, strategy: str):
    """Two steps, saved; the slices of this rank."""
    model, optimizer = make(mesh, strategy)
    train(model, optimizer, 2)
    with Checkpoints(directory, model, optimizer) as checkpoints:
        checkpoints.save(2, {"scheduler": {"last": (1, 2)}})
        held = slices(model, optimizer)
        train(model, optimizer, 1, first=2)  # the copy is written, while training goes on
    return held


def load(directory: Path, mesh: Mesh, strategy: str):
    """Into another model's values; the slices of this rank then, and whether it can go on."""
    model, optimizer = make(mesh, strategy, seed=1)
    with Checkpoints(directory, model, optimizer) as checkpoints:
        restored = checkpoints.load("auto")
    assert restored is not None and restored.step == 2 and restored.has_optimizer
    assert restored.state == {"scheduler": {"last": (1, 2)}}
    held = slices(model, optimizer)
    losses = train(model, optimizer, 1, first=2)
    return held, losses


def world(mesh: Mesh) -> int:
    return mesh[0][1] * mesh[1][1]


def test_any_layout_loads_under_any_other(pool: Pool, tmp_path: Path) -> None:
    """One after the other, so that all strategies and worlds take part on both sides."""
    strategies = (STRATEGIES[5 * place % 8] for place in range(9))
    saved, expected = tmp_path, None
    for number, (mesh, strategy) in enumerate(zip([*LAYOUTS[::-1], *LAYOUTS], strategies, strict=False)):
        if expected is not None:
            found = pool.run(world(mesh), load, saved, mesh, strategy)
            require_equal(assemble([held for held, _ in found]), expected)
        saved = tmp_path / str(number)
        expected = assemble(pool.run(world(mesh), save, saved, mesh, strategy))


def save_as_before(directory: Path, mesh: Mesh, strategy: str):
    """With buffers that are padded only so that the sharded axes divide them."""

    def padded(layout: Layout, numel: int, item_bytes: int) -> int:
        ranks = layout.degree(layout.significant)
        return -(-numel // ranks) * ranks

    with mock.patch.object(Layout, "padded", padded):
        return save(directory, mesh, strategy)


def test_what_was_saved_with_another_padding_loads(pool: Pool, tmp_path: Path) -> None:
    """Files hold parts of tensors; here they end elsewhere than the parts that load them."""
    expected = pool.run(4, save_as_before, tmp_path, FOUR, "node=3,cluster=1")
    found = [held for held, _ in pool.run(4, load, tmp_path, FOUR, "node=3,cluster=1")]
    lengths = [[local.numel() for _, _, _, local in held] for held in (*expected, *found)]
    assert lengths[:4] != lengths[4:]
    require_equal(assemble(found), assemble(expected))


def test_replicas_are_written_once_and_spread(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save, tmp_path, FOUR, "node=3,cluster=0")
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("step-*/__*_0.distcp"))]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def same_strategy(directory: Path, mesh: Mesh, strategy: str) -> None:
    model, optimizer = make(mesh, strategy)
    train(model, optimizer, 2)
    with Checkpoints(directory, model, optimizer) as checkpoints:
        checkpoints.save(2)
        random_before = torch.rand(3), random.random()
        uninterrupted = train(model, optimizer, 3, first=2)
        expected = slices(model, optimizer)
        resumed_model, resumed_optimizer = make(mesh, strategy, seed=5)
        checkpoints_again = Checkpoints(directory, resumed_model, resumed_optimizer)
        checkpoints.wait()
        restored = checkpoints_again.load()
        assert restored is not None
        assert torch.equal(torch.rand(3), random_before[0]) and random.random() == random_before[1]
        assert train(resumed_model, resumed_optimizer, 3, first=2) == uninterrupted
        found = slices(resumed_model, resumed_optimizer)
        require_equal({name: local for name, _, _, local in found}, {name: local for name, _, _, local in expected})
        checkpoints_again.close()


def test_resumed_is_uninterrupted(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, same_strategy, tmp_path, FOUR, "node=0,cluster=2")


def on_unsorted_ranks(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`make` on a mesh whose first rank is the last; with a buffer without elements."""
    torch.manual_seed(seed)
    model = Odd()
    model.register_buffer("nothing", torch.zeros(0, 2))
    mesh = kept(DeviceMesh, "cpu", (2, 0, 1), mesh_dim_names=("node",))
    zm.shard(model, mesh, "node=1")
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@on_ranks(3)
def test_a_mesh_in_another_order_than_the_ranks(tmp_path):
    model, optimizer = on_unsorted_ranks(seed=0)
    train(model, optimizer, 2)
    with Checkpoints(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(2)
    held = {name: local for name, _, _, local in slices(model, optimizer)}
    uninterrupted = train(model, optimizer, 1, first=2)
    model, optimizer = on_unsorted_ranks(seed=1)
    restored = Checkpoints(tmp_path, model, optimizer).load("auto")
    assert restored is not None and restored.step == 2
    found = {name: local for name, _, _, local in slices(model, optimizer)}
    for name in [name for name in held if name.startswith("norm.running") or name == "norm.num_batches_tracked"]:
        del held[name], found[name]  # of each rank's own batches; those of the mesh's first rank are saved
    require_equal(found, held)
    assert train(model, optimizer, 1, first=2) == uninterrupted


@on_ranks(4)
def test_what_is_read_and_compared_is_on_the_host_whatever_the_default_device(tmp_path):
    model, optimizer = make(FOUR, "node=3,cluster=1")
    train(model, optimizer, 1)
    expected = {name: local for name, _, _, local in slices(model, optimizer)}
    with torch.device("meta"), Checkpoints(tmp_path, model, optimizer) as checkpoints:
        checkpoints.save(1)
    model, optimizer = make(FOUR, "node=3,cluster=1", seed=1)
    with torch.device("meta"), Checkpoints(tmp_path, model, optimizer) as checkpoints:
        restored = checkpoints.load("auto")
        zm.check_replicas(model, optimizer)
    assert restored is not None and restored.step == 1
    require_equal({name: local for name, _, _, local in slices(model, optimizer)}, expected)
