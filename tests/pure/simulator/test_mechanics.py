"""What the engines of published tables do differently, seen from outside."""

from dataclasses import replace

import pytest

from zeromesh.cluster import preset
from zeromesh.model import preset as model_preset
from zeromesh.simulator import Workload, find_engine, simulate

A800 = preset("a800-8x-hdr")
LLAMA = model_preset("llama-7b")
WORK = Workload(seq_len=4096, global_batch_tokens=4096 * 64)


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
    flat, ho_ring = (
        simulate(LLAMA, A800.take(64), f"node=3,cluster=3;collective={c}", WORK, record=True)
        for c in ("flat", "ho_ring")
    )
    for result in (flat, ho_ring):
        assert result.trace is not None
        assert {e.axis for e in result.trace.events if e.kind == "communicate"} == {"node+cluster"}
    assert ho_ring.axes[1].bytes_sent_per_device < flat.axes[1].bytes_sent_per_device * 1.01


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
