"""Runs a schedule on a virtual clock: step time, traffic, memory and a trace, before anyone books the cluster."""

from zeromesh.simulator.mechanics import ENGINES, Mechanics, find_engine
from zeromesh.simulator.memory import MemoryBytes
from zeromesh.simulator.result import AxisTraffic, Simulation
from zeromesh.simulator.run import DEFAULT_MARGIN, simulate, static_memory
from zeromesh.simulator.workload import FixedWorkload

__all__ = [
    "DEFAULT_MARGIN",
    "ENGINES",
    "AxisTraffic",
    "FixedWorkload",
    "Mechanics",
    "MemoryBytes",
    "Simulation",
    "find_engine",
    "simulate",
    "static_memory",
]
