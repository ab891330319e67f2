"""Where a step's time goes, beside what the simulator charges for it: make bench-step_parts.

A step of one process is taken apart by torch's profiler into the cost model's own kinds of work. Whoever has a step
that takes longer than predicted sees here which term is wrong. Four settings take a minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from bench.rows import planned_s
from zeromesh.cluster import Cluster
from zeromesh.cost import ComputeModel, default_constants
from zeromesh.launch.job import make_folder
from zeromesh.launch.ranks import Ranks, join_ranks
from zeromesh.measure.kernels import measure_kernels
from zeromesh.measure.machine import measure_machine
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import Batch, Training
from zeromesh.model.spec import DTYPE_BYTES, Recomputation, UnitKind

KINDS = {
    "product": ("aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"),
    "attention": ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "gradient copies": ("aten::_foreach_copy_", "aten::_foreach_add_", "aten::_foreach_zero_"),
    "optimizer": ("aten::_fused_adamw_",),
    "embedding": ("aten::embedding", "aten::embedding_backward", "aten::embedding_dense_backward"),
    "loss": ("aten::cross_entropy_loss", "aten::nll_loss_backward", "aten::_log_softmax_backward_data"),
}
"""By the outermost operation that has a kind; backwards of a name are of its kind."""

REST = "elementwise kernels, calls, hooks"


Parts = defaultdict[str, float]
"""Seconds of a step by kind."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=["7M", "30M"])
    parser.add_argument("--dtype", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with make_folder() as folder, join_ranks({"node": 1}, folder / "meeting", threads=1) as ranks:
        for batch in [Batch(model=model, dtype=dtype) for model in arguments.model for dtype in arguments.dtype]:
            raw = {"machine": measure_machine(ranks), "kernels": measure_kernels(ranks, batch.work), "levels": {}}
            cluster = from_raw(raw, {"node": 1}, "here").cluster
            show(batch, measured(ranks, batch, arguments.steps), charged(batch, cluster))


def measured(ranks: Ranks, batch: Batch, steps: int) -> Parts:
    """Seconds of a step by kind; what is of none is the rest, which profiling does not lengthen so."""
    training = Training(ranks, batch, None)
    training.timed(3)
    whole = statistics.median(training.timed(steps))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        training.timed(steps)
    parts = defaultdict[str, float](float)
    for event in found.events() or ():
        if kind := kind_of(event):
            parts[kind] += event.self_cpu_time_total / 1e6 / steps
    parts[REST] = whole - sum(parts.values())
    parts["whole"] = whole
    return parts


def kind_of(event: FunctionEvent) -> str | None:
    """Of the outermost operation around it that has one."""
    around = list(_around(event))
    for outer in reversed(around):
        for kind, names in KINDS.items():
            if any(outer.name == name or outer.name == f"{name}_backward" for name in names):
                return kind
    return "optimizer" if around[-1].name == "aten::copy_" else None  # in a lane, of what a step has changed


def _around(event: FunctionEvent) -> Iterator[FunctionEvent]:
    each: FunctionEvent | None = event
    while each is not None:
        yield each
        each = each.cpu_parent


def charged(batch: Batch, cluster: Cluster) -> Parts:
    """The same as the simulator has it."""
    model = ComputeModel(device=cluster.device, constants=default_constants(), dtype=batch.dtype)
    tokens, parts = batch.sequences * batch.tokens, defaultdict[str, float](float)
    for unit in batch.spec.units:
        times = sum(model.matmul(m, tokens) + 2 * model.matmul(m, tokens, backward=True) for m in unit.matmuls)
        parts["product"] += unit.count * times
        seconds = model.unit(unit, tokens=tokens, seq_len=batch.tokens, recomputation=Recomputation.NONE)
        other = model.elementwise(unit, tokens, batch.tokens) + 2 * model.elementwise(
            unit, tokens, batch.tokens, backward=True
        )
        parts["attention"] += unit.count * (seconds.forward + seconds.backward - times - other)
        parts[REST if unit.kind is UnitKind.BLOCK else "loss"] += unit.count * other
    collected = model.gradients(batch.spec.num_params * (4 + DTYPE_BYTES[batch.dtype]))
    parts["gradient copies"] = collected
    parts["optimizer"] = model.optimizer(batch.spec.num_params)
    parts["whole"] = planned_s("node=0", cluster, batch)
    return parts


def show(batch: Batch, found: Parts, expected: Parts) -> None:
    print(f"{batch.model} {batch.dtype}: {found['whole'] * 1e3:.1f} ms, predicted {expected['whole'] * 1e3:.1f} ms")
    for kind in sorted({*found, *expected} - {"whole"}, key=lambda kind: -found[kind]):
        print(f"  {kind:<34} {found[kind] * 1e3:8.2f} ms, charged {expected[kind] * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
