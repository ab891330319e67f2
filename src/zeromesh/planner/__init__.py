"""Enumerates layouts, prunes, simulates, ranks and explains. Torch-free."""

from zeromesh.planner.evaluate import Candidate, Estimate
from zeromesh.planner.explain import Reason
from zeromesh.planner.memory import ModelState, model_state
from zeromesh.planner.plan import Choice, Planned, plan
from zeromesh.planner.search import NothingFitsError, Options, search
from zeromesh.planner.workload import Workload

__all__ = [
    "Candidate",
    "Choice",
    "Estimate",
    "ModelState",
    "NothingFitsError",
    "Options",
    "Planned",
    "Reason",
    "Workload",
    "model_state",
    "plan",
    "search",
]
