"""Fits the cost model's constants and writes `src/zeromesh/cost/data/constants.toml`.

Reads micro-benchmarks (`validation/data/calibration/`) and, for compute efficiency by shape, the 8-GPU rows
of the LLM Foundry table for its 1b, 7b and 30b models. No other row of a published table is opened here.

    python tools/fit_costs.py [--check]     --check: fail if the file on disk differs
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from zeromesh.cluster.catalogue import preset, preset_names
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.cost.collective import collective_cost
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import Constants
from zeromesh.cost.contention import memory_passes, slowdown, taken_share
from zeromesh.cost.group import Group
from zeromesh.cost.transfer import TransferModel
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.shape import FUSED
from zeromesh.model.spec import ModelSpec, Recomputation, UnitKind
from zeromesh.strategy import Layout

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "validation/data"
OUT = ROOT / "src/zeromesh/cost/data/constants.toml"
LARGE_BYTES = 2**30
NODE_CHANNELS, A100_MULTIPROCESSORS = 24.0, 108

Row = dict[str, str]
Entry = tuple[float, str, str]  # value, how, source
Span = tuple[float, float, str]  # low, high, between what


def rows(name: str, folder: str = "calibration") -> list[Row]:
    with (DATA / folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Links ------------------------------------------------------------------------------------------------------------


def link_shares() -> dict[str, Entry]:
    """Returns bus bandwidth of large messages over nominal bandwidth, by kind of link."""
    return {
        "nvlink": _median_entry(_nvlink_shares(), "collectives_bandwidth: rings on A100, H200, B200 of 1 GiB and more"),
        "xgmi": _median_entry(
            _xgmi_shares(), "collectives_bandwidth MI300X rows; lumi_mi250x_comm_log in-node gathers"
        ),
        "pcie": (0.8, "assumed", "no measurement at hand; common for large copies"),
        "infiniband": _median_entry(_simai_nic(), "simai_bandwidth_ratio nic_ratio, 2 to 128 nodes at 16 GiB"),
        "roce": _median_entry(_simai_nic(), "simai_bandwidth_ratio nic_ratio, 2 to 128 nodes at 16 GiB"),
        "ethernet": (
            0.94,
            "cited",
            "TCP over frames of 1500 bytes: 1448 of 1538 on the wire are data (RFC 9293, 7323)",
        ),
        "efa": _median_entry(_efa_shares(), "collectives_bandwidth: B200 P6 and H200 p5en, 4 nodes, 4 GiB and more"),
        "slingshot": _median_entry(_slingshot_shares(), "lumi_mi250x_comm_log: gathers of 100 MB and more over nodes"),
        "loopback": (1.0, "cited", "rates in cluster files of this kind are measured ones"),
        "other": (0.9, "assumed", "between RDMA networks and NVLink"),
    }


def _median_entry(values: Sequence[float], source: str) -> Entry:
    return round(statistics.median(values), 4), "fitted", source


def ranges(constants: Constants) -> dict[str, Span]:
    """Returns (low, high, source) of constants that measurements leave open and a choice of layout may depend on."""
    measured = {
        "nvlink": (_nvlink_shares(), "the devices it is the median of"),
        "xgmi": (_xgmi_shares(), "the devices it is the median of"),
        "infiniband": (_simai_nic(), "the numbers of nodes it is the median of"),
        "roce": (_simai_nic(), "the numbers of nodes it is the median of"),
        "efa": (_efa_shares(), "the rows it is the median of"),
        "slingshot": (_slingshot_shares(), "the gathers it is the median of"),
    }
    found = {
        f"link_share.{kind}": (round(min(values), 4), round(max(values), 4), source)
        for kind, (values, source) in measured.items()
    }
    one = (1 - 1 / _overlap()) * A100_MULTIPROCESSORS / NODE_CHANNELS
    found["channel_share"] = (
        _digits(one * 5 / NODE_CHANNELS),
        _digits((1 - 1 / 1.4 - _by_memory(constants)) * A100_MULTIPROCESSORS / NODE_CHANNELS),
        "kernels of 5 blocks instead of 24 (NVIDIA/Fuser#5837); computation 1.189 times as long on average and 1.400 "
        "at most, on A100, H100, MI210 and MI250 (arXiv 2507.03114), less what memory accounts for in a Llama of 7B",
    )
    found["node_passes"] = 2.0, 3.0, "what is only stored and read back, and the user's data too (NVIDIA/nccl#1428)"
    found["host_memory_bytes_per_s"] = (
        20e9,
        270e9,
        "reports of steps on the host, of one socket without fused kernels and of two with twelve channels each",
    )
    found["host_issue_s"] = 0.0, 1e-3, "none seen, and what a unit's pre-forward takes in FSDP2 (pytorch#173680)"
    return found


def _by_memory(constants: Constants) -> float:
    """Returns the share of computation time that a gather inside the node takes by moving its bytes (Llama of 7B on
    A100)."""
    cluster, model = preset("a100-8x-hdr").take(8), model_preset("llama-7b")
    compute = ComputeModel(device=cluster.device, constants=constants)
    gather = TransferModel(cluster, constants, compute).joint(
        Layout.of("node=3,cluster=3", cluster.axes).axes[:1], "all_gather", 2**30, "bf16"
    )
    block = next(unit for unit in model.units if unit.kind is UnitKind.BLOCK)
    seconds = compute.unit(block, tokens=2048, seq_len=2048, recomputation=Recomputation.NONE)
    return seconds.moving * gather.memory_s / gather.transfer_s


def _overlap() -> float:
    return float(next(r for r in rows("galvatron_hardware_profile") if r["key"] == "overlap_coe")["value"])


def _nvlink_shares() -> list[float]:
    nominal = {"A100 SXM NVLink3": 300.0, "H200 NVLink4": 450.0, "B200 p6-b200 NVLink5": 900.0}
    by_hardware: dict[str, list[float]] = {}
    for row in rows("collectives_bandwidth"):
        if row["hardware"] not in nominal or row["algo"] == "NVLS" or float(row["payload_bytes"]) < LARGE_BYTES:
            continue
        if row["busbw_GBps"]:
            by_hardware.setdefault(row["hardware"], []).append(float(row["busbw_GBps"]) / nominal[row["hardware"]])
    return [statistics.median(shares) for shares in by_hardware.values()]


def _xgmi_shares() -> list[float]:
    mi300x = [
        float(row["busbw_GBps"]) / (64.0 * (int(row["gpus"]) - 1))
        for row in rows("collectives_bandwidth")
        if row["hardware"] == "MI300X"
    ]
    mi250x = [
        float(row["busbw_GBps_per_gcd(derived)"]) / 100.0
        for row in rows("lumi_mi250x_comm_log")
        if row["note"].startswith("TP group") and row["busbw_GBps_per_gcd(derived)"]
    ]
    return [*mi300x, statistics.median(mi250x)]


def _simai_nic() -> list[float]:
    return [
        float(row["ratio"])
        for row in rows("simai_bandwidth_ratio")
        if row["file"] == "nic_ratio.csv" and row["payload_bytes"] == str(16 * 2**30) and "Node" in row["column"]
        if not row["column"].startswith("1 Node") and row["ratio"]
    ]


def _efa_shares() -> list[float]:
    return [
        float(row["busbw_GBps"]) / 400.0
        for row in rows("collectives_bandwidth")
        if row["nodes"] == "4" and ("B200 P6" in row["hardware"] or "p5en" in row["hardware"])
        if row["busbw_GBps"] and float(row["payload_bytes"]) >= 4 * LARGE_BYTES and "nvlstree" not in row["algo"]
    ]


def _slingshot_shares() -> list[float]:
    """Returns bandwidth per GCD, times the 8 GCDs that share a node's 100 GB/s, as a share of these."""
    return [
        8 * float(row["busbw_GBps_per_gcd(derived)"]) / 100.0
        for row in rows("lumi_mi250x_comm_log")
        if row["op"] == "all_gather" and "8 groups share" in row["note"] and float(row["total_bytes(derived)"]) > 1e8
    ]


# NCCL's own latencies -----------------------------------------------------------------------------------------------


def tuning() -> tuple[dict[str, Entry], float, float]:
    """Returns the entries for launch, tree and peer, and a step's latency inside and between nodes, which presets
    state."""
    table = [r for r in rows("h100_nccl_tuning_table") if r["proto"] == "SIMPLE"]
    ring = [r for r in table if r["collective"].startswith("all_gather") and r["algo"] == "RING"]
    design, target = [], []
    for row in ring:
        nodes, ranks = int(row["nodes"]), int(row["ranks"])
        design.append([1.0, ranks - nodes, nodes - 1])
        target.append(float(row["latency_us"]))
    launch, inside, between = _least_squares(design, target)
    trees = {(r["nodes"], r["ranks"]): r for r in table if r["collective"] == "all_reduce" and r["algo"] == "TREE"}
    shares, steps = [], []
    for row in table:
        if row["collective"] != "all_reduce" or row["algo"] != "RING" or int(row["nodes"]) < 4:
            continue
        tree = trees[row["nodes"], row["ranks"]]
        shares.append(float(tree["algbw_GBps"]) / float(row["algbw_GBps"]))
        per_node = int(row["ranks_per_node"])
        if per_node > 1:
            up = 2 * math.ceil(math.log2(int(row["nodes"]))) * between
            steps.append((float(tree["latency_us"]) - launch - up) / (2 * (per_node - 1)) / inside)
    source = "h100_nccl_tuning_table, protocol Simple"
    entries = {
        "launch_s": (_digits(launch * 1e-6), "fitted", f"{source}: ring latencies at zero steps"),
        "tree_share": (_digits(statistics.median(shares)), "fitted", f"{source}: tree over ring, 4 nodes and more"),
        "tree_step_share": (_digits(statistics.median(steps)), "fitted", f"{source}: tree steps inside a node"),
        "peer_s": (_digits(_peer_us() * 1e-6), "fitted", "h100_nccl_tuning_table, measured all-to-all of 0 bytes"),
    }
    return entries, inside * 1e-6, between * 1e-6


def _peer_us() -> float:
    measured = [r for r in rows("h100_nccl_tuning_table") if r["collective"] == "all_to_all"]
    _, slope = _least_squares([[1.0, float(r["ranks"])] for r in measured], [float(r["latency_us"]) for r in measured])
    return slope


# Message size inside a node -----------------------------------------------------------------------------------------


def message_size(constants: Constants, step_s: float) -> dict[str, Entry]:
    """Fits the scale and power of the size term to A100 all-reduces over NVLink of 1 MiB and more."""
    samples = list(_a100_all_reduces())
    best = min(
        ((scale * 1e-6, power / 20) for scale in range(4, 204, 2) for power in range(2, 21)),
        key=lambda pair: _size_error(replace(constants, size_scale_s=pair[0], size_power=pair[1]), samples, step_s),
    )
    source = (
        "collectives_bandwidth A100 SXM (nccl-tests); galvatron_hardware_profile sp_time all-reduces: 1 MiB and more"
    )
    return {"size_scale_s": (best[0], "fitted", source), "size_power": (best[1], "fitted", source)}


def _a100_all_reduces() -> Iterable[tuple[int, float, float]]:
    """Yields (gpus, bytes, seconds)."""
    for row in rows("collectives_bandwidth"):
        if row["hardware"] == "A100 SXM NVLink3" and float(row["payload_bytes"]) >= 2**20:
            yield int(row["gpus"]), float(row["payload_bytes"]), float(row["time_us"]) * 1e-6
    for row in rows("galvatron_hardware_profile"):
        parts = row["key"].split("_")
        if row["key"].startswith("allreduce_size_") and row["unit"] == "ms":
            yield int(parts[2]), float(parts[3].removesuffix("MB")) * 2**20, float(row["value"]) * 1e-3


def _size_error(constants: Constants, samples: Sequence[tuple[int, float, float]], step_s: float) -> float:
    node = Level(name="node", size=8, bandwidth_bytes_per_s=300e9, latency_s=step_s, kind="nvlink")
    cluster = Cluster(
        name="a100", device=Device(name="a100", memory_bytes=80e9, peak_flops={"bf16": 312e12}), levels=(node,)
    )
    total = 0.0
    for gpus, size_bytes, seconds in samples:
        group = Group.of(cluster, [("node", gpus)], constants)
        predicted = collective_cost(group, "all_reduce", size_bytes, constants).seconds
        total += abs(math.log(predicted / seconds))
    return total / len(samples)


# Compute --------------------------------------------------------------------------------------------------------------

FITTED = (
    "matmul_share",
    "matmul_backward_share",
    "matmul_scale",
    "attention_forward_share",
    "attention_backward_share",
    "traffic",
)
START = (0.95, 0.9, 300.0, 0.65, 0.3, 1.0)


def _with(constants: Constants, values: Mapping[str, float]) -> Constants:
    return replace(constants, **values)  # type: ignore[arg-type]  # the fields fitted are all floats


def compute(constants: Constants) -> dict[str, Entry]:
    """Fits the efficiency by shape class: Nelder-Mead on the mean absolute log error."""
    samples = [*_foundry_samples(), *_galvatron_samples()]

    def error(point: Sequence[float]) -> float:
        if min(point) <= 0 or max(*point[:2], *point[3:5]) > 1:
            return 1e9
        trial = _with(constants, dict(zip(FITTED, point, strict=True)))
        # The error is absolute, not squared: one row ran at the edge of memory, and must not bend the rest.
        logs = [abs(math.log(predict(trial) / seconds)) for seconds, predict in samples]
        return sum(logs) / len(logs)

    best = nelder_mead(error, START)
    errors = sorted(
        abs(predict(_with(constants, dict(zip(FITTED, best, strict=True)))) / s - 1) for s, predict in samples
    )
    print(f"compute: {len(samples)} samples, median error {statistics.median(errors):.3f}, worst {errors[-1]:.3f}")
    source = "llm_foundry_mpt_a100, 8-GPU rows of 1b, 7b, 30b; galvatron_llama2_7b_compute_profile"
    return {name: (_digits(value), "fitted", source) for name, value in zip(FITTED, best, strict=True)}


Sample = tuple[float, Callable[[Constants], float]]


def _galvatron_samples() -> Iterable[Sample]:
    """Yields the forward seconds of one block of llama2-7b per sequence of 2048 tokens on an A100, with a
    prediction."""
    model = model_preset("llama2-7b", kernels=FUSED)
    block = next(unit for unit in model.units if unit.kind is UnitKind.BLOCK)
    device = preset("a100-8x-hdr").device
    for row in rows("galvatron_llama2_7b_compute_profile"):
        if row["key"].startswith("layertype_0_"):
            batch = int(row["key"].split("bsz")[1].split("_")[0])

            def predict(constants: Constants, tokens: int = 2048 * batch, batch: int = batch) -> float:
                seconds = ComputeModel(device=device, constants=constants).unit(
                    block, tokens=tokens, seq_len=2048, recomputation=Recomputation.NONE
                )
                return seconds.forward / batch

            yield float(row["value"]) * 1e-3, predict


def _foundry_samples() -> Iterable[Sample]:
    """Yields seconds per step and GPU, with a prediction. Communication in the node hides under compute and slows
    it."""
    for row in rows("llm_foundry_mpt_a100", "published"):
        if row["# GPUs"] == "8" and row["Model"] in ("1b", "7b", "30b"):
            yield _foundry_seconds(row), _foundry_predictor(row)


def _foundry_seconds(row: Row) -> float:
    tokens = int(row["MicroBatchSize"]) * int(row["GradAccum"]) * int(row["SeqLen (T)"])
    return tokens / float(row["Throughput (T/s/GPU)"])


def _foundry_predictor(row: Row) -> Callable[[Constants], float]:
    cluster = preset("a100-8x-1600g" if "80gb" in row["GPU"] else "a100-40g-8x-1600g").take(8)
    model = model_preset(f"mpt-{row['Model']}")
    seq_len, micro_batches = int(row["SeqLen (T)"]), int(row["GradAccum"])
    tokens = int(row["MicroBatchSize"]) * seq_len
    full = row["Activation Checkpointing"] == "True"
    recomputation = Recomputation.FULL if full else Recomputation.NONE
    # PURE: bf16 gathers and reductions; DEFAULT: gradients in fp32 (composer's FSDP mixed precision).
    reduce_bytes = 2 if row["MP Mode"] == "PURE" else 4

    def predict(constants: Constants) -> float:
        device = ComputeModel(device=cluster.device, constants=constants)
        busy, moving = _model_seconds(device, model, tokens, seq_len, recomputation)
        hidden, memory_s = _communication(cluster, model, reduce_bytes, device)
        taken = taken_share(cluster, Layout.of("zero3", cluster.axes).axes, constants)
        micro_batch = busy + (slowdown(taken + moving * memory_s / hidden) - 1) * min(hidden, busy)
        return micro_batches * micro_batch + device.optimizer(model.num_params / cluster.world)

    return predict


def _model_seconds(
    device: ComputeModel, model: ModelSpec, tokens: int, seq_len: int, recomputation: Recomputation
) -> tuple[float, float]:
    """Returns the seconds of all units, and the share of them spent waiting for memory."""
    total = moving = 0.0
    for unit in model.units:
        seconds = device.unit(unit, tokens=tokens, seq_len=seq_len, recomputation=recomputation)
        total += unit.count * seconds.total
        moving += unit.count * seconds.total * seconds.moving
    return total, moving / total


def _communication(cluster: Cluster, model: ModelSpec, reduce_bytes: int, device: ComputeModel) -> tuple[float, float]:
    """Returns the seconds of all units' transfers, and the seconds for which they use the device's memory."""
    group = Group.of(cluster, [("node", 8)], device.constants)
    total = sent_bytes = 0.0
    for unit in model.units:
        gather = collective_cost(group, "all_gather", 2 * unit.num_params, device.constants)
        reduce = collective_cost(group, "reduce_scatter", reduce_bytes * unit.num_params, device.constants)
        total += unit.count * (2 * gather.seconds + reduce.seconds)
        sent_bytes += unit.count * (2 * gather.sent_bytes + reduce.sent_bytes)
    return total, device.memory(memory_passes(group, device.constants) * sent_bytes)


# Numerics -------------------------------------------------------------------------------------------------------------


def _least_squares(design: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    found: list[float] = np.linalg.lstsq(np.array(design), np.array(target))[0].tolist()
    return found


def nelder_mead(error: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 800) -> list[float]:
    """Minimizes `error` by the simplex method of Nelder and Mead (1965), deterministically from `start`."""
    simplex = [list(start)] + [[v * (1.2 if i == j else 1.0) for j, v in enumerate(start)] for i in range(len(start))]
    scored = sorted(((error(p), p) for p in simplex), key=lambda pair: pair[0])
    for _ in range(rounds):
        centre = [sum(p[i] for _, p in scored[:-1]) / len(start) for i in range(len(start))]
        worst = scored[-1][1]

        def along(
            t: float, centre: Sequence[float] = centre, worst: Sequence[float] = worst
        ) -> tuple[float, list[float]]:
            point = [c + t * (c - w) for c, w in zip(centre, worst, strict=True)]
            return error(point), point

        reflected = along(1.0)
        if reflected[0] < scored[0][0]:
            scored[-1] = min(reflected, along(2.0), key=lambda pair: pair[0])
        elif reflected[0] < scored[-2][0]:
            scored[-1] = reflected
        else:
            inside = along(-0.5)
            if inside[0] < scored[-1][0]:
                scored[-1] = inside
            else:
                best = scored[0][1]
                shrunk = [[b + 0.5 * (v - b) for b, v in zip(best, p, strict=True)] for _, p in scored[1:]]
                scored = [scored[0], *((error(p), p) for p in shrunk)]
        scored.sort(key=lambda pair: pair[0])
    return scored[0][1]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


# Cited --------------------------------------------------------------------------------------------------------------


def cited() -> dict[str, Entry]:
    efficiencies = [
        float(r["efficiency"].rstrip("%")) / 100
        for r in rows("accelerator_mamf")
        if r["precision"] == "BF16" and r["efficiency"]
    ]
    return {
        "achievable_share": (
            _digits(statistics.median(efficiencies)),
            "fitted",
            "accelerator_mamf: median of BF16 rows",
        ),
        "flops_per_byte": (_flops_per_byte(), "cited", "median over the presets' devices, all with a data sheet"),
        "memory_share": (
            0.85,
            "assumed",
            "STREAM-like kernels on HBM; scales with traffic, which is fitted at this value",
        ),
        "optimizer_bytes": (
            30.0,
            "cited",
            "fused AdamW: read gradient, master, two moments (16), write the last three and bf16 (14)",
        ),
        "node_channels": (NODE_CHANNELS, "cited", "NVIDIA/nccl#1225: 24 blocks on DGX A100; as many seen on H100"),
        "card_channels": (2.0, "cited", "NVIDIA/nccl#438: two channels a card keep it busy"),
        "channel_share": (
            _digits((1 - 1 / _overlap()) * A100_MULTIPROCESSORS / NODE_CHANNELS),
            "fitted",
            "galvatron_hardware_profile: overlap_coe, of 24 channels on 108 multiprocessors",
        ),
        "node_passes": (
            3.0,
            "cited",
            "NVIDIA/nccl#1428: stored, read back, and read from or written to the user's data",
        ),
        "card_passes": (5.0, "cited", "as inside a node, and a card reads and stores what passes (GPUDirect RDMA)"),
        "multiprocessors": (132.0, "assumed", "H100's, for devices that state none"),
        "host_issue_s": (
            0.0,
            "assumed",
            "no engine's on a GPU is known; the collective's call alone: 76 us (pytorch#102434)",
        ),
        "host_copy_bytes_per_s": (
            25e9,
            "cited",
            "PCIe 4.0 x16 in one direction: 32 GB/s nominal, 25 from pinned memory",
        ),
        "host_memory_bytes_per_s": (50e9, "assumed", "one socket's memory as fused AdamW on a CPU reaches it"),
        "host_ahead_s": (4.5e-3, "cited", "about 1000 launches are queued, of 4 to 5 us each (stackoverflow 53970187)"),
        "context_bytes": (
            0.75e9,
            "assumed",
            "CUDA context and library workspaces: about .5 GB as nvidia-smi shows it, cuBLAS .05 to .3",
        ),
        "communicator_bytes": (
            0.22e9,
            "cited",
            "NCCL user guide, NCCL_BUFFSIZE 4 MiB a channel and peer; LL128 and LL about as much; 24 channels",
        ),
        "allocator_share": (0.03, "assumed", "fragmentation of a caching allocator under a steady workload"),
    }


def _flops_per_byte() -> float:
    devices = {d.name: d for d in (preset(name).device for name in preset_names())}
    return _digits(statistics.median(d.peak() / d.memory_bytes_per_s for d in devices.values() if d.memory_bytes_per_s))


def fit() -> tuple[dict[str, Entry], Constants]:
    """Returns all entries in the file's order, and the constants made from them."""
    links = link_shares()
    latencies, inside_s, between_s = tuning()
    print(f"steps: inside a node {inside_s * 1e6:.2f} us, between nodes {between_s * 1e6:.2f} us (presets state them)")
    fixed = {**latencies, **cited()}
    blank = {"size_scale_s": 0.0, "size_power": 1.0} | dict(zip(FITTED, START, strict=True))
    values = {name: entry[0] for name, entry in fixed.items()}
    constants = Constants(link_share={kind: entry[0] for kind, entry in links.items()}, **blank, **values)
    sizes = message_size(constants, inside_s)
    constants = _with(constants, {name: entry[0] for name, entry in sizes.items()})
    shapes = compute(constants)
    constants = _with(constants, {name: entry[0] for name, entry in shapes.items()})
    shares = {f"link_share.{kind}": entry for kind, entry in links.items()}
    return {**shares, **latencies, **sizes, **shapes, **cited()}, constants


def render(entries: dict[str, Entry], constants: Constants) -> str:
    lines = ["# Written by tools/fit_costs.py. Do not edit: change the script and run it again.", ""]
    spans = ranges(constants)
    for key, (value, how, source) in entries.items():
        fields = [f"value = {value!r}", f'how = "{how}"', f'source = "{source}"']
        if key in spans:
            low, high, why = spans[key]
            fields += [f"low = {low!r}", f"high = {high!r}", f'between = "{why}"']
        lines.append(f"{key} = {{ {', '.join(fields)} }}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = render(*fit())
    if options.check:
        same = OUT.read_text(encoding="utf-8") == text
        print("constants are up to date" if same else "constants differ: run tools/fit_costs.py")
        return 0 if same else 1
    OUT.write_text(text, encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
