"""Published peak memory: InternEvo on A800, Galvatron's per-layer profile on A100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from validation.allocated import AllocatedPeak
from validation.assumptions import assumed
from validation.row import Row, predicted_row, published
from zeromesh.cluster import preset as cluster_preset
from zeromesh.model import ModelSpec, Recomputation, UnitKind
from zeromesh.model import preset as model_preset
from zeromesh.model.shape import EAGER, FUSED, MEGATRON, Kernels
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.simulator import ENGINES, FixedWorkload, simulate

INTERNEVO, GALVATRON = "InternEvo memory", "Galvatron memory"

_KERNELS = {"fused": FUSED, "eager": EAGER, "megatron": MEGATRON}
_MEBIBYTE = 2**20


def internevo_rows() -> Iterator[Row]:
    """Peak memory of the rows with FSDP alone; the others are a table of their own."""
    for entry in published("internevo_memory_a800"):
        if (entry["tp"], entry["pp"]) != ("1", "1"):
            continue
        row = Row(
            table=INTERNEVO,
            label=f"{entry['model']}, {entry['gpus']} GPUs, fsdp {entry['fsdp']}",
            group=entry["model"],
            unit="GB",
            measured=float(entry["gpu_memory_GB"]),
        )
        choices = product(
            assumed("internevo", "step_bytes").choices,
            assumed("internevo", "kernels").choices,
            assumed("internevo", "seq_len").choices,
        )
        yield predicted_row(row, [internevo_gb(entry, *choice) for choice in choices])


def internevo_gb(
    entry: dict[str, str], step_bytes: str, kernels: str, length: str, *, parallel: Parallel = WHOLE
) -> float:
    """Peak of a row with one choice of what it leaves open."""
    seq_len = int(length)
    gpus = int(entry["gpus"])
    model = model_preset(f"internlm-{entry['model'].lower()}", kernels=_KERNELS[kernels])
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=seq_len
        * gpus
        // (parallel.tp * parallel.pp)
        * int(entry["micro_bsz"])
        * int(entry["micro_num"]),
        micro_batch=int(entry["micro_bsz"]),
        recomputation=Recomputation.FULL,
        grad_dtype="bf16",
        parallel=parallel,
    )
    engine = replace(ENGINES["fsdp"], step_bytes=float(step_bytes))
    cluster = cluster_preset("a800-8x-hdr").take(gpus)
    return simulate(model, cluster, "zero3", workload, engine=engine).memory.total / 1e9


def galvatron_rows() -> Iterator[Row]:
    """Model state and activations of one and two layers, data parallel and sharded over 8 GPUs, one sequence each."""
    for entry in published("galvatron_llama2_7b_memory_profile"):
        strategy, key, measured = entry["strategy(pp_tp_dp...)"], entry["key"], float(entry["value"])
        match = re.fullmatch(r"layernum\[(\d)\]_bsz8_seq2048_rank(\d)_(ms|act|act_peak)", key)
        if match is not None and strategy in ("1_1_8_sp", "1_1_8_c_sp"):
            full = strategy == "1_1_8_c_sp"
            what = {"ms": "model state", "act": "activations", "act_peak": "activations at the peak"}[match[3]]
            label = f"{what}, {match[1]} layer(s), rank {match[2]}{', recomputation' if full else ''}"
            predictions = _galvatron_mib(int(match[1]), match[3], Recomputation.FULL if full else Recomputation.NONE)
        elif strategy.endswith("tp_activation_per_bsz_dict") and key in ("1", "checkpoint"):
            label = f"activations of one layer and sequence{', recomputation' if key == 'checkpoint' else ''}"
            predictions = _layer_mib(Recomputation.FULL if key == "checkpoint" else Recomputation.NONE)
        else:
            continue
        second = "seqlen2048" in entry["file"]
        row = Row(
            table=GALVATRON,
            label=label + (" (second file)" if second else ""),
            group=label.split(",")[0],
            unit="MiB",
            measured=measured,
            excluded="other values for the keys of the first file: another revision" if second else "",
        )
        yield predicted_row(row, predictions)


def _galvatron_mib(layers: int, what: str, recomputation: Recomputation) -> list[float]:
    if what == "ms":
        workload = FixedWorkload(seq_len=2048, global_batch_tokens=2048 * 8, param_dtype="fp32")
        cluster = cluster_preset("a100-8x-hdr").take(8)
        memory = simulate(_layers(layers, FUSED), cluster, "zero3", workload, engine="fsdp").memory
        return [(memory.params + memory.grads + memory.optimizer) / _MEBIBYTE]
    if what == "act":
        return [
            seq_len * _layers(layers, kernels).saved_activation_bytes(seq_len, recomputation) / _MEBIBYTE
            for seq_len, kernels in galvatron_choices()
        ]
    return [
        AllocatedPeak(
            model=_layers(layers, kernels), world=8, tokens=seq_len, seq_len=seq_len, recomputation=recomputation
        ).above_backward_end()
        / _MEBIBYTE
        for seq_len, kernels in galvatron_choices()
    ]


def _layer_mib(recomputation: Recomputation) -> list[float]:
    predictions = []
    for seq_len, kernels in galvatron_choices():
        block = next(u for u in _layers(1, kernels).units if u.kind is UnitKind.BLOCK)
        predictions.append(seq_len * block.saved_bytes(seq_len, recomputation) / _MEBIBYTE)
    return predictions


def galvatron_choices() -> list[tuple[int, Kernels]]:
    """The choices that the profile leaves open."""
    choices = product(assumed("galvatron", "seq_len").choices, assumed("galvatron", "kernels").choices)
    return [(int(seq_len), _KERNELS[kernels]) for seq_len, kernels in choices]


def _layers(count: int, kernels: Kernels) -> ModelSpec:
    model = model_preset("llama2-7b", kernels=kernels)
    units = tuple(replace(u, count=count) if u.kind is UnitKind.BLOCK else u for u in model.units)
    return replace(model, units=units)
