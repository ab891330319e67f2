"""Published peak memory: InternEvo on A800, Galvatron's per-layer profile on A100; with data parallelism only, or tp or
pp."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from validation.allocated import AllocatedPeak
from validation.assumptions import assumed
from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.presets import preset_shape
from zeromesh.model.shape import EAGER, FUSED, MEGATRON, Kernels
from zeromesh.model.spec import Recomputation, UnitKind
from zeromesh.model.transformer import build
from zeromesh.parallel import Parallel
from zeromesh.simulator.division import Division, Part
from zeromesh.simulator.mechanics import ENGINES
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

INTERNEVO, GALVATRON = "InternEvo memory", "Galvatron memory"
CUT = ", tp and pp"
"""Ending of the tables for rows with tp or pp."""

_KERNELS = {"fused": FUSED, "eager": EAGER, "megatron": MEGATRON}
_MEBIBYTE = 2**20
_FP32_STATES = 16  # parameter, gradient and two moments
_QUANTITIES = {"ms": "model state", "act": "activations", "act_peak": "activations at the peak"}


def internevo_rows(*, cut: bool = False) -> Iterator[Row]:
    """Yields the peak memory of a step."""
    for entry in published("internevo_memory_a800"):
        tp, pp = int(entry["tp"]), int(entry["pp"])
        if (tp * pp > 1) != cut:
            continue
        row = Row(
            table=INTERNEVO + CUT * cut,
            label=f"{entry['model']}, {entry['gpus']} GPUs, {f'tp {tp}, pp {pp}, ' * cut}fsdp {entry['fsdp']}",
            group=entry["model"],
            unit="GB",
            measured=float(entry["gpu_memory_GB"]),
            excluded="fewer micro-batches than ranks in the pipeline" if pp > int(entry["micro_num"]) else "",
        )
        names = ("step_bytes", "kernels", "seq_len", *["sequence_parallel"] * cut)
        choices = product(*(assumed("internevo", name).choices for name in names)) if row.in_scope else ()
        yield predicted_row(row, [_internevo_gb(entry, *choice) for choice in choices])


def _internevo_gb(entry: dict[str, str], step_bytes: str, kernels: str, length: str, along: str = "no") -> float:
    """The peak of a row, with one choice of its open points."""
    seq_len, gpus, tp, pp = int(length), int(entry["gpus"]), int(entry["tp"]), int(entry["pp"])
    model = model_preset(f"internlm-{entry['model'].lower()}", kernels=_KERNELS[kernels])
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * gpus // (tp * pp) * int(entry["micro_bsz"]) * int(entry["micro_num"]),
        micro_batch=int(entry["micro_bsz"]),
        recomputation=Recomputation.FULL,
        grad_dtype="bf16",
        parallel=Parallel(tp=tp, pp=pp, sequence_parallel=along == "yes"),
    )
    engine = replace(ENGINES["fsdp"], step_bytes=float(step_bytes))
    cluster = cluster_preset("a800-8x-hdr").take(gpus)
    return simulate(model, cluster, "zero3", workload, engine=engine).memory.total / 1e9


def galvatron_rows(*, cut: bool = False) -> Iterator[Row]:
    """Yields model state and activations of Llama's layers, for 8 sequences on 8 GPUs."""
    for entry in published("galvatron_llama2_7b_memory_profile"):
        strategy, key, second = entry["strategy(pp_tp_dp...)"], entry["key"], "seqlen2048" in entry["file"]
        whole = re.fullmatch(r"layernum\[(\d)\]_bsz8_seq2048_rank(\d)_(ms|act|act_peak)", key)
        degrees = re.fullmatch(r"(\d)_(\d)_\d_(vtp_|c_)?sp", strategy)
        excluded = "other values for the keys of the first file: another revision" if second and not cut else ""
        if whole is not None and degrees is not None:
            pp, tp, layers, full = int(degrees[1]), int(degrees[2]), int(whole[1]), degrees[3] == "c_"
            label = f"{_QUANTITIES[whole[3]]}, {layers} layer(s), {f'tp {tp}, pp {pp}, ' * cut}rank {whole[2]}"
            if tp > 1 and not degrees[3]:
                label += ", embedding and head whole"
                excluded = "embedding and head are not cut as the layers are"
            elif pp > 1 and whole[3] == "act_peak":
                excluded = "the run's micro-batches are not stated"
        elif strategy.endswith("tp_activation_per_bsz_dict"):
            pp, tp, layers, full = 1, 1 if key == "checkpoint" else int(key), 0, key == "checkpoint"
            label = f"activations of one layer and sequence{f', tp {tp}' * cut}"
        else:
            continue
        if (tp * pp > 1) != cut:
            continue
        label += ", recomputation" * full
        row = Row(
            table=GALVATRON + CUT * cut,
            label=label + " (second file)" * (second and not cut),
            group=label.split(",")[0],
            unit="MiB",
            measured=float(entry["value"]),
            excluded=excluded,
        )
        recomputation = Recomputation.FULL if full else Recomputation.NONE
        if cut and excluded:
            yield row
        elif whole is None:
            yield predicted_row(row, _layer_mib(tp, recomputation))
        else:
            parallel, last = Parallel(tp=tp, pp=pp), whole[2] == "7"
            yield predicted_row(row, _galvatron_mib(parallel, layers, whole[3], recomputation, last=last))


def _galvatron_mib(
    parallel: Parallel, layers: int, what: str, recomputation: Recomputation, *, last: bool
) -> list[float]:
    world = 8 // (parallel.pp * parallel.tp)
    if what == "ms":
        state = _FP32_STATES * _part(layers, parallel, 2048, FUSED, last=last).model.num_params / world
        # With sequence parallelism, Megatron keeps a buffer for a gathered input, one for all layers, from the first
        # layer on: get_global_memory_buffer().get_tensor(..., "mpu") in megatron/core/tensor_parallel/layers.py.
        lengths = [int(seq_len) for seq_len in assumed("galvatron", "seq_len").choices]
        hidden = preset_shape("llama2-7b").hidden if parallel.tp > 1 else 0
        return [(state + 8 // world * seq_len * 2 * hidden) / _MEBIBYTE for seq_len in lengths]
    predictions = []
    for seq_len, kernels in _galvatron_choices():
        part, tokens = _part(layers, parallel, seq_len, kernels, last=last), 8 // world * seq_len
        if what == "act":
            found = tokens * part.model.saved_activation_bytes(seq_len, recomputation)
        else:
            found = AllocatedPeak(
                model=part.model, world=world, tokens=tokens, seq_len=seq_len, recomputation=recomputation
            ).above_backward_end()
        predictions.append(found / _MEBIBYTE)
    return predictions


def _layer_mib(tp: int, recomputation: Recomputation) -> list[float]:
    predictions = []
    for seq_len, kernels in _galvatron_choices():
        units = _part(1, Parallel(tp=tp), seq_len, kernels, last=True).model.units
        block = next(unit for unit in units if unit.kind is UnitKind.BLOCK)
        predictions.append(seq_len * block.saved_bytes(seq_len, recomputation) / _MEBIBYTE)
    return predictions


def _galvatron_choices() -> list[tuple[int, Kernels]]:
    """The choices for points that the profile leaves open."""
    choices = product(assumed("galvatron", "seq_len").choices, assumed("galvatron", "kernels").choices)
    return [(int(seq_len), _KERNELS[kernels]) for seq_len, kernels in choices]


def _part(layers: int, parallel: Parallel, seq_len: int, kernels: Kernels, *, last: bool) -> Part:
    """Returns the part of Llama 2 with `layers` layers that the first or last pipeline rank holds."""
    model = build(replace(preset_shape("llama2-7b"), layers=layers), kernels=kernels)
    return Division.of(model, cluster_preset("a100-8x-hdr").take(8), parallel, seq_len=seq_len).parts[-1 if last else 0]
