"""What the engines of published tables do differently, seen from outside."""

from dataclasses import replace

import pytest

from zeromesh.cluster import Cluster, Device, Level, preset
from zeromesh.collectives.ho_ring.cost import overlapped_cost
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.model import preset as model_preset
from zeromesh.schedule import FlatBuffer, Role, Schedule, Unit
from zeromesh.schedule.memory import part_numel
from zeromesh.simulator import FixedWorkload, find_engine, simulate
from zeromesh.simulator.chains import Chains
from zeromesh.strategy import Layout

A800 = preset("a800-8x-hdr")
ON_CORES = replace(A800, device=replace(A800.device, cores=64.0))
"""Which exchange messages, so that levels overlap."""
LLAMA = model_preset("llama-7b")
WORK = FixedWorkload(seq_len=4096, global_batch_tokens=4096 * 64)


def collectives(engine, strategy, workload=WORK) -> set[tuple[str, str]]:
    trace = simulate(LLAMA, A800.take(64), strategy, workload, engine=engine, record=True).trace
    assert trace is not None
    return {(event.axis or "", event.name) for event in trace.events if event.kind == "communicate"}


def test_ours_goes_axis_by_axis():
    assert collectives("zeromesh", "node=3,cluster=3") == {
        ("node", "unshard all_gather"),
        ("cluster", "unshard all_gather"),
        ("node", "reduce reduce_scatter"),
        ("cluster", "reduce reduce_scatter"),
    }


def test_fsdp_gathers_over_its_whole_group():
    assert collectives("fsdp", "node=3,cluster=3") == {
        ("node+cluster", "unshard all_gather"),
        ("node+cluster", "reduce reduce_scatter"),
    }
    assert ("cluster", "reduce all_reduce") in collectives("fsdp", "node=3,cluster=0")


def test_amsp_reduces_to_all_and_broadcasts_from_owners():
    assert collectives("amsp", "node=1,cluster=0") == {
        ("node+cluster", "reduce all_reduce"),
        ("node", "refresh broadcast"),
    }


def test_a_flat_ring_sends_no_less_than_its_share_on_each_axis():
    result = simulate(LLAMA, A800.take(64), "node=3,cluster=3", WORK, engine="fsdp")
    sent = {axis.axis: axis.bytes_sent_per_device for axis in result.axes}
    gathers_and_reductions = 2 * LLAMA.num_params * 63 / 64 * 3
    assert sum(sent.values()) == pytest.approx(gathers_and_reductions, rel=0.1)
    assert sent["cluster"] == pytest.approx(sum(sent.values()) / 8)


def test_a_strategys_collective_option_is_honoured():
    (flat, joint), (ho_ring, paired), (_, in_turn) = (
        (found, {e.axis for e in found.trace.events if e.kind == "communicate"})
        for cluster, c in ((A800, "flat"), (ON_CORES, "ho_ring"), (A800, "ho_ring"))
        if (found := simulate(LLAMA, cluster.take(64), f"node=3,cluster=3;collective={c}", WORK, record=True)).trace
    )
    assert joint == paired == {"node+cluster"}
    assert in_turn == {"node", "cluster"}  # as the engine does where ranks exchange no messages
    assert ho_ring.axes[1].bytes_sent_per_device < flat.axes[1].bytes_sent_per_device * 1.01


def test_several_replicated_levels_are_summed_over_by_level_by_us_and_at_once_by_others():
    assert collectives("zeromesh", "node=0,cluster=0") == {
        ("node", "reduce reduce_scatter"),
        ("cluster", "reduce all_reduce"),
        ("node", "reduce all_gather"),
    }
    for engine in ("fsdp", "deepspeed", "amsp"):
        assert collectives(engine, "node=0,cluster=0") == {("node+cluster", "reduce all_reduce")}
        assert simulate(LLAMA, A800.take(64), "node=0,cluster=0", WORK, engine=engine).strategy == "node=0,cluster=0"


def test_overlapped_reductions_have_the_slices_that_the_engine_has():
    """16 GB in fp32 on 4 x 4 ranks, in messages: shards of 1 GiB, whose slices of 1 MiB the workspace shortens."""
    cores = Device(name="d", memory_bytes=1e12, peak_flops={"fp32": 1e12}, cores=1.0)
    levels = tuple(
        Level(name=name, size=4, bandwidth_bytes_per_s=rate, latency_s=0.0)
        for name, rate in (("node", 1e10), ("cluster", 1e9))
    )
    cluster = Cluster(name="c", device=cores, levels=levels)
    assert cluster.messages
    model = TransferModel(cluster, default_constants(), ComputeModel(device=cores, constants=default_constants()))
    flat = FlatBuffer(numel=1 << 32, param_dtype="fp32", master_dtype="fp32")
    schedule = Schedule.of(
        Layout.of("node=2,cluster=2;collective=ho_ring", cluster.axes),
        [Unit(name="block", role=Role.BLOCK, buffers=(flat,))],
    )
    (work,) = Chains(schedule, find_engine("zeromesh"), model).reduce_micro(0)
    major, minor = (model.cost(step) for step in schedule.placed[0][0].routes["reduce"].steps)
    slices = -(-(1 << 28) // part_numel(8 << 20, 4, 4, terms=4 * 15, longest_bytes=1 << 20))
    assert slices > 1024
    assert work.cost == overlapped_cost(major, minor, slices)


def test_overlap_can_be_taken_away_piece_by_piece():
    whole = find_engine("amsp")
    variants = [
        whole,
        replace(whole, overlap_refresh=False),
        replace(whole, overlap_refresh=False, overlap_boundary=False),
        replace(whole, overlap_refresh=False, overlap_boundary=False, overlap_gather=False, overlap_reduce=False),
    ]
    steps = [
        simulate(LLAMA, A800.take(64), "node[4]=3,node[2]=1,cluster=0", WORK, engine=mechanics).step_s
        for mechanics in variants
    ]
    assert steps == sorted(steps)
    assert steps[3] > steps[0] * 1.1


def test_overlapped_levels_take_no_longer_and_send_the_same():
    for strategy in ("node=3,cluster=3", "node=3,cluster=3k", "node=2,cluster=2", "node[4]=3,node[2]=2,cluster=2"):
        plain, ho_ring = (
            simulate(LLAMA, ON_CORES.take(64), strategy + option, WORK) for option in ("", ";collective=ho_ring")
        )
        assert [a.bytes_sent_per_device for a in ho_ring.axes] == [a.bytes_sent_per_device for a in plain.axes]
        assert ho_ring.step_s <= plain.step_s * (1 + 1e-9)


def test_parameters_gathered_in_pieces_pay_each_ones_latency_and_send_the_same():
    whole = replace(find_engine("deepspeed"), gather_numel=0)
    apart, together = (
        simulate(LLAMA, A800.take(64), "zero3", WORK, engine=mechanics) for mechanics in ("deepspeed", whole)
    )
    block = next(unit for unit in LLAMA.units if unit.count > 1)
    more = -(-block.num_params // 50_000_000) - 1
    assert more == 4
    ring_s = default_constants().launch_s + 56 * 6e-6 + 7 * 15e-6  # 63 steps, 7 of them between nodes
    gathers = 2 * block.count - 2  # the last blocks are still there in the backward
    exposed = apart.exposed_comm_s - together.exposed_comm_s
    assert exposed >= 0.95 * gathers * more * ring_s
    assert [a.bytes_sent_per_device for a in apart.axes] == pytest.approx(
        [a.bytes_sent_per_device for a in together.axes], rel=1e-6
    )


def test_levels_overlap_where_nothing_is_copied_between_them():
    def pairs(strategy: str, **dtypes: str) -> set[tuple[str, str]]:
        work = replace(WORK, **dtypes)
        result = simulate(LLAMA, ON_CORES.take(64), f"{strategy};collective=ho_ring", work, record=True)
        assert result.trace is not None
        return {(e.name, e.axis) for e in result.trace.events if e.kind == "communicate" and "+" in e.axis}

    gathers, reductions = ("unshard all_gather", "node+cluster"), ("reduce reduce_scatter", "node+cluster")
    assert pairs("node=3,cluster=3") == {gathers, reductions}
    assert pairs("node=3@int8/,cluster=3") == {reductions}
    assert pairs("node=3@/int4,cluster=3") == {gathers}
    # The copy that is kept lies between the two gathers of a block; root, embedding and head keep none.
    kept = simulate(LLAMA, ON_CORES.take(64), "node=3,cluster=3k;collective=ho_ring", WORK, record=True)
    assert kept.trace is not None
    blocks = {e.axis for e in kept.trace.events if e.name == gathers[0] and "layers" in e.unit}
    assert blocks == {"node", "cluster"}


@pytest.mark.parametrize("strategy", ["node=3,cluster=0", "node=3,cluster=3"])
def test_a_device_that_stands_still_for_the_host_does_so_at_each_gather(strategy):
    """A block of llama-7b has 202 M elements, five gathers of at most 5e7; embedding and head three each, norms one."""
    engine = find_engine("deepspeed")
    steps = [
        simulate(LLAMA, A800.take(64), strategy, WORK, engine=replace(engine, host_gather_s=host)).step_s
        for host in (0.0, 1e-3)
    ]
    forward_and_back = (32 * 5 + 2 * 3 + 1) + 30 * 5  # the last two blocks are still there
    assert steps[1] - steps[0] == pytest.approx(1e-3 * forward_and_back * WORK.micro_batches(64), rel=0.02)
