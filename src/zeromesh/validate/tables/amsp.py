"""AMSP on 1024 A800 (arXiv 2311.00257): the overlap ablation, end-to-end throughput, MFU beside other systems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zeromesh.cluster import preset as cluster_preset
from zeromesh.model import ModelSpec, Recomputation
from zeromesh.model import preset as model_preset
from zeromesh.model.shape import EAGER, FUSED
from zeromesh.simulator import ENGINES, FixedWorkload, Mechanics, Simulation, simulate
from zeromesh.validate.assumptions import assumed
from zeromesh.validate.row import Row, predicted_row, published

ABLATION, END_TO_END, MFU = "AMSP Table V", "AMSP Fig. 12", "AMSP MFU"
SEQ_LEN, GLOBAL_BATCH_TOKENS = 4096, 4096 * 1024

_MODELS = {"7B": "llama-7b", "13B": "llama-13b", "30B": "amsp-30b"}
_KERNELS = {"fused": FUSED, "eager": EAGER}
_AMSP = ENGINES["amsp"]
NO_BROADCAST = replace(_AMSP, overlap_refresh=False)
_ENGINES = {
    "all overlap": _AMSP,
    "no broadcast overlap": NO_BROADCAST,
    "end to end (broadcast overlap off)": NO_BROADCAST,
    "all-gather/reduce-scatter overlap only": replace(NO_BROADCAST, overlap_boundary=False),
    "no overlap": replace(NO_BROADCAST, overlap_boundary=False, overlap_gather=False, overlap_reduce=False),
}
_NOTHING_OVERLAPS = replace(ENGINES["deepspeed"], overlap_boundary=False, overlap_reduce=False)
_ALL_OVERLAPS = replace(ENGINES["deepspeed"], overlap_gather=True, overlap_refresh=True)
AMSP_LAYOUT = {
    "7B": "node=1,cluster=0",
    "13B": "node[4]=3,node[2]=1,cluster=0",
    "30B": "node=3,cluster[4]=1,cluster[*]=0",
}
MICS_LAYOUT = {
    "7B": "node=3,cluster=0",
    "13B": "node=3,cluster=0",
    "30B": "node=3,cluster[2]=3,cluster[*]=0",
}


def amsp_step(
    size: str, gpus: int, strategy: str, engine: str | Mechanics, micro_batches: int | None = None, kernels: str = ""
) -> Simulation:
    """One step of the paper's set-up.

    Args:
        size: 7B, 13B or 30B.
        gpus: devices.
        strategy, engine: whose.
        micro_batches: of one device; None for the global batch of 4 Mi tokens.
        kernels: "" for the assumed ones.
    """
    tokens = GLOBAL_BATCH_TOKENS if micro_batches is None else micro_batches * gpus * SEQ_LEN
    workload = FixedWorkload(
        seq_len=SEQ_LEN,
        global_batch_tokens=tokens,
        grad_dtype=assumed("amsp", "grad_dtype").value,
        recomputation=Recomputation.FULL if size == "30B" else Recomputation.NONE,
    )
    model = _model(size, kernels or assumed("amsp", "kernels").value)
    return simulate(model, cluster_preset("a800-8x-hdr").take(gpus), strategy, workload, engine=engine)


def amsp_rows() -> Iterator[Row]:
    """Throughput of the ablation (64 GPUs) and of the end-to-end runs."""
    for entry in published("amsp_a800"):
        table = ABLATION if "Table V" in entry["source"] else END_TO_END
        gpus, micro_batches = int(entry["gpus"]), int(entry["micro_batches"])
        variant, size = entry["variant"], entry["model"]
        row = Row(
            table=table,
            label=f"{size}, {gpus} GPUs, M = {micro_batches}, {variant}",
            group=f"{size}, {gpus} GPUs, M = {micro_batches}",
            unit="tokens/s/GPU",
            measured=float(entry["tokens_per_s_per_gpu"]),
            excluded="throughput and MFU contradict each other" if "inconsistent" in entry["note"] else "",
        )
        if not row.in_scope:
            yield row
            continue
        strategy = entry["strategy"].replace("[N/4]", "[*]")
        predictions = [
            amsp_step(size, gpus, strategy, _ENGINES[variant], micro_batches, kernels).tokens_per_s_per_device
            for kernels in assumed("amsp", "kernels").choices
        ]
        ours = amsp_step(size, gpus, strategy, "zeromesh", micro_batches).tokens_per_s_per_device
        yield predicted_row(row, predictions, ours)


def amsp_mfu_rows() -> Iterator[Row]:
    """MFU of AMSP and other systems at 8 to 1024 GPUs."""
    for entry in published("amsp_mfu_a800"):
        size, system, gpus = entry["model"], entry["system"], int(entry["gpus"])
        row = Row(
            table=MFU,
            label=f"{size}, {gpus} GPUs, {system}",
            group=f"{size}, {gpus} GPUs",
            unit="% MFU",
            measured=float(entry["mfu_pct"]),
            excluded=_excluded(system, gpus),
        )
        strategy, engines = _system(system, size)
        predictions = [100 * amsp_step(size, gpus, strategy, engine).mfu for engine in engines]
        yield predicted_row(row, predictions, 100 * amsp_step(size, gpus, strategy, "zeromesh").mfu)


def _excluded(system: str, gpus: int) -> str:
    if system in ("ZeRO-3", "ZeRO++") and gpus == 1024:
        return "DeepSpeed at 4 to 6 % MFU: an engine's pathology, shown for comparison"
    return ""


def _system(system: str, size: str) -> tuple[str, tuple[Mechanics, ...]]:
    deepspeed = ENGINES["deepspeed"]
    match system:
        case "AMSP":
            return AMSP_LAYOUT[size], (NO_BROADCAST,)
        case "MiCS":
            return MICS_LAYOUT[size], (deepspeed, _NOTHING_OVERLAPS, _ALL_OVERLAPS)
        case "ZeRO-1":
            return "zero1", (deepspeed, _ALL_OVERLAPS)
        case "ZeRO-3":
            return "zero3", (deepspeed, _ALL_OVERLAPS)
        case _:
            return "zero++", (deepspeed, _ALL_OVERLAPS)


def _model(size: str, kernels: str) -> ModelSpec:
    return model_preset(_MODELS[size], kernels=_KERNELS[kernels])
