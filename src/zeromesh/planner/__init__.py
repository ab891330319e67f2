"""Enumerates layouts, prunes, simulates, ranks and explains. Torch-free."""

from zeromesh.planner.evaluate import Candidate, Choice, Estimate
from zeromesh.planner.explain import Reason
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.like import Calibration, calibrate, read_run
from zeromesh.planner.plan import Planned, as_plan, plan
from zeromesh.planner.search import NothingFitsError, Options, collective_choices, search
from zeromesh.planner.what_if import what_if
from zeromesh.planner.workload import Workload

__all__ = [
    "Calibration",
    "Candidate",
    "Choice",
    "Estimate",
    "NothingFitsError",
    "Options",
    "Planned",
    "Reason",
    "Workload",
    "as_plan",
    "calibrate",
    "collective_choices",
    "plan",
    "read_run",
    "search",
    "simulate_choices",
    "what_if",
]
