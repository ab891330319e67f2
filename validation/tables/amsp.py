"""AMSP on 1024 A800 (arXiv 2311.00257): the overlap ablation, end-to-end throughput, and MFU of several systems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from validation.assumptions import Point, assumed, open_points
from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import EAGER, FUSED
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.simulator.mechanics import ENGINES, Mechanics
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

ABLATION, END_TO_END, MFU = "AMSP Table V", "AMSP Fig. 12", "AMSP MFU"
LAYOUTS = "AMSP layouts, one engine"
SEQ_LEN, GLOBAL_BATCH_TOKENS = 4096, 4096 * 1024
CONTRADICTION = 0.1
"""If two figures of one run differ by more, at least one is wrong."""

_MODELS = {"7B": "llama-7b", "13B": "llama-13b", "30B": "amsp-30b"}
_KERNELS = {"fused": FUSED, "eager": EAGER}
OVERLAPPED = ENGINES["amsp"]
NO_BROADCAST = replace(OVERLAPPED, overlap_refresh=False)
NO_OVERLAP = replace(NO_BROADCAST, overlap_boundary=False, overlap_gather=False, overlap_reduce=False)
_ENGINES = {
    "all overlap": OVERLAPPED,
    "no broadcast overlap": NO_BROADCAST,
    "end to end (broadcast overlap off)": NO_BROADCAST,
    "all-gather/reduce-scatter overlap only": replace(NO_BROADCAST, overlap_boundary=False),
    "no overlap": NO_OVERLAP,
}
_OF_BROADCAST = {"exposed": NO_BROADCAST, "hidden": OVERLAPPED}
_OF_PEERS = {
    "deepspeed's": ENGINES["deepspeed"],
    "no overlap": replace(ENGINES["deepspeed"], overlap_boundary=False, overlap_reduce=False),
    "all overlap": replace(ENGINES["deepspeed"], overlap_gather=True, overlap_refresh=True),
    "deepspeed's of 2021": replace(ENGINES["deepspeed"], host_gather_s=380e-6),
}
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


@cache
def amsp_step(
    size: str,
    gpus: int,
    strategy: str,
    engine: str | Mechanics,
    micro_batches: int | None = None,
    kernels: str = "",
) -> Simulation:
    """Simulates one step of the paper's set-up.

    `micro_batches` are those of one device; None: the global batch has 4 Mi tokens. `kernels` default to the assumed
    ones.
    """
    tokens = GLOBAL_BATCH_TOKENS if micro_batches is None else micro_batches * gpus * SEQ_LEN
    workload = FixedWorkload(
        seq_len=SEQ_LEN,
        global_batch_tokens=tokens,
        grad_dtype=assumed("amsp", "grad_dtype").value,
        recomputation=Recomputation.FULL if size == "30B" else Recomputation.NONE,
    )
    model = _model(size, kernels or assumed("amsp", "kernels").value)
    cluster = cluster_preset("a800-8x-hdr").take(gpus)
    return simulate(model, cluster, strategy, workload, engine=engine)


def amsp_rows() -> Iterator[Row]:
    """Yields the throughput of the ablation (64 GPUs) and of the end-to-end runs."""
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
        strategy = entry["strategy"].replace("[N/4]", "[*]")
        predictions = [
            amsp_step(size, gpus, strategy, _ENGINES[variant], micro_batches, kernels).tokens_per_s_per_device
            for kernels in (assumed("amsp", "kernels").choices if row.in_scope else ())
        ]
        yield predicted_row(row, predictions)


def amsp_mfu_rows() -> Iterator[Row]:
    """Yields the MFU of AMSP and other systems at 8 to 1024 GPUs."""
    for entry in published("amsp_mfu_a800"):
        size, system, gpus = entry["model"], entry["system"], int(entry["gpus"])
        row = Row(
            table=MFU,
            label=f"{size}, {gpus} GPUs, {system}",
            group=f"{size}, {gpus} GPUs",
            unit="% MFU",
            measured=float(entry["mfu_pct"]),
            excluded=_excluded(size, gpus, system, float(entry["mfu_pct"])),
        )
        predictions = [100 * system_mfu(size, gpus, system, point) for point in open_points("amsp")]
        yield predicted_row(row, predictions)


def amsp_layout_rows() -> Iterator[Row]:
    """Yields AMSP's layout over MiCS's, both in AMSP's engine: the gain by partitioning, without overlap's part."""
    for entry in published("amsp_layouts_a800"):
        size, gpus = entry["model"], int(entry["gpus"])
        row = Row(
            table=LAYOUTS,
            label=f"{size}, {gpus} GPUs: {AMSP_LAYOUT[size]} over {MICS_LAYOUT[size]}",
            group=f"{size}, {gpus} GPUs",
            unit="ratio",
            measured=float(entry["throughput_ratio"]),
        )
        yield predicted_row(row, [_layouts_ratio(size, gpus, point) for point in open_points("amsp")])


def system_mfu(size: str, gpus: int, system: str, point: Point) -> float:
    """The MFU of AMSP, or of a system in DeepSpeed, with the open points of `point`."""
    engine = _OF_BROADCAST[point["broadcast"]] if system == "AMSP" else _OF_PEERS[point["peer_engine"]]
    return amsp_step(size, gpus, _layout(system, size), engine, kernels=point["kernels"]).mfu


def _layouts_ratio(size: str, gpus: int, point: Point) -> float:
    hidden = point["layouts_overlap"] == "gathers hidden"
    engine = replace(_OF_BROADCAST[point["broadcast"]], overlap_gather=hidden, overlap_reduce=hidden)
    engine = NO_OVERLAP if point["layouts_overlap"] == "no overlap" else engine
    ours, theirs = (
        amsp_step(size, gpus, layout[size], engine, kernels=point["kernels"]) for layout in (AMSP_LAYOUT, MICS_LAYOUT)
    )
    return theirs.step_s / ours.step_s


def _excluded(size: str, gpus: int, system: str, mfu_percent: float) -> str:
    if system in ("ZeRO-3", "ZeRO++") and gpus == 1024:
        return "DeepSpeed at 4 to 6 % MFU: an engine's pathology, shown for comparison"
    drawn = _drawn_mfu(size, gpus) if system == "AMSP" else None
    if drawn is not None and abs(mfu_percent / drawn - 1) > CONTRADICTION:
        return f"contradicts Fig. 12, whose throughput is {drawn:.0f} %"
    return ""


def _drawn_mfu(size: str, gpus: int) -> float | None:
    """The MFU in percent that follows from the throughput in Fig. 12."""
    flops = _model(size, assumed("amsp", "kernels").value).model_flops_per_token(SEQ_LEN)
    peak = cluster_preset("a800-8x-hdr").device.peak("bf16")
    for entry in published("amsp_a800"):
        if "Fig" in entry["source"] and (entry["model"], int(entry["gpus"])) == (size, gpus):
            return 100 * float(entry["tokens_per_s_per_gpu"]) * flops / peak
    return None


def _layout(system: str, size: str) -> str:
    known = {"AMSP": AMSP_LAYOUT[size], "MiCS": MICS_LAYOUT[size], "ZeRO-1": "zero1", "ZeRO-3": "zero3"}
    return known.get(system, "zero++")


def _model(size: str, kernels: str) -> ModelSpec:
    return model_preset(_MODELS[size], kernels=_KERNELS[kernels])
