"""Stages per axis, the notation, presets, and the shard arithmetic. Torch-free. Presets, parts of a model
(`parts`) and plans (`plan`) are loaded by whoever uses them."""

from zeromesh.strategy.collective import Collective
from zeromesh.strategy.layout import Axis, Layout
from zeromesh.strategy.stage import Stage, Wire
from zeromesh.strategy.strategy import Strategy

__all__ = ["Axis", "Collective", "Layout", "Stage", "Strategy", "Wire"]
