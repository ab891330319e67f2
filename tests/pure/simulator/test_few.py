"""A few blocks tell the time of all, or say that they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cost.constants import default_constants
from zeromesh.model.presets import preset
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import Parallel
from zeromesh.planner.space import Space
from zeromesh.planner.workload import Workload
from zeromesh.simulator.division import Division
from zeromesh.simulator.few import simulate_few
from zeromesh.simulator.mechanics import ENGINES
from zeromesh.simulator.run import setups_of, simulate_divided
from zeromesh.simulator.workload import FixedWorkload

OPTIONS = ["", ";prefetch=0", ";prefetch=3", ";overlap=none", ";overlap=gather", ";collective=ho_ring"]
KINDS = [
    *ENGINES.values(),
    *(
        replace(ENGINES["zeromesh"], **{f"overlap_{kind}": False})
        for kind in ("gather", "reduce", "boundary", "refresh")
    ),
]


@settings(max_examples=60)
@given(data=st.data())
def test_what_few_blocks_tell_is_what_all_do(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(4, 8), (2, 2, 4)]))
    cluster = small_cluster(*sizes, outer_bytes_per_s=data.draw(st.sampled_from([1e9, 12e9, 200e9])))
    cluster = replace(cluster, device=replace(cluster.device, cores=data.draw(st.sampled_from([None, 2.0]))))
    parallel = data.draw(st.sampled_from([Parallel(), Parallel(), Parallel(pp=2), Parallel(tp=2)]))
    model = small_model(data.draw(st.integers(16, 21)), 768, tied=data.draw(st.booleans()) and parallel.pp == 1)
    count = data.draw(st.sampled_from([1, 4])) * (2 if parallel.pp > 1 else 1)
    world = cluster.world // (parallel.tp * parallel.pp)
    work = Workload(seq_len=256, global_batch_tokens=256 * world * count).fixed(
        1, data.draw(st.sampled_from(list(Recomputation))), parallel
    )
    division = Division.of(model, cluster, parallel, seq_len=256)
    space = Space(division.cluster.axes, "once" if division.splits_freely else "none")
    block = next(iter(space.blocks()))
    row = data.draw(st.integers(0, len(block) - 1))
    wires = tuple(data.draw(st.sampled_from(["", "int8/int4"])) for _ in division.cluster.axes)
    strategy = f"{space.strategy([int(c[row]) for c in block.indices], wires)}{data.draw(st.sampled_from(OPTIONS))}"
    engine = data.draw(st.sampled_from(KINDS))
    constants = default_constants().at("host_issue_s", data.draw(st.sampled_from([0.0, 0.0, 1e-5, 1e-4, 1e-3])))
    setups = setups_of(division, strategy, work, engine, constants)
    found = simulate_few(setups)
    if found is not None:
        whole = simulate_divided(setups)
        assert found == pytest.approx((whole.step_s, whole.memory.total, whole.host_memory_bytes), rel=1e-9), strategy


def llama_divided(pp: int = 1, model: str = "llama-7b") -> tuple[Division, FixedWorkload]:
    cluster, parallel = find_cluster("a800-8x-hdr").take(64), Parallel(pp=pp)
    work = Workload(seq_len=4096, global_batch_tokens=4096 * 64 * 4).fixed(1, Recomputation.NONE, parallel)
    return Division.of(preset(model), cluster, parallel, seq_len=4096), work


@pytest.mark.parametrize(
    ("strategy", "pp"),
    [
        ("node=1,cluster=0", 1),
        ("node=2,cluster=2", 1),
        ("node=3,cluster=1", 2),
        ("node=3,cluster=3k", 1),
        ("host=1,node=2,cluster=1", 1),
    ],
)
def test_few_blocks_tell_where_computation_is_the_bound(strategy: str, pp: int) -> None:
    """So that plans need not simulate all of them."""
    division, work = llama_divided(pp)
    setups = setups_of(division, strategy, work)
    found, whole = simulate_few(setups), simulate_divided(setups)
    assert found == pytest.approx((whole.step_s, whole.memory.total, whole.host_memory_bytes), rel=1e-9)


@pytest.mark.parametrize("strategy", ["node=2,cluster=2", "node=1,cluster=0", "node=3,cluster=1"])
def test_a_rank_in_the_middle_of_a_pipeline_joins_its_first_block_with_the_root(strategy: str) -> None:
    division, work = llama_divided(4, "llama-65b")
    setups = setups_of(division, strategy, work)
    found, whole = simulate_few(setups), simulate_divided(setups)
    assert found == pytest.approx((whole.step_s, whole.memory.total, whole.host_memory_bytes), rel=1e-9)


def test_few_blocks_do_not_tell_what_waits_for_the_end_of_a_backward() -> None:
    """Each of more blocks would add to it."""
    division, work = llama_divided()
    deferring = replace(ENGINES["zeromesh"], overlap_boundary=False)
    assert simulate_few(setups_of(division, "node=1,cluster=0", work, deferring)) is None
    for strategy in ("node=1,cluster=0", "node=2,cluster=1", "node=3,cluster=1"):
        setups = setups_of(division, strategy, work, deferring)
        found, whole = simulate_few(setups), simulate_divided(setups)
        assert found is None or found == pytest.approx(
            (whole.step_s, whole.memory.total, whole.host_memory_bytes), rel=1e-9
        )
