"""Tables measured with torch's FSDP: LLM Foundry's MPT on A100, torchtitan's Llama on A100 and H100."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

from validation.assumptions import assumed
from validation.row import Row, predicted_row, published
from zeromesh.cluster.catalogue import preset as cluster_preset
from zeromesh.cost.constants import default_constants
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import KERNELS
from zeromesh.model.spec import Recomputation
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

FOUNDRY_ONE, FOUNDRY_MANY, TORCHTITAN = "LLM Foundry, one node", "LLM Foundry, several nodes", "torchtitan"
TORCHTITAN_MEMORY = "torchtitan memory"
FITTED_MODELS = ("1b", "7b", "30b")

_CLUSTERS = {"a100_80gb": "a100-8x-1600g", "a100_40gb": "a100-40g-8x-1600g"}
_TITAN_MODELS = {
    "Llama3.1-8B": "llama3-8b",
    "Llama3-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "Llama2-13B": "llama2-13b",
    "Llama2-70B": "llama2-70b",
}


def foundry_rows() -> Iterator[Row]:
    """Yields tokens per second and GPU of MPT."""
    for entry in published("llm_foundry_mpt_a100"):
        gpus = int(entry["# GPUs"])
        seq_len, micro_batch = int(entry["SeqLen (T)"]), int(entry["MicroBatchSize"])
        row = Row(
            table=FOUNDRY_ONE if gpus == 8 else FOUNDRY_MANY,
            label=f"{entry['Model']}, {gpus} x {entry['GPU']}, seq {seq_len}, micro-batch {micro_batch}"
            + (", recomputation" if entry["Activation Checkpointing"] == "True" else ""),
            group=f"{entry['Model']}, {entry['GPU']}, seq {seq_len}",
            unit="tokens/s/GPU",
            measured=float(entry["Throughput (T/s/GPU)"]),
            fitted=gpus == 8 and entry["Model"] in FITTED_MODELS,
        )
        yield predicted_row(row, [_foundry_step(entry).tokens_per_s_per_device])


def _foundry_step(entry: dict[str, str]) -> Simulation:
    gpus, seq_len = int(entry["# GPUs"]), int(entry["SeqLen (T)"])
    pure = entry["MP Mode"] == "PURE"
    workload = FixedWorkload(
        seq_len=seq_len,
        global_batch_tokens=gpus * seq_len * int(entry["MicroBatchSize"]) * int(entry["GradAccum"]),
        micro_batch=int(entry["MicroBatchSize"]),
        recomputation=Recomputation.FULL if entry["Activation Checkpointing"] == "True" else Recomputation.NONE,
        reduce_dtype="bf16" if pure else "fp32",
    )
    cluster = cluster_preset(_CLUSTERS[entry["GPU"]]).take(gpus)
    return simulate(model_preset(f"mpt-{entry['Model']}"), cluster, "zero3", workload, engine="fsdp")


def torchtitan_rows() -> Iterator[Row]:
    """Yields tokens per second and GPU of Llama 2 and 3, and the memory if it is published."""
    for entry in published("torchtitan_published"):
        row = Row(
            table=TORCHTITAN,
            label=f"{entry['model']}, {entry['gpus']} {entry['hardware'].split()[0]}, {entry['techniques']}, "
            f"seq {entry['seq_len']}, batch {entry['local_batch']}, checkpointing {entry['activation_ckpt']}",
            group=f"{entry['model']}, {entry['hardware'].split()[0]}, seq {entry['seq_len']}",
            unit="tokens/s/GPU",
            measured=float(entry["tps_per_gpu"]),
            excluded="context parallelism" if "CP" in entry["techniques"] else "",
        )
        steps = [_titan_steps(entry, cluster) for cluster in _titan_clusters(entry)] if row.in_scope else []
        yield predicted_row(row, [_tokens_per_s(step) for step in steps])
        if steps and entry["memory_GiB"]:
            memory = Row(
                table=TORCHTITAN_MEMORY,
                label=row.label,
                group=row.group,
                unit="GiB",
                measured=float(entry["memory_GiB"]),
            )
            yield predicted_row(memory, [mean(map(_reserved_gib, step)) for step in steps])


def _tokens_per_s(steps: list[Simulation]) -> float:
    return mean(step.tokens_per_s_per_device for step in steps)


def _reserved_gib(step: Simulation) -> float:
    """Memory reserved by torch's allocator, as torchtitan prints it: without context and communicators."""
    memory = step.memory
    allocator = memory.activations * default_constants().allocator_share
    return (memory.total - memory.overhead + allocator) / 2**30


def _titan_clusters(entry: dict[str, str]) -> tuple[str, ...]:
    known = {"H100": ("h100-96g-8x-400g",), "H200": ("h200-8x-ndr",)}
    return known.get(entry["hardware"].split()[0], assumed("torchtitan", "a100_cluster").choices)


def _titan_steps(entry: dict[str, str], cluster_name: str) -> list[Simulation]:
    """Returns one simulation, or two to be averaged if every second layer is recomputed."""
    techniques, strategy = entry["techniques"], "zero3"
    kernels = KERNELS["compiled" if "compile" in techniques else "eager"]
    if "compiled loss" in techniques:
        kernels = replace(kernels, loss="fused")
    if "Float8" in techniques:
        kernels, strategy = replace(kernels, products="fp8"), "node=3@int8/,cluster=3@int8/"
    model = model_preset(_TITAN_MODELS[entry["model"]], kernels=kernels)
    cluster = cluster_preset(cluster_name).take(int(entry["gpus"]))
    return [
        simulate(
            model,
            cluster,
            strategy,
            FixedWorkload(
                seq_len=int(entry["seq_len"]),
                global_batch_tokens=int(entry["global_batch"]) * int(entry["seq_len"]),
                micro_batch=int(entry["local_batch"]),
                recomputation=recomputation,
                reduce_dtype="fp32",
            ),
            engine="fsdp",
        )
        for recomputation in _titan_recomputations(entry["activation_ckpt"])
    ]


def _titan_recomputations(text: str) -> list[Recomputation]:
    match text:
        case "no":
            return [Recomputation.NONE]
        case "full":
            return [Recomputation.FULL]
        case "selective layer":
            return [Recomputation.NONE, Recomputation.FULL]
        case _:
            return [Recomputation.SELECTIVE]
