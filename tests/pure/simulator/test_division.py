"""Models that are cut beside data: one rank's memory, messages and waits, against formulas."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.planner.setups import rootless_model, small_cluster, small_model
from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import default_constants
from zeromesh.cost.group import Group
from zeromesh.errors import ClusterError, InputError
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import MEGATRON, TransformerShape
from zeromesh.model.spec import ModelSpec, Recomputation, UnitKind
from zeromesh.model.trainable import with_trainable
from zeromesh.model.transformer import build
from zeromesh.parallel import SCHEDULES, Parallel
from zeromesh.simulator.division import Division
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

A800 = preset("a800-8x-hdr")
SEQ = 256


def model(layers: int = 4, *, experts: int = 0) -> ModelSpec:
    of_experts = {"experts": experts, "experts_per_token": 2} if experts else {}
    sizes = {"hidden": 512, "layers": layers, "heads": 8, "kv_heads": 4, "ffn": 1536, "vocab": 2048}
    return build(TransformerShape(name="small", family="llama", **sizes, **of_experts))  # type: ignore[arg-type]


def run(
    spec: ModelSpec,
    cluster: Cluster,
    strategy: str,
    *,
    micro_batches: int = 4,
    micro_batch: int = 1,
    recomputation: Recomputation = Recomputation.NONE,
    **degrees: int | str | bool,
) -> Simulation:
    parallel = Parallel(**degrees)  # type: ignore[arg-type]  # by name
    ranks = cluster.world // parallel.tp // parallel.pp // parallel.cp
    workload = FixedWorkload(
        seq_len=SEQ,
        global_batch_tokens=SEQ * micro_batch * micro_batches * ranks,
        micro_batch=micro_batch,
        recomputation=recomputation,
        parallel=parallel,
    )
    return simulate(spec, cluster, strategy, workload)


def sent(simulation: Simulation, axis: str) -> float:
    return next(each.bytes_sent_per_device for each in simulation.axes if each.axis == axis)


def exposed(simulation: Simulation, axis: str, name: str) -> float:
    return sum(seconds for on, what, seconds in simulation.exposed if (on, what) == (axis, name))


# Tensor parallelism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_a_layer_sends_what_four_sums_do(tp: int, sequence_parallel: bool) -> None:
    """4 * 2 (t - 1)/t * b s h elements a layer and micro-batch, and half of that again where all is recomputed. Of a
    forward's two gathers and two scatters selective recomputation repeats the gathers alone; without sequence
    parallelism all."""
    cluster, cut = small_cluster(4, 2), {"tp": tp, "sequence_parallel": sequence_parallel}
    sums = 3 * 2 * (tp - 1) / tp * 2 * SEQ * 512 * 2
    counts = {Recomputation.NONE: 4, Recomputation.SELECTIVE: 5 if sequence_parallel else 6, Recomputation.FULL: 6}
    for each, count in counts.items():
        kept = {"micro_batches": 3, "micro_batch": 2, "recomputation": each}
        more, less = (
            sent(run(model(layers), cluster, "node=3,cluster=1", **kept, **cut), "tp")  # type: ignore[arg-type]
            for layers in (5, 4)
        )
        assert more - less == pytest.approx(count * sums, rel=1e-12)
        # Embedding and head: one half of a layer's.
        assert less == pytest.approx((4 * count + 2) * sums, rel=1e-12)


def test_a_rank_of_tensor_parallelism_holds_its_part() -> None:
    """h 512, 4 layers, f 1536, V 2048, half of the heads; norms are whole. Each buffer is padded to 8 for each rank."""
    found = run(model(), small_cluster(4, 2), "node=0,cluster=0", tp=2)
    attention, feed_forward = (2 * 512 * 512 + 2 * 512 * 256) // 2, 3 * 512 * 1536 // 2
    numel = 4 * (attention + feed_forward + 2 * 512) + 2 * 2048 * 512 // 2 + 512
    assert found.memory.params == 2 * numel
    assert found.memory.grads == 4 * numel
    assert found.memory.optimizer == 12 * numel
    assert found.world == 8 and [axis.size for axis in found.axes] == [2, 2, 2]
    whole = run(model(), small_cluster(4, 2), "node=0,cluster=0", tp=2, sequence_parallel=False)
    assert found.memory.activations < whole.memory.activations


@pytest.mark.parametrize(("tp", "measured"), [(1, 514.563), (2, 273.282), (4, 136.885), (8, 68.320)])
def test_activations_of_a_layer_are_near_those_of_megatron(tp: int, measured: float) -> None:
    """Galvatron's profile of a layer of Llama 2 7B with sequence parallelism, MiB for 4096 tokens (PKU-DAIR/
    Hetu-Galvatron@cea12ff, memory_profiling_bf16_llama2-7b_all.json, tp_activation_per_bsz_dict)."""
    shape = model_preset("llama2-7b").built_from
    assert shape is not None
    units = build(shape.shape, kernels=MEGATRON, parallel=Parallel(tp=tp)).units
    block = next(unit for unit in units if unit.kind is UnitKind.BLOCK)
    predicted = 4096 * block.saved_bytes(4096, Recomputation.NONE) / 2**20
    assert predicted == pytest.approx(measured, rel=1e-3 if tp == 1 else 0.065)


def test_adapters_and_links_of_a_cut_model() -> None:
    whole = with_trainable(model(), "lora:8")
    part = Division.of(whole, small_cluster(4, 2), Parallel(tp=2), seq_len=SEQ).parts[0].model
    (block,) = (unit for unit in part.units if unit.kind is UnitKind.BLOCK)
    shapes = {tensor.name: tensor.shape for tensor in block.tensors}
    assert shapes["self_attn.q_proj.lora_A.weight"] == (8, 512)
    assert shapes["self_attn.q_proj.lora_B.weight"] == (256, 8)
    assert shapes["self_attn.o_proj.lora_A.weight"] == (8, 256)
    # Eight groups of one GPU of each node share its NICs, whether the others are data-parallel or not.
    constants = default_constants()
    whole, rest = A800.take(64), A800.take(64).cut(inner=4, outer=2)
    assert rest.axes == (("node", 2), ("cluster", 4)) and rest.world == 8 and rest.devices == 64
    one, other = (Group.of(cluster, [("cluster", 4)], constants).hops for cluster in (whole, rest))
    assert one == other
    with pytest.raises(ClusterError, match="no part of cluster"):
        A800.take(64).cut(inner=3)


# Context and experts --------------------------------------------------------------------------------------------------


def test_context_parallelism_gathers_keys_and_values() -> None:
    """Forward, and in the backward again with a scatter of their gradients: 3 (c - 1) of a rank's own, of which it has
    s/c tokens of 2 * 256 elements. Weights are sharded over these ranks as over all others."""
    found, without = (run(model(), small_cluster(4, 2), "node=3,cluster=1", cp=cp, micro_batch=2) for cp in (4, 1))
    own = 2 * SEQ / 4 * 2 * 256 * 2
    assert sent(found, "cp") == pytest.approx(4 * 4 * 3 * 3 * own, rel=1e-12)
    assert found.memory.params == without.memory.params and sent(found, "node") == sent(without, "node")
    assert found.memory.activations < 0.5 * without.memory.activations


@pytest.mark.parametrize(("strategy", "experts"), [("node=3,cluster=1", "node=1,cluster=1"), ("node=0,cluster=0", "")])
def test_experts_lie_over_ranks_of_their_own(strategy: str, experts: str) -> None:
    """Four ranks of a node share 8 experts: each holds 2, which the two nodes hold alike; all else as before."""
    spec, cluster = model(experts=8), small_cluster(4, 2)
    found, whole = (run(spec, cluster, strategy, ep=ep, micro_batch=2) for ep in (4, 1))
    routed = 2 * SEQ * 2 * 512 * 2
    assert sent(found, "ep") == pytest.approx(4 * 4 * 4 * 3 / 4 * routed, rel=1e-12)
    of_experts = 4 * 8 * 3 * 512 * 1536
    dense = spec.num_params - of_experts
    if experts:  # 3 over the node, 1 over the two: of 2 experts all parameters, half of their states
        assert found.memory.params == pytest.approx(2 * (dense / 4 + of_experts / 4), rel=1e-3)
        assert found.memory.optimizer == pytest.approx(12 * (dense / 8 + of_experts / 4 / 2), rel=1e-3)
        assert sent(found, "experts:node") == 0 and sent(found, "experts:cluster") > 0
        assert found.memory.buffers < whole.memory.buffers
    else:
        assert found.memory.params == pytest.approx(2 * (dense + of_experts / 4), rel=1e-3)


# Pipelines ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.sampled_from([2, 4]), st.integers(1, 4), st.sampled_from(SCHEDULES))
def test_bubbles_are_those_of_the_papers(pp: int, rounds: int, schedule: str) -> None:
    """Equal ranks: (p - 1)/(m + p - 1) of GPipe's and 1F1B's pipeline, a v-th of the bubble with v chunks each, and
    (p - 1)(F + B - 2 W) of zero-bubble."""
    chunks = 2 if schedule == "interleaved" else 1
    blocks = replace(rootless_model(), units=tuple(replace(u, count=8) for u in rootless_model().units))
    kept = {"pp": pp, "pp_schedule": schedule, "pp_chunks": chunks}
    count = pp * rounds
    found = run(blocks, small_cluster(pp), "node=0", micro_batches=count, **kept)
    longer = run(blocks, small_cluster(pp), "node=0", micro_batches=count + pp, **kept)
    one = (longer.step_s - found.step_s) / pp
    bubble = exposed(found, "pp", "bubble")
    if schedule == "zero-bubble":
        assert 0 < bubble < 0.6 * (pp - 1) * one
    else:
        assert bubble == pytest.approx((pp - 1) * one / chunks, rel=1e-9)
    if schedule in ("gpipe", "1f1b"):
        assert bubble / (count * one + bubble) == pytest.approx((pp - 1) / (count + pp - 1), rel=1e-9)
    assert len({rank.step_s for rank in found.ranks}) == 1 or schedule != "gpipe"


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    """In stages: 1F1B has p - rank of them, GPipe m, interleaved p + (p - 1)/v on the first rank (2104.04473)."""
    one_f = Parallel(pp=4)
    assert [one_f.in_flight(rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert one_f.in_flight(0, 4) == 4 and Parallel(pp=4, pp_schedule="gpipe").in_flight(3, 16) == 16
    assert Parallel(pp=4, pp_schedule="interleaved", pp_chunks=2).in_flight(0, 16) == 4 + 3 / 2
    spec, cluster = model(8), small_cluster(4, 2)
    block = SEQ * next(u for u in spec.units if u.kind is UnitKind.BLOCK).saved_bytes(SEQ, Recomputation.NONE)
    embedding = SEQ * 8
    memory = {}
    for each in ("1f1b", "gpipe"):
        found = run(spec, cluster, "node=3,cluster=0", micro_batches=6, pp=2, pp_schedule=each)
        memory[each] = found.ranks[0].memory_bytes
    # Four more in flight, of four blocks, the ids and the output; the allocator's share goes with them.
    more = 4 * (4 * block + embedding + SEQ * 512 * 2) * (1 + default_constants().allocator_share)
    assert memory["gpipe"] - memory["1f1b"] == pytest.approx(more, rel=1e-9)


def test_who_holds_what_of_a_pipeline() -> None:
    division = Division.of(model(8), small_cluster(4, 4), Parallel(pp=4), seq_len=SEQ)
    assert division.cluster.axes == (("node", 4), ("cluster", 1))
    assert [(part.rank, part.count) for part in division.parts] == [(0, 1), (1, 2), (3, 1)]
    kinds = [[unit.kind for unit in part.model.units if unit.num_params] for part in division.parts]
    assert kinds == [
        [UnitKind.EMBEDDING, UnitKind.BLOCK],
        [UnitKind.BLOCK],
        [UnitKind.ROOT, UnitKind.BLOCK, UnitKind.HEAD],
    ]
    assert sum(part.count * part.model.num_params for part in division.parts) == model(8).num_params
    uneven = Division.of(
        model(9), small_cluster(4, 4), Parallel(pp=2, pp_chunks=2, pp_schedule="interleaved"), seq_len=SEQ
    )
    of_ranks = [sum(u.count for u in part.model.units if u.kind is UnitKind.BLOCK) for part in uneven.parts]
    assert of_ranks == [4, 5]  # stages of 2, 2, 2 and 3
    # The slowest rank sets the step and the fullest the memory.
    found = run(model_preset("llama-7b"), A800.take(64), "node=3,cluster=1", micro_batches=8, pp=4)
    assert found.step_s == max(rank.step_s for rank in found.ranks)
    assert found.memory.total == max(rank.memory_bytes for rank in found.ranks) == found.ranks[0].memory_bytes
    assert found.to_json()["pipeline"][0] == asdict(found.ranks[0])
    assert found.to_json()["parallel"]["pp"] == 4
    # A stage is handed on once each way: s h elements; cut along the sequence where tensor parallelism is.
    found = run(model(), small_cluster(4, 2), "node=3,cluster=1", pp=2, tp=2)
    assert sent(found, "pp") == pytest.approx(4 * 2 * SEQ * 512 * 2 / 2, rel=1e-12)


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"pp_schedule": "1fb1"}, r"pp_schedule must be one of gpipe, .* got '1fb1': did you mean 1f1b"),
        ({"pp_chunks": 2}, "1f1b has one stage a rank, got 2 chunks"),
        ({"pp_schedule": "interleaved"}, "interleaved needs at least 2 chunks"),
        ({"tp": 4}, "tp=4 is wider than node, which has 2: each layer would wait"),
        ({"tp": 3}, "tp must divide the heads of small, 8; got 3: take 2 or 4"),
        ({"tp": 8}, "tp must divide the key and value heads of small, 4; got 8"),
        ({"tp": 4, "cp": 3}, r"2 \* cp must divide the sequence length of small, 256; got 6"),
        ({"pp": 2, "pp_chunks": 4, "pp_schedule": "interleaved"}, "4 stages each needs 8 layers, and small has 4"),
        ({"ep": 2}, "ep=2 cuts experts, of which small has none"),
        ({"cp": 32}, "cp=32 must take a part of the innermost data-parallel ranks, which are node 2, cluster 4"),
    ],
)
def test_degrees_that_do_not_divide(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Division.of(model(), small_cluster(2, 4), Parallel(**degrees), seq_len=SEQ)  # type: ignore[arg-type]


def test_other_wrong_degrees() -> None:
    cluster, chunks = small_cluster(2, 4), {"micro_batches": 3, "pp_schedule": "interleaved", "pp_chunks": 2}
    with pytest.raises(InputError, match="pp=4 must take a part of the outermost ranks"):
        Division.of(model(), small_cluster(4, 3), Parallel(pp=4), seq_len=SEQ)
    with pytest.raises(InputError, match="ties its embedding to its head"):
        Division.of(small_model(tied=True), cluster, Parallel(pp=2), seq_len=SEQ)
    with pytest.raises(InputError, match=r"name a preset or the model's config\.json"):
        Division.of(replace(model(), built_from=None), cluster, Parallel(tp=2), seq_len=SEQ)
    with pytest.raises(InputError, match="needs at least 4 micro-batches a step; got 2"):
        run(model(), cluster, "node=3,cluster=1", micro_batches=2, pp=4)
    with pytest.raises(InputError, match="a multiple of 2 with several chunks a rank; got 3"):
        run(model(), cluster, "node=3,cluster=1", pp=2, **chunks)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ep=4 must take whole parts of the innermost axes"):
        run(model(experts=8), small_cluster(12, 2), "node[6]=3,node[2]=0,cluster=0", ep=4)
    with pytest.raises(InputError, match="owners step on whole tensors, which tp and ep divide; got tp=2 with muon"):
        FixedWorkload(seq_len=SEQ, global_batch_tokens=SEQ, optimizer="muon", parallel=Parallel(tp=2))
