"""The published tables, each row with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from validation.row import Row
from validation.tables.amsp import amsp_layout_rows, amsp_mfu_rows, amsp_rows
from validation.tables.bridge import bridge_rows, symmetric_rows
from validation.tables.cut import collective_rows, context_rows
from validation.tables.fsdp import foundry_rows, torchtitan_rows
from validation.tables.memory import galvatron_rows, internevo_rows
from validation.tables.ratios import frontier_rows, paro_rows, zeropp_rows

SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "amsp": amsp_rows,
    "amsp-layouts": amsp_layout_rows,
    "amsp-mfu": amsp_mfu_rows,
    "llm-foundry": foundry_rows,
    "torchtitan": torchtitan_rows,
    "zeropp": zeropp_rows,
    "paro": paro_rows,
    "frontier": frontier_rows,
    "internevo": internevo_rows,
    "galvatron": galvatron_rows,
    "torchtitan-cp": context_rows,
    "cut-collectives": collective_rows,
    "internevo-cut": partial(internevo_rows, cut=True),
    "galvatron-cut": partial(galvatron_rows, cut=True),
    "bridge": bridge_rows,
    "symmetric": symmetric_rows,
}
