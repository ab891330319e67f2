"""The collectives' workspace: a lane's, by transport, and that simulations count what the engine allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from tests.pure.schedule.test_transfers import stack
from zeromesh.collectives.ho_ring.slices import sum_terms
from zeromesh.schedule import place
from zeromesh.schedule.memory import part_numel, workspace_by_lane
from zeromesh.simulator import FixedWorkload, find_engine, simulate
from zeromesh.strategy import Layout
from zeromesh.wires import QuantFormat

MESH = [("node", 4), ("cluster", 4)]
NUMEL = 1 << 22


def lanes(strategy: str, mesh: list[tuple[str, int]], *, messages: bool) -> dict[str, int]:
    layout = Layout.of(strategy, mesh)
    workspace = workspace_by_lane(place(layout, stack(NUMEL, 2)), messages)
    return {lane: size for lane, size in workspace.items() if size}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=3", {"reduce": 8 << 20}),
        ("node=1,cluster=0", {"boundary": 8 << 20}),
        ("node=3,cluster=1", {"reduce": 8 << 20, "boundary": 8 << 20}),
        # Messages of a quantised gather need room.
        ("node=3@int8/,cluster=2", {"unshard": 8 << 20, "reduce": 8 << 20}),
        ("node=3,cluster=2@int8/", {"refresh": 8 << 20, "reduce": 8 << 20}),
        ("node=3@/int4,cluster=3", {"reduce": 8 << 20}),
    ],
)
def test_each_lane_has_its_own(strategy: str, expected: dict[str, int]) -> None:
    assert lanes(strategy, MESH, messages=True) == expected


MESSAGE = QuantFormat(bits=8).message_bytes(-(-NUMEL // 4 // (2 * 1024)) * 1024)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=3", {}),  # the backend's own, in place
        ("node=1,cluster=0", {}),
        # Four messages that come, this rank's own among them; of a reduction as many that go.
        ("node=3@int8/int8,cluster=0", {"unshard": 4 * MESSAGE, "reduce": 8 * MESSAGE}),
    ],
)
def test_a_device_needs_room_for_two_rounds_of_the_longest_region(strategy: str, expected: dict[str, int]) -> None:
    found = lanes(strategy, MESH, messages=False)
    assert {lane: found.get(lane, 0) for lane in expected} == expected
    assert bool(found) == bool(expected)


def test_without_triton_the_codec_has_room_too() -> None:
    """12 bytes an element and 8 a block, of a part; stochastic rounding, of sums without feedback, 14."""
    layout = Layout.of("node=3@int8/int8,cluster=0", MESH)
    placed = place(layout, stack(NUMEL, 2))
    fused, torchs = (workspace_by_lane(placed, False, triton) for triton in (True, False))
    piece = -(-NUMEL // 4 // (2 * 1024)) * 1024
    assert torchs["unshard"] - fused["unshard"] == 12 * piece + 8 * piece // 128
    assert torchs["reduce"] - fused["reduce"] == 14 * piece + 8 * piece // 128


def test_one_rank_needs_none() -> None:
    assert not any(lanes("node=3@int8/", [("node", 1)], messages=messages) for messages in (True, False))


@pytest.mark.parametrize(("cores", "expected"), [(None, 0), (1.0, 2 * (8 << 20))])
def test_simulations_count_it(cores: float | None, expected: int) -> None:
    """The workspace of our engine, by the way in which the devices exchange."""
    cluster = small_cluster(4, 4)
    cluster = replace(cluster, device=replace(cluster.device, cores=cores))
    work = FixedWorkload(seq_len=256, global_batch_tokens=256 * 16)
    ours, without = (
        simulate(small_model(), cluster, "node=3,cluster=1", work, engine=engine).memory
        for engine in ("zeromesh", replace(find_engine("zeromesh"), workspace=False))
    )
    assert ours.buffers - without.buffers == expected
    alone = simulate(small_model(), cluster.take(1), "node=3,cluster=1", replace(work, global_batch_tokens=256)).memory
    assert alone.buffers < max(expected, 1 << 20)


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
