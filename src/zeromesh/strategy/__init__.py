"""Stages per axis, the notation, presets, and the shard arithmetic. Torch-free. Presets, parts of a model
(`parts`) and plans (`plan`) are loaded by whoever uses them."""

from zeromesh.strategy.collective import Collective, find_collective, registered_collective
from zeromesh.strategy.layout import Axis, Layout
from zeromesh.strategy.stage import Stage, Wire
from zeromesh.strategy.strategy import AxisStage, Strategy

__all__ = [
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
