"""A probe that is made up."""

from typing import Any

from zeromesh.measure.steps import Batch

BATCH = Batch(model="tiny", sequences=1, tokens=16, micro_batches=2)
MESH = {"cluster": 2, "node": 2}


def raw(latency: float = 1e-4, *, loaded: float = 1.0, spread: float = 1.0) -> dict[str, Any]:
    """A probe of 500 MB/s inside and 25 MB/s outside; `loaded` times as slow in its second half, and `spread` times in
    every second round."""

    def times(rate: float) -> dict[str, list[float]]:
        return {
            str(size): [(latency + size / rate) * (1 if i < 4 else loaded) * spread ** (i % 2) for i in range(8)]
            for size in (10_000, 100_000, 1_000_000)
        }

    levels = {
        name: {
            "backend": "gloo",
            "timings": {"all_gather": times(rate), "reduce_scatter": times(rate), "all_reduce": times(1.5 * rate)},
            "beside": {name: {"10000": [2e-3] * 6} for name in ("all_gather", "reduce_scatter", "all_reduce")},
            "host_s_per_byte": 1e-9,
            "host_call_s": 0.0,
        }
        for name, rate in (("node", 5e8), ("cluster", 12.5e6))
    }
    machine = {
        "name": "cpu",
        "memory_bytes": 1e9,
        "host_memory_bytes": 4e9,
        "host_copy_bytes_per_s": 5e9,
        "host_copies": {},
        "host_step_bytes_per_s": 2e10,
        "memory_bytes_per_s": 1e10,
        "peak_flops": {"fp32": 1e10},
        "cores": 0.5,
        "ranks_per_machine": 4,
    }
    return {"machine": machine, "levels": levels}
