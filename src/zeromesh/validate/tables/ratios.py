"""Tables that publish one system relative to another: ZeRO++ on V100, PaRO on A100, three levels on Frontier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from zeromesh.cluster import Cluster
from zeromesh.cluster import preset as cluster_preset
from zeromesh.model import ModelSpec, Recomputation, with_trainable
from zeromesh.model import preset as model_preset
from zeromesh.model.presets import preset_shape
from zeromesh.model.shape import EAGER, Kernels
from zeromesh.model.transformer import build
from zeromesh.simulator import ENGINES, FixedWorkload, Mechanics, simulate
from zeromesh.validate.assumptions import assumed
from zeromesh.validate.row import Row, predicted_row, published

ZEROPP, PARO, FRONTIER = "ZeRO++ over ZeRO-3", "PaRO", "Frontier"

_DEEPSPEED = ENGINES["deepspeed"]
_OVERLAPPING = replace(_DEEPSPEED, overlap_gather=True, overlap_refresh=True)
_PARO_MODELS = {"7B": "llama-7b", "65B": "llama-65b"}
_PARO_KERNELS = {"unfused attention": Kernels(fused_norm=False, fused_attention=False), "fused attention": EAGER}
_TRAINABLE = {"full": "all", "partial 1/16 trainable": "0.0625", "PEFT 3/1000 trainable": "0.003"}


@cache
def gpt(layers_by_hidden: str) -> ModelSpec:
    """A GPT of "layers x hidden" with four times hidden in its feed-forward network."""
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
    """TFLOPS of ZeRO++ over ZeRO-3 on 384 V100."""
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
    """Throughput of one strategy over another; the PEFT row is an outlier of the paper's own formulas."""
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
        recomputations = [Recomputation.FULL] if size == "65B" else [Recomputation.NONE, Recomputation.FULL]
        choices = product(
            assumed("paro", "nics").choices,
            recomputations,
            assumed("paro", "overlap").choices,
            assumed("paro", "kernels").choices,
        )
        ratios = [
            _paro_ratio(size, scenario, gpus, entry["strategy"], entry["baseline"], *choice) for choice in choices
        ]
        yield predicted_row(row, ratios)


def _paro_ratio(
    size: str,
    scenario: str,
    gpus: int,
    strategy: str,
    baseline: str,
    nics: str,
    recomputation: Recomputation,
    overlap: str,
    kernels: str,
) -> float:
    ours, theirs = (
        paro_step_s(size, scenario, gpus, name, recomputation, overlap, nics=int(nics), kernels=kernels)
        for name in (strategy, baseline)
    )
    return theirs / ours


@cache
def paro_step_s(
    size: str,
    scenario: str,
    gpus: int,
    strategy: str,
    recomputation: Recomputation,
    overlap: str = "yes",
    collective: str = "auto",
    nics: int = 1,
    kernels: str = "",
) -> float:
    """Seconds of a step of PaRO's set-up: seq 512, micro-batch 4, 10 accumulations unless the scenario says else."""
    model = model_preset(_PARO_MODELS[size], kernels=_PARO_KERNELS[kernels or assumed("paro", "kernels").value])
    micro_batches = 135 if "540 sequences" in scenario else 10
    trainable = _TRAINABLE[next(key for key in _TRAINABLE if scenario.startswith(key))]
    workload = FixedWorkload(
        seq_len=512,
        global_batch_tokens=512 * 4 * micro_batches * gpus,
        micro_batch=4,
        recomputation=recomputation,
        grad_dtype="bf16",
    )
    return simulate(
        with_trainable(model, trainable),
        paro_cluster(gpus, nics),
        f"paro:{strategy}" + ("" if collective == "auto" else f";collective={collective}"),
        workload,
        engine=_mechanics(overlap),
    ).step_s


def paro_cluster(gpus: int, nics: int) -> Cluster:
    """PaRO's nodes with `nics` links of 100 Gbit/s each."""
    cluster = cluster_preset("a100-8x-100g").take(gpus)
    outer = cluster.levels[-1]
    wider = replace(outer, bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s * nics, ports=nics)
    return replace(cluster, levels=(*cluster.levels[:-1], wider))


def frontier_rows() -> Iterator[Row]:
    """TFLOPS per GCD relative to ZeRO-3, 20B GPT on 384 GCDs."""
    strategies = {"ZeRO-3": ("zero3",), "ZeRO++": ("zero++",), "3-level": assumed("frontier", "layout").choices}
    for entry in published("frontier_mi250x"):
        system = entry["system"]
        row = Row(
            table=FRONTIER,
            label=f"{entry['model']}, {entry['gcds']} GCDs, {system}",
            group=entry["model"],
            unit="of ZeRO-3",
            measured=float(entry["tflops_per_gcd_relative_to_zero3"]),
            excluded="the unit of the others" if system == "ZeRO-3" else "",
        )
        choices = product(
            assumed("frontier", "model").choices,
            assumed("frontier", "micro_batch").choices,
            assumed("frontier", "accumulation").choices,
            strategies[system],
        )
        ratios = [_frontier_ratio(*choice, int(entry["gcds"])) for choice in choices]
        yield predicted_row(row, ratios)


def _frontier_ratio(shape: str, micro_batch: str, accumulation: str, strategy: str, gcds: int) -> float:
    baseline, step_s = (
        frontier_step_s(shape, int(micro_batch), int(accumulation), name, gcds) for name in ("zero3", strategy)
    )
    return baseline / step_s


@cache
def frontier_step_s(shape: str, micro_batch: int, micro_batches: int, strategy: str, gcds: int) -> float:
    """Seconds of one step."""
    seq_len = int(assumed("frontier", "seq_len").value)
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * micro_batch * micro_batches * gcds,
        micro_batch=micro_batch,
        recomputation=Recomputation.FULL,
    )
    cluster = cluster_preset("frontier-mi250x").take(gcds)
    strategy = strategy if "=" in strategy else _on_three_levels(strategy)
    return simulate(gpt(shape), cluster, strategy, workload, engine=_DEEPSPEED).step_s


def _on_three_levels(name: str) -> str:
    node = {"zero3": "3", "zero++": "3@int8/int4"}[name]
    outer = {"zero3": "3", "zero++": "3k@int8/int4"}[name]
    return f"package={node},node={node},cluster={outer}"
