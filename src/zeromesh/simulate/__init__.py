"""Runs a schedule on a virtual clock: step time, traffic, memory and a trace, before anyone books the cluster."""

from zeromesh.simulate.mechanics import ENGINES, Mechanics, find_engine
from zeromesh.simulate.memory import MemoryBytes
from zeromesh.simulate.result import AxisTraffic, Simulation
from zeromesh.simulate.run import DEFAULT_MARGIN, simulate
from zeromesh.simulate.workload import Workload

__all__ = [
    "DEFAULT_MARGIN",
    "ENGINES",
    "AxisTraffic",
    "Mechanics",
    "MemoryBytes",
    "Simulation",
    "Workload",
    "find_engine",
    "simulate",
]
