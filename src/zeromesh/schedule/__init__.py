"""One training step as data, and the interpreter that engine and simulator run it with. Torch-free.

Reading order: `unit` (its flat buffers), `transfer` (one collective), `buffer_layout` (the shards and transfers of a
flat buffer), `memory` (all buffers), `program` (points and ops), `state` (of units, forward and backward),
`interpreter` (who carries ops out). Whoever needs them imports `bucket` (whole tensors) and `step` (the canonical
order).
"""

from zeromesh.schedule.buffer_layout import BufferLayout, Route, place
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import PointKind, Schedule
from zeromesh.schedule.state import Backward, Call, Forward, GradState, Reducing, Reduction
from zeromesh.schedule.transfer import LANES, LaneKind, Transfer, lane_axes
from zeromesh.schedule.unit import (
    BUCKET_BYTES,
    FROZEN_BYTES,
    ITEM_BYTES,
    FlatBuffer,
    Role,
    Unit,
    join_units,
    joined_name,
    neighbours,
)

__all__ = [
    "BUCKET_BYTES",
    "FROZEN_BYTES",
    "ITEM_BYTES",
    "LANES",
    "Backward",
    "BufferLayout",
    "Call",
    "FlatBuffer",
    "Forward",
    "GradState",
    "Interpreter",
    "LaneKind",
    "PointKind",
    "Reducing",
    "Reduction",
    "Role",
    "Route",
    "Schedule",
    "Transfer",
    "Unit",
    "join_units",
    "joined_name",
    "lane_axes",
    "neighbours",
    "place",
]
