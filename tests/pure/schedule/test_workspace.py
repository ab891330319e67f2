"""The collectives' workspace: a lane's, by backend, and that simulations count what the engine allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.collectives.ho_ring.slices import sum_terms
from zeromesh.schedule import workspace_by_lane
from zeromesh.schedule.workspace import part_numel
from zeromesh.simulator import FixedWorkload, find_engine, simulate
from zeromesh.strategy import Layout

MESH = [("node", 4), ("cluster", 4)]


@pytest.mark.parametrize(
    ("strategy", "backend", "lanes"),
    [
        ("node=3,cluster=3", "gloo", {"reduce": 8 << 20}),
        ("node=1,cluster=0", "nccl", {"boundary": 64 << 20}),
        ("node=3,cluster=1", "nccl", {"reduce": 64 << 20, "boundary": 64 << 20}),
        # Messages of a quantised gather need room.
        ("node=3@int8/,cluster=2", "gloo", {"unshard": 8 << 20, "reduce": 8 << 20}),
        ("node=3,cluster=2@int8/", "gloo", {"refresh": 8 << 20, "reduce": 8 << 20}),
        ("node=3@/int4,cluster=3", "gloo", {"reduce": 8 << 20}),
    ],
)
def test_each_lane_has_its_own(strategy: str, backend: str, lanes: dict[str, int]) -> None:
    workspace = workspace_by_lane(Layout.of(strategy, MESH), backend)
    assert {lane: size for lane, size in workspace.items() if size} == lanes


def test_one_rank_needs_none() -> None:
    assert not any(workspace_by_lane(Layout.of("node=3@int8/", [("node", 1)]), "gloo").values())


@pytest.mark.parametrize(("cores", "expected"), [(None, 2 * (64 << 20)), (1.0, 2 * (8 << 20))])
def test_simulations_count_it(cores: float | None, expected: int) -> None:
    """Of our engine, on the backend that the devices have."""
    cluster = small_cluster(4, 4)
    cluster = replace(cluster, device=replace(cluster.device, cores=cores))
    work = FixedWorkload(seq_len=256, global_batch_tokens=256 * 16)
    ours, without = (
        simulate(small_model(), cluster, "node=3,cluster=1", work, engine=engine).memory
        for engine in ("zeromesh", replace(find_engine("zeromesh"), workspace=False))
    )
    assert ours.buffers - without.buffers == expected
    alone = simulate(small_model(), cluster.take(1), "node=3,cluster=1", replace(work, global_batch_tokens=256)).memory
    assert alone.buffers < expected


@pytest.mark.parametrize(
    ("longest_bytes", "expected"),
    [
        (1 << 18, 65536),  # 256 KiB of fp32
        # Of each shard but one's own four slices, and two as wide as sums are, in 8 MiB.
        (1 << 20, (8 << 20) // (4 * (12 + 2)) // 64 * 64),
    ],
)
def test_slices_are_as_long_as_the_workspace_has_room_for(longest_bytes: int, expected: int) -> None:
    terms = sum_terms(2, 2)
    assert terms == 4 * 3
    assert part_numel(8 << 20, 4, 4, terms=terms, longest_bytes=longest_bytes) == expected
