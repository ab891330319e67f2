"""zeromesh: a ZeRO stage for every level of the network.

Names are loaded when first used, so that planning never imports torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.api import plan as plan
    from zeromesh.api import simulate as simulate
    from zeromesh.checkpoint.checkpoints import Checkpoints as Checkpoints
    from zeromesh.checkpoint.full_state import full_state_dict as full_state_dict
    from zeromesh.checkpoint.full_state import load_full_state_dict as load_full_state_dict
    from zeromesh.checkpoint.redistribute import copy_values as copy_values
    from zeromesh.engine.parked import parked as parked
    from zeromesh.engine.steps import accumulate as accumulate
    from zeromesh.engine.steps import clip_grad_norm_ as clip_grad_norm_
    from zeromesh.engine.steps import refresh as refresh
    from zeromesh.engine.steps import register_forward_method as register_forward_method
    from zeromesh.engine.steps import sum_over_ranks as sum_over_ranks
    from zeromesh.engine.steps import zero_grad as zero_grad
    from zeromesh.engine.vouched import elementwise as elementwise
    from zeromesh.integrations.huggingface import load_safetensors as load_safetensors
    from zeromesh.integrations.huggingface import save_safetensors as save_safetensors
    from zeromesh.integrations.loading import from_pretrained as from_pretrained
    from zeromesh.integrations.pipelining import pipeline as pipeline
    from zeromesh.observe.record import record_trace as record_trace
    from zeromesh.observe.replicas import check_replicas as check_replicas
    from zeromesh.observe.report import memory_report as memory_report
    from zeromesh.observe.report import traffic_report as traffic_report
    from zeromesh.owners.optimizer import by_owner as by_owner
    from zeromesh.planner.workload import Workload as Workload
    from zeromesh.rehearsal.own import rehearse as rehearse
    from zeromesh.sharding import shard as shard
    from zeromesh.sharding.value import Sharding as Sharding
    from zeromesh.strategy import Strategy as Strategy
    from zeromesh.strategy.parts import Part as Part
    from zeromesh.strategy.plan import Plan as Plan

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "zeromesh.checkpoint.checkpoints",
    "Part": "zeromesh.strategy.parts",
    "Plan": "zeromesh.strategy.plan",
    "Sharding": "zeromesh.sharding.value",
    "Strategy": "zeromesh.strategy",
    "Workload": "zeromesh.planner.workload",
    "accumulate": "zeromesh.engine.steps",
    "by_owner": "zeromesh.owners.optimizer",
    "check_replicas": "zeromesh.observe.replicas",
    "clip_grad_norm_": "zeromesh.engine.steps",
    "copy_values": "zeromesh.checkpoint.redistribute",
    "elementwise": "zeromesh.engine.vouched",
    "from_pretrained": "zeromesh.integrations.loading",
    "full_state_dict": "zeromesh.checkpoint.full_state",
    "load_full_state_dict": "zeromesh.checkpoint.full_state",
    "load_safetensors": "zeromesh.integrations.huggingface",
    "memory_report": "zeromesh.observe.report",
    "parked": "zeromesh.engine.parked",
    "pipeline": "zeromesh.integrations.pipelining",
    "plan": "zeromesh.api",
    "record_trace": "zeromesh.observe.record",
    "refresh": "zeromesh.engine.steps",
    "register_forward_method": "zeromesh.engine.steps",
    "rehearse": "zeromesh.rehearsal.own",
    "save_safetensors": "zeromesh.integrations.huggingface",
    "shard": "zeromesh.sharding",
    "simulate": "zeromesh.api",
    "sum_over_ranks": "zeromesh.engine.steps",
    "traffic_report": "zeromesh.observe.report",
    "zero_grad": "zeromesh.engine.steps",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
    if "IPython" in sys.modules:
        importlib.import_module("zeromesh.report.notebook")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
