"""Tables that publish one system relative to another: ZeRO++ on V100, PaRO on A100, three levels on Frontier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from validation.assumptions import Point, assumed, open_points
from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.presets import preset_shape
from zeromesh.model.shape import EAGER, Kernels
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.model.trainable import with_trainable
from zeromesh.model.transformer import build
from zeromesh.simulator.mechanics import ENGINES, Mechanics
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

ZEROPP, PARO, FRONTIER = "ZeRO++ over ZeRO-3", "PaRO", "Frontier"

_DEEPSPEED = ENGINES["deepspeed"]
_OVERLAPPING = replace(_DEEPSPEED, overlap_gather=True, overlap_refresh=True)
_PARO_MODELS = {"7B": "llama-7b", "65B": "llama-65b"}
_PARO_KERNELS = {"unfused attention": Kernels(fused_norm=False, fused_attention=False), "fused attention": EAGER}
_TRAINABLE = {"full": "all", "partial 1/16 trainable": "0.0625", "PEFT 3/1000 trainable": "0.003"}


@cache
def gpt(layers_by_hidden: str) -> ModelSpec:
    """A GPT of "layers x hidden", with a feed-forward size of four times hidden."""
    layers, hidden = (int(part) for part in layers_by_hidden.split("x"))
    shape = preset_shape("gpt-20b")
    return build(
        replace(
            shape,
            name=f"gpt-{layers_by_hidden}",
            layers=layers,
            hidden=hidden,
            heads=hidden // 128,
            kv_heads=hidden // 128,
            ffn=4 * hidden,
        )
    )


def _mechanics(overlap: str) -> Mechanics:
    return _OVERLAPPING if overlap == "yes" else _DEEPSPEED


def zeropp_rows() -> Iterator[Row]:
    """Yields TFLOPS of ZeRO++ over ZeRO-3 on 384 V100."""
    for entry in published("deepspeed_zeropp_v100"):
        gigabits = entry["inter_node_bandwidth"].split("Gbps")[0]
        tokens = int(entry["microbatch_tokens_per_gpu"].removesuffix("K")) * 1024
        row = Row(
            table=ZEROPP,
            label=f"{entry['model']}, {gigabits} Gbit/s, {tokens} tokens per GPU",
            group=f"{gigabits} Gbit/s, {tokens} tokens",
            unit="ratio",
            measured=float(entry["zeropp_tflops_per_gpu"]) / float(entry["zero3_tflops_per_gpu"]),
        )
        choices = product(
            assumed("zeropp", entry["model"]).choices,
            assumed("zeropp", "recomputation").choices,
            assumed("zeropp", "overlap").choices,
        )
        yield predicted_row(row, [_zeropp_ratio(gigabits, tokens, *choice) for choice in choices])


@cache
def _zeropp_ratio(gigabits: str, tokens: int, shape: str, recomputation: str, overlap: str) -> float:
    cluster = cluster_preset(f"dgx2-v100-{gigabits}g").take(384)
    workload = FixedWorkload(
        seq_len=1024,
        global_batch_tokens=tokens * 384,
        micro_batch=tokens // 1024,
        recomputation=Recomputation(recomputation),
        param_dtype="fp16",
        grad_dtype="fp16",
    )
    steps = [
        simulate(gpt(shape), cluster, name, workload, engine=_mechanics(overlap)).step_s for name in ("zero3", "zero++")
    ]
    return steps[0] / steps[1]


def paro_rows() -> Iterator[Row]:
    """Yields throughput of one strategy over another. The PEFT row is an outlier in the paper's own formulas."""
    for entry in published("paro_a100"):
        size, gpus, scenario = entry["model"], int(entry["gpus"]), entry["scenario"]
        row = Row(
            table=PARO,
            label=f"{size}, {scenario}, {gpus} GPUs: {entry['strategy']} over {entry['baseline']}",
            group=f"{size}, {scenario}, {gpus} GPUs",
            unit="ratio",
            measured=float(entry["throughput_ratio"]),
            excluded="the outlier that the paper's formulas do not give either" if scenario.startswith("PEFT") else "",
        )
        pair = (entry["strategy"], entry["baseline"])
        yield predicted_row(row, [paro_gain(size, scenario, gpus, *pair, point) for point in open_points("paro")])


def paro_gain(size: str, scenario: str, gpus: int, strategy: str, baseline: str, point: Point) -> float:
    """Speed of a strategy over the baseline's, with PaRO's open points as in `point`."""
    ours, theirs = (paro_seconds(size, scenario, gpus, name, point) for name in (strategy, baseline))
    return theirs / ours


def paro_seconds(size: str, scenario: str, gpus: int, strategy: str, point: Point) -> float:
    """Seconds of a step of PaRO's set-up: seq 512, micro-batch 4, 10 accumulations unless the scenario says otherwise.
    65B recomputes in any case."""
    full = size == "65B" or point["recomputation"] == "full"
    return _paro_step_s(
        size, scenario, gpus, strategy, full, point["overlap"], int(point["nics"]), _PARO_KERNELS[point["kernels"]]
    )


@cache
def _paro_step_s(
    size: str, scenario: str, gpus: int, strategy: str, full: bool, overlap: str, nics: int, kernels: Kernels
) -> float:
    model = model_preset(_PARO_MODELS[size], kernels=kernels)
    micro_batches = 135 if "540 sequences" in scenario else 10
    trainable = _TRAINABLE[next(key for key in _TRAINABLE if scenario.startswith(key))]
    workload = FixedWorkload(
        seq_len=512,
        global_batch_tokens=512 * 4 * micro_batches * gpus,
        micro_batch=4,
        recomputation=Recomputation.FULL if full else Recomputation.NONE,
        grad_dtype="bf16",
    )
    spec, cluster = with_trainable(model, trainable), paro_cluster(gpus, nics)
    return simulate(spec, cluster, f"paro:{strategy}", workload, engine=_mechanics(overlap)).step_s


def paro_cluster(gpus: int, nics: int) -> Cluster:
    """PaRO's nodes, with `nics` links of 100 Gbit/s each."""
    cluster = cluster_preset("a100-8x-100g").take(gpus)
    outer = cluster.levels[-1]
    wider = replace(outer, bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s * nics, ports=nics)
    return replace(cluster, levels=(*cluster.levels[:-1], wider))


def frontier_rows() -> Iterator[Row]:
    """Yields TFLOPS per GCD relative to ZeRO-3, for a GPT of 20B on 384 GCDs."""
    for entry in published("frontier_mi250x"):
        system, gcds = entry["system"], int(entry["gcds"])
        row = Row(
            table=FRONTIER,
            label=f"{entry['model']}, {entry['gcds']} GCDs, {system}",
            group=entry["model"],
            unit="of ZeRO-3",
            measured=float(entry["tflops_per_gcd_relative_to_zero3"]),
            excluded="the unit of the others" if system == "ZeRO-3" else "",
        )
        yield predicted_row(row, [frontier_ratio("ZeRO-3", system, gcds, point) for point in open_points("frontier")])


def frontier_ratio(baseline: str, system: str, gcds: int, point: Point) -> float:
    """Speed of a system over the baseline's."""
    theirs, ours = (frontier_step_s(name, gcds, point) for name in (baseline, system))
    return theirs / ours


def frontier_step_s(system: str, gcds: int, point: Point) -> float:
    """Seconds of one step of ZeRO-3, ZeRO++ or the paper's three levels."""
    strategy = {"ZeRO-3": _on_three_levels("zero3"), "ZeRO++": _on_three_levels("zero++")}.get(system, point["layout"])
    batch, count, seq_len = (int(point[name]) for name in ("micro_batch", "accumulation", "seq_len"))
    return _frontier_step_s(point["model"], batch, count, seq_len, strategy, gcds, point["overlap"])


@cache
def _frontier_step_s(
    shape: str, micro_batch: int, micro_batches: int, seq_len: int, strategy: str, gcds: int, overlap: str
) -> float:
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * micro_batch * micro_batches * gcds,
        micro_batch=micro_batch,
        recomputation=Recomputation.FULL,
    )
    cluster = cluster_preset("frontier-mi250x").take(gcds)
    return simulate(gpt(shape), cluster, strategy, workload, engine=_mechanics(overlap)).step_s


def _on_three_levels(name: str) -> str:
    node = {"zero3": "3", "zero++": "3@int8/int4"}[name]
    outer = {"zero3": "3", "zero++": "3k@int8/int4"}[name]
    return f"package={node},node={node},cluster={outer}"
