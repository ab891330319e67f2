"""Published figures of models that are cut beside data: no table at hand has the seconds of a step with tp, pp or ep.

What there is: rates with context parallelism relative to none, the collectives that tp and ep wait for measured alone,
and memory under tp and pp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from validation.allocated import AllocatedPeak
from validation.assumptions import assumed
from validation.row import Row, calibration, predicted_row, published
from validation.tables.memory import galvatron_choices, internevo_gb
from zeromesh.cluster import preset as cluster_preset
from zeromesh.cost import default_constants
from zeromesh.cost.collective import Operation, collective_cost
from zeromesh.cost.group import Group
from zeromesh.model import Recomputation, UnitKind
from zeromesh.model import preset as model_preset
from zeromesh.model.presets import preset_shape
from zeromesh.model.shape import FUSED, Kernels
from zeromesh.model.transformer import build
from zeromesh.parallel import Parallel
from zeromesh.simulator import FixedWorkload, simulate
from zeromesh.simulator.division import Division, Part

CONTEXT, COLLECTIVES = "torchtitan, cp over none", "Collectives of tp and ep"
INTERNEVO_CUT, GALVATRON_CUT = "InternEvo memory, tp and pp", "Galvatron memory, tp and pp"

_MEBIBYTE = 2**20
_FP32_STATES = 16  # parameter, gradient and two moments
_OPERATIONS: dict[str, Operation] = {"allreduce": "all_reduce", "all2all": "all_to_all"}
_QUANTITIES = {"ms": "model state", "act": "activations", "act_peak": "activations at the peak"}


def context_rows() -> Iterator[Row]:
    """Tokens per second and GPU with cp, of those without: in fp8."""
    entries = [entry for entry in published("torchtitan_published") if "CP" in entry["techniques"]]
    alone = float(entries[0]["tps_per_gpu"])
    rates = [_rate(int(entry["seq_len"]), _degree(entry)) for entry in entries]
    for entry, rate in zip(entries, rates, strict=True):
        row = Row(
            table=CONTEXT,
            label=f"{entry['model']}, {entry['gpus']} {entry['hardware'].split()[0]}, cp {_degree(entry)}, "
            f"seq {entry['seq_len']}",
            group=entry["model"],
            unit="of cp 1",
            measured=float(entry["tps_per_gpu"]) / alone,
            excluded="" if _degree(entry) > 1 else "the unit of the others",
        )
        yield predicted_row(row, [rate / rates[0]])


def _degree(entry: dict[str, str]) -> int:
    return int(entry["parallelism"].rpartition(" ")[2])


def _rate(seq_len: int, cp: int) -> float:
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * 8 // cp,
        recomputation=Recomputation.FULL,
        reduce_dtype="fp32",
        parallel=Parallel(cp=cp),
    )
    cluster = cluster_preset("h100-96g-8x-400g").take(8)
    model = model_preset("llama3-8b", kernels=replace(FUSED, products="fp8"))
    return simulate(model, cluster, "zero3", workload, engine="fsdp").tokens_per_s_per_device


def collective_rows() -> Iterator[Row]:
    """Collectives inside a node of 8 A100, alone: what a block under tp and ep waits for."""
    cluster = cluster_preset("a100-8x-hdr").take(8)
    for entry in calibration("galvatron_hardware_profile"):
        match = re.fullmatch(r"(allreduce|all2all)_size_(\d)_(\d+)MB_time", entry["key"])
        if match is None:
            continue
        name, ranks, mebibytes = match[1], int(match[2]), int(match[3])
        group = Group.of(cluster, [("node", ranks)], default_constants())
        seconds = collective_cost(group, _OPERATIONS[name], mebibytes * _MEBIBYTE, default_constants()).seconds
        row = Row(
            table=COLLECTIVES,
            label=f"{_OPERATIONS[name]} of {mebibytes} MiB over {ranks} GPUs",
            group=f"{_OPERATIONS[name]}, {mebibytes} MiB",
            unit="ms",
            measured=float(entry["value"]),
            fitted=name == "allreduce",
        )
        yield predicted_row(row, [seconds * 1e3])


def internevo_cut_rows() -> Iterator[Row]:
    """Peak memory of the rows with tp or pp."""
    for entry in published("internevo_memory_a800"):
        tp, pp = int(entry["tp"]), int(entry["pp"])
        if tp * pp == 1:
            continue
        row = Row(
            table=INTERNEVO_CUT,
            label=f"{entry['model']}, {entry['gpus']} GPUs, tp {tp}, pp {pp}, fsdp {entry['fsdp']}",
            group=entry["model"],
            unit="GB",
            measured=float(entry["gpu_memory_GB"]),
            excluded="fewer micro-batches than ranks in the pipeline" if pp > int(entry["micro_num"]) else "",
        )
        if not row.in_scope:
            yield row
            continue
        names = ("step_bytes", "kernels", "seq_len", "sequence_parallel")
        choices = product(*(assumed("internevo", name).choices for name in names))
        predictions = [
            internevo_gb(entry, *others, parallel=Parallel(tp=tp, pp=pp, sequence_parallel=along == "yes"))
            for *others, along in choices
        ]
        yield predicted_row(row, predictions)


def galvatron_cut_rows() -> Iterator[Row]:
    """Model state and activations of Llama's layers under tp and pp, 8 sequences on 8 GPUs."""
    for entry in published("galvatron_llama2_7b_memory_profile"):
        strategy, key, measured = entry["strategy(pp_tp_dp...)"], entry["key"], float(entry["value"])
        whole = re.fullmatch(r"layernum\[(\d)\]_bsz8_seq2048_rank(\d)_(ms|act|act_peak)", key)
        cut = re.match(r"(\d)_(\d)_(\d)_(vtp_)?sp", strategy)
        excluded, predictions = "", [0.0]
        if whole is not None and cut is not None and (cut[1] != "1" or cut[2] != "1"):
            pp, tp, layers = int(cut[1]), int(cut[2]), int(whole[1])
            label = f"{_QUANTITIES[whole[3]]}, {layers} layer(s), tp {tp}, pp {pp}, rank {whole[2]}"
            if tp > 1 and not cut[4]:
                label += ", embedding and head whole"
                excluded = "embedding and head are not cut as the layers are"
            elif pp > 1 and whole[3] == "act_peak":
                excluded = "the run's micro-batches are not stated"
            else:
                predictions = _galvatron_mib(pp, tp, layers, last=whole[2] == "7", what=whole[3])
        elif strategy.endswith("tp_activation_per_bsz_dict") and key in ("2", "4", "8"):
            label = f"activations of one layer and sequence, tp {key}"
            predictions = _layer_mib(int(key))
        else:
            continue
        row = Row(
            table=GALVATRON_CUT,
            label=label,
            group=label.split(",")[0],
            unit="MiB",
            measured=measured,
            excluded=excluded,
        )
        yield row if excluded else predicted_row(row, predictions)


def _galvatron_mib(pp: int, tp: int, layers: int, *, last: bool, what: str) -> list[float]:
    world, parallel = 8 // (pp * tp), Parallel(tp=tp, pp=pp)
    if what == "ms":
        state = _FP32_STATES * _part(layers, parallel, 2048, FUSED, last=last).model.num_params / world
        # With sequence parallelism Megatron keeps the buffer of a gathered input, one for all layers, from the first
        # one on: get_global_memory_buffer().get_tensor(..., "mpu") of megatron/core/tensor_parallel/layers.py.
        lengths = [int(seq_len) for seq_len in assumed("galvatron", "seq_len").choices]
        hidden = preset_shape("llama2-7b").hidden if tp > 1 else 0
        return [(state + 8 // world * seq_len * 2 * hidden) / _MEBIBYTE for seq_len in lengths]
    predictions = []
    for seq_len, kernels in galvatron_choices():
        part, tokens = _part(layers, parallel, seq_len, kernels, last=last), 8 // world * seq_len
        if what == "act":
            found = tokens * part.model.saved_activation_bytes(seq_len, Recomputation.NONE)
        else:
            found = AllocatedPeak(
                model=part.model, world=world, tokens=tokens, seq_len=seq_len, recomputation=Recomputation.NONE
            ).above_backward_end()
        predictions.append(found / _MEBIBYTE)
    return predictions


def _layer_mib(tp: int) -> list[float]:
    found = []
    for seq_len, kernels in galvatron_choices():
        units = _part(1, Parallel(tp=tp), seq_len, kernels, last=True).model.units
        block = next(unit for unit in units if unit.kind is UnitKind.BLOCK)
        found.append(seq_len * block.saved_bytes(seq_len, Recomputation.NONE) / _MEBIBYTE)
    return found


def _part(layers: int, parallel: Parallel, seq_len: int, kernels: Kernels, *, last: bool) -> Part:
    """The part of Llama 2 with so many layers that the first or last pipeline rank holds."""
    model = build(replace(preset_shape("llama2-7b"), layers=layers), kernels=kernels)
    return Division.of(model, cluster_preset("a100-8x-hdr").take(8), parallel, seq_len=seq_len).parts[-1 if last else 0]
