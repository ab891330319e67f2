"""Published figures of models with other parallelisms than data. No known table has step times with tp, pp or ep.

There are rates with context parallelism relative to none, separate measurements of the collectives that tp and ep wait
for, and memory under tp and pp (`validation.tables.memory`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.cost.collective import Operation, collective_cost
from zeromesh.cost.constants import default_constants
from zeromesh.cost.group import Group
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import FUSED
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import Parallel
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

CONTEXT, COLLECTIVES = "torchtitan, cp over none", "Collectives of tp and ep"

_MEBIBYTE = 2**20
_OPERATIONS: dict[str, Operation] = {"allreduce": "all_reduce", "all2all": "all_to_all"}


def context_rows() -> Iterator[Row]:
    """Yields tokens per second and GPU with cp over those without, in fp8."""
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
    """Yields separate collectives inside a node of 8 A100, which a block with tp and ep waits for."""
    cluster = cluster_preset("a100-8x-hdr").take(8)
    for entry in published("galvatron_hardware_profile", "calibration"):
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
