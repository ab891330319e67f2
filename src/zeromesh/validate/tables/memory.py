"""Published peak memory: InternEvo on A800, Galvatron's per-layer profile on A100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zeromesh.cluster import preset as cluster_preset
from zeromesh.model import ModelSpec, Recomputation, UnitKind
from zeromesh.model import preset as model_preset
from zeromesh.model.shape import EAGER, FUSED
from zeromesh.simulate import Workload, simulate
from zeromesh.validate.assumptions import assumed
from zeromesh.validate.row import Row, predicted_row, published

INTERNEVO, GALVATRON = "InternEvo memory", "Galvatron memory"

_KERNELS = {"fused": FUSED, "eager": EAGER}
_MEBIBYTE = 2**20


def internevo_rows() -> Iterator[Row]:
    """Peak memory of the pure FSDP rows."""
    for entry in published("internevo_memory_a800"):
        pure = entry["fsdp"] == "True" and entry["tp"] == "1" and entry["pp"] == "1"
        row = Row(
            table=INTERNEVO,
            label=f"{entry['model']}, {entry['gpus']} GPUs, tp {entry['tp']}, pp {entry['pp']}, fsdp {entry['fsdp']}",
            group=entry["model"],
            unit="GB",
            measured=float(entry["gpu_memory_GB"]),
            excluded="" if pure else "tensor or pipeline parallelism",
        )
        if not row.in_scope:
            yield row
            continue
        choices = product(assumed("internevo", "kernels").choices, assumed("internevo", "seq_len").choices)
        yield predicted_row(row, [_internevo_gb(entry, kernels, int(seq_len)) for kernels, seq_len in choices])


def _internevo_gb(entry: dict[str, str], kernels: str, seq_len: int) -> float:
    gpus = int(entry["gpus"])
    model = model_preset(f"internlm-{entry['model'].lower()}", kernels=_KERNELS[kernels])
    workload = Workload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * gpus * int(entry["micro_bsz"]) * int(entry["micro_num"]),
        micro_batch=int(entry["micro_bsz"]),
        recomputation=Recomputation.FULL,
        grad_dtype="bf16",
    )
    cluster = cluster_preset("a800-8x-hdr")
    if gpus > 8 and gpus % 8:
        raise AssertionError(f"{gpus} GPUs fill no whole nodes")
    return simulate(model, cluster.take(gpus), "zero3", workload, engine="fsdp").memory.total / 1e9


def galvatron_rows() -> Iterator[Row]:
    """Model state of one and two layers under sharded data parallelism over 8 GPUs, and activations per layer."""
    for entry in published("galvatron_llama2_7b_memory_profile"):
        strategy, key = entry["strategy(pp_tp_dp...)"], entry["key"]
        if strategy == "1_1_8_sp" and "rank0" in key and "seqlen2048" not in entry["file"]:
            row = _galvatron_row(strategy, key, float(entry["value"]))
            if row is not None:
                yield row
        elif strategy.endswith("tp_activation_per_bsz_dict") and key in ("1", "checkpoint"):
            recomputation = Recomputation.NONE if key == "1" else Recomputation.FULL
            yield _activation_row(recomputation, float(entry["value"]), strategy)


def _galvatron_row(strategy: str, key: str, measured: float) -> Row | None:
    match = re.fullmatch(r"layernum\[(\d)\]_bsz8_seq2048_rank0_ms", key)
    if match is None:
        return None
    layers = int(match[1])
    row = Row(
        table=GALVATRON,
        label=f"model state, {layers} layer(s), 8 GPUs",
        group="model state",
        unit="MiB",
        measured=measured,
    )
    workload = Workload(seq_len=2048, global_batch_tokens=2048 * 8, param_dtype="fp32")
    memory = simulate(_layers(layers), cluster_preset("a100-8x-hdr").take(8), "zero3", workload, engine="fsdp").memory
    return predicted_row(row, [(memory.params + memory.grads + memory.optimizer) / _MEBIBYTE])


def _activation_row(recomputation: Recomputation, measured: float, strategy: str) -> Row:
    row = Row(
        table=GALVATRON,
        label=f"activations of one layer and sequence, recomputation {recomputation.value}",
        group="activations",
        unit="MiB",
        measured=measured,
    )
    predictions = []
    for kernels in assumed("galvatron", "kernels").choices:
        block = next(u for u in _layers(1, kernels).units if u.kind is UnitKind.BLOCK)
        predictions.append(2048 * block.saved_bytes(2048, recomputation) / _MEBIBYTE)
    return predicted_row(row, predictions if strategy else [])


def _layers(count: int, kernels: str = "") -> ModelSpec:
    model = model_preset("llama2-7b", kernels=_KERNELS[kernels or assumed("galvatron", "kernels").value])
    units = tuple(replace(u, count=count) if u.kind is UnitKind.BLOCK else u for u in model.units)
    return replace(model, units=units)
