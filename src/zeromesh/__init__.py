"""zeromesh: a ZeRO stage for every level of the network.

Names are loaded when first used, so that what only plans never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.api import plan, shard, simulate
    from zeromesh.engine.api import accumulate, clip_grad_norm_, elementwise, refresh, sum_over_ranks, zero_grad
    from zeromesh.engine.checkpoint import Checkpoints
    from zeromesh.engine.record import record_trace
    from zeromesh.engine.replicas import check_replicas
    from zeromesh.engine.report import memory_report, traffic_report
    from zeromesh.engine.safetensors import load_safetensors, save_safetensors
    from zeromesh.engine.state import full_state_dict, load_full_state_dict
    from zeromesh.planner import Workload
    from zeromesh.strategy import Plan, Strategy

__version__ = "0.1.0.dev0"

_HOMES = {
    "Checkpoints": "zeromesh.engine.checkpoint",
    "Plan": "zeromesh.strategy",
    "Strategy": "zeromesh.strategy",
    "Workload": "zeromesh.planner",
    "accumulate": "zeromesh.engine.api",
    "check_replicas": "zeromesh.engine.replicas",
    "clip_grad_norm_": "zeromesh.engine.api",
    "elementwise": "zeromesh.engine.api",
    "full_state_dict": "zeromesh.engine.state",
    "load_full_state_dict": "zeromesh.engine.state",
    "load_safetensors": "zeromesh.engine.safetensors",
    "memory_report": "zeromesh.engine.report",
    "plan": "zeromesh.api",
    "record_trace": "zeromesh.engine.record",
    "refresh": "zeromesh.engine.api",
    "save_safetensors": "zeromesh.engine.safetensors",
    "shard": "zeromesh.api",
    "simulate": "zeromesh.api",
    "sum_over_ranks": "zeromesh.engine.api",
    "traffic_report": "zeromesh.engine.report",
    "zero_grad": "zeromesh.engine.api",
}

__all__ = [
    "Checkpoints",
    "Plan",
    "Strategy",
    "Workload",
    "accumulate",
    "check_replicas",
    "clip_grad_norm_",
    "elementwise",
    "full_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "memory_report",
    "plan",
    "record_trace",
    "refresh",
    "save_safetensors",
    "shard",
    "simulate",
    "sum_over_ranks",
    "traffic_report",
    "zero_grad",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
