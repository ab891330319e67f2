"""Stages per axis, the notation, presets, and the shard arithmetic. Torch-free."""

from zeromesh.strategy.collective import Collective, find_collective, registered_collective
from zeromesh.strategy.layout import Axis, Layout
from zeromesh.strategy.parts import Part, layouts_of, part_name
from zeromesh.strategy.plan import Plan
from zeromesh.strategy.stage import PRESETS, Stage, Wire
from zeromesh.strategy.strategy import AxisStage, Strategy

__all__ = [
    "PRESETS",
    "Axis",
    "AxisStage",
    "Collective",
    "Layout",
    "Part",
    "Plan",
    "Stage",
    "Strategy",
    "Wire",
    "find_collective",
    "layouts_of",
    "part_name",
    "registered_collective",
]
