"""The collectives' workspace: a lane's, by backend, and that simulations count what the engine allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.schedule import Workspace
from zeromesh.simulator import Workload, find_engine, simulate
from zeromesh.strategy import Layout

MESH = [("node", 4), ("cluster", 4)]


@pytest.mark.parametrize(
    ("strategy", "backend", "gather", "reduce"),
    [
        ("node=3,cluster=1", "gloo", 0, 8 << 20),
        ("node=3,cluster=1", "nccl", 0, 64 << 20),
        ("node=3@int8/,cluster=1", "nccl", 64 << 20, 64 << 20),  # messages of a quantised gather need room
        ("node=3@/int4,cluster=1", "gloo", 0, 8 << 20),
    ],
)
def test_each_lane_has_its_own(strategy: str, backend: str, gather: int, reduce: int) -> None:
    workspace = Workspace.of(Layout.of(strategy, MESH), backend)
    assert (workspace.gather, workspace.reduce, workspace.total) == (gather, reduce, gather + reduce)


def test_one_rank_needs_none() -> None:
    assert Workspace.of(Layout.of("node=3@int8/", [("node", 1)]), "gloo").total == 0


@pytest.mark.parametrize(("cores", "expected"), [(None, 64 << 20), (1.0, 8 << 20)])
def test_simulations_count_it(cores: float | None, expected: int) -> None:
    """Of our engine, on the backend that the devices have."""
    cluster = small_cluster(4, 4)
    cluster = replace(cluster, device=replace(cluster.device, cores=cores))
    work = Workload(seq_len=256, global_batch_tokens=256 * 16)
    ours, without = (
        simulate(small_model(), cluster, "node=3,cluster=1", work, engine=engine).memory
        for engine in ("zeromesh", replace(find_engine("zeromesh"), workspace=False))
    )
    assert ours.buffers - without.buffers == expected
    alone = simulate(small_model(), cluster.take(1), "node=3,cluster=1", replace(work, global_batch_tokens=256)).memory
    assert alone.buffers < expected
