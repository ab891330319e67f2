"""Stages per axis, the notation, presets, and the shard arithmetic. Torch-free. Parts of a model (`parts`) and plans
(`plan`) are loaded by whoever uses them."""

from zeromesh.strategy.collective import Collective, find_collective, registered_collective
from zeromesh.strategy.layout import Axis, Layout
from zeromesh.strategy.stage import PRESETS, Stage, Wire
from zeromesh.strategy.strategy import AxisStage, Strategy

__all__ = [
    "PRESETS",
    "Axis",
    "AxisStage",
    "Collective",
    "Layout",
    "Stage",
    "Strategy",
    "Wire",
    "find_collective",
    "registered_collective",
]
