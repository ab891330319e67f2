"""Megatron's published figures from 2025 and 2026: Llama in fp8 on H100 and Blackwell, and collectives of 8 H100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from validation.assumptions import assumed
from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.collective import Operation, collective_cost
from zeromesh.cost.constants import default_constants
from zeromesh.cost.group import Group
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import MEGATRON
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import Parallel
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

BRIDGE, BRIDGE_CUT, SYMMETRIC = "Megatron Bridge", "Megatron Bridge, tp and pp", "Collectives of 8 H100"

_MODELS = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b"}
_CLUSTERS = {
    "DGX-GB300": "gb300-nvl72",
    "DGX-GB200": "gb200-nvl72",
    "DGX-B200": "b200-8x-ndr",
    "DGX-H100": "h100-8x-ndr",
}
_FSDP = "fsdp(0=DDP+distributed optimizer)"
_PRODUCTS = {"FP8": "fp8", "FP8-CS": "fp8", "FP8-MX": "mxfp8", "MXFP8": "mxfp8"}
_OPERATIONS: dict[str, Operation] = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}


def bridge_rows() -> Iterator[Row]:
    """Yields tokens per second and GPU. A cell "37556 (36108)" has figures for two precisions."""
    for entry in published("megatron_bridge_llama"):
        precisions = re.findall(r"[A-Z][A-Z0-9-]+|see page", entry["precision"])
        figures = re.findall(r"\d+", entry["tokens_per_s_per_gpu"])
        for precision, figure in zip(precisions, figures, strict=False):
            row = Row(
                table=BRIDGE if entry["tp"] == entry["pp"] == entry["cp"] == "1" else BRIDGE_CUT,
                label=f"{entry['model']}, {entry['gpus']} {entry['system']}, {precision}, "
                f"tp {entry['tp']}, pp {entry['pp']}, cp {entry['cp']}, "
                f"{'FSDP' if entry[_FSDP] != '0' else 'ZeRO-1'}, {entry['release'].split()[0]}",
                group=f"{entry['model']}, {entry['gpus']} {entry['system']}, {entry['release']}",
                unit="tokens/s/GPU",
                measured=float(figure),
                excluded=_excluded(precision, entry),
            )
            choices = assumed("bridge", "recomputation").choices if row.in_scope else ()
            predictions = [_rate(tuple(entry.items()), _PRODUCTS[precision], choice) for choice in choices]
            yield predicted_row(row, predictions)


def _excluded(precision: str, entry: dict[str, str]) -> str:
    if (entry["pp"], entry["vp"]) == ("16", "8"):
        return "128 stages: embedding and head count as two of the layers"
    if precision == "NVFP4":
        return "products in 4 bits are not priced"
    return "the precision is not stated" if precision not in _PRODUCTS else ""


@cache
def _rate(entry: tuple[tuple[str, str], ...], products: str, recomputation: str) -> float:
    row = dict(entry)
    chunks = int(row["vp"]) if row["vp"].isdecimal() else 1
    parallel = Parallel(
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        cp=int(row["cp"]),
        pp_chunks=chunks,
        pp_schedule="interleaved" if chunks > 1 else "1f1b",
    )
    workload = FixedWorkload(
        seq_len=int(row["seq_len"]),
        global_batch_tokens=int(row["gbs"]) * int(row["seq_len"]),
        micro_batch=int(row["mbs"]),
        recomputation=Recomputation(recomputation),
        parallel=parallel,
    )
    model = model_preset(_MODELS[row["model"]], kernels=replace(MEGATRON, products=products))
    sharded = row[_FSDP] != "0"
    found = simulate(model, _cluster(row), "zero3" if sharded else "zero1", workload, engine="fsdp")
    return found.tokens_per_s_per_device


def _cluster(row: dict[str, str]) -> Cluster:
    """Jobs on several racks use 64 of each rack's 72 GPUs."""
    found, gpus = cluster_preset(_CLUSTERS[row["system"]]), int(row["gpus"])
    first, *others = found.levels
    if first.size == 72 and gpus > 64:
        share = 64 / first.size
        outer = [replace(lv, bandwidth_bytes_per_s=lv.bandwidth_bytes_per_s * share, ports=64) for lv in others]
        found = replace(found, levels=(replace(first, size=64), *outer))
    return found.take(gpus)


def symmetric_rows() -> Iterator[Row]:
    """Yields ring collectives inside a node. The table also has collectives in symmetric memory, which are not
    priced."""
    cluster, constants = cluster_preset("h100-8x-ndr").take(8), default_constants()
    group = Group.of(cluster, [("node", 8)], constants)
    for entry in published("symmetric_memory_8xh100"):
        operation, mebibytes = _OPERATIONS[entry["collective"]], int(entry["message_MiB"])
        seconds = collective_cost(group, operation, mebibytes * 2**20, constants).seconds
        row = Row(
            table=SYMMETRIC,
            label=f"{operation} of {mebibytes} MiB",
            group=operation,
            unit="us",
            measured=float(entry["ring_us"]),
        )
        yield predicted_row(row, [seconds * 1e6])
