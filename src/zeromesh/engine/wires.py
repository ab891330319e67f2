"""Refusals of wires, which strategies name: in which dtypes an axis sends parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zeromesh.comm.quantised import check_quantisable
from zeromesh.engine.units import DTYPES, ModuleUnit, Precision
from zeromesh.errors import InputError
from zeromesh.schedule.buffer_layout import place
from zeromesh.strategy import Layout


def require_wires(
    layouts: Mapping[str, Layout],
    units: Sequence[ModuleUnit],
    precision: Precision,
    beyond: Mapping[str, Sequence[dist.ProcessGroup]],
) -> None:
    """Refuses wires that no chain can be made of, while the model is still as it was given. `beyond`: by part, groups
    of ranks beyond its mesh that have parameters too, each in a buffer of its own.

    Raises:
        InputError: an axis cannot quantise these values, or would make copies drift apart.
    """
    described, repeated = [unit.describe(precision) for unit in units], _repeated_over(units, beyond)
    for placed in {placed for unit in place(layouts[""], described, layouts) for placed in unit}:
        for route in placed.routes.values():
            for step in route.steps:
                if step.form is not None:
                    check_quantisable(DTYPES[route.held], step.axis.name)
                    if placed.buffer.part in repeated:
                        raise InputError(
                            f"axis {step.axis.name} cannot quantise what it sends: {repeated[placed.buffer.part]} is "
                            f"the same on ranks that other parameters are divided over (tensor parallelism), and each "
                            f"would round its own copy differently, so that they drift apart: use wires in fp32 or bf16"
                        )


def _repeated_over(units: Sequence[ModuleUnit], beyond: Mapping[str, Sequence[dist.ProcessGroup]]) -> dict[str, str]:
    """By part: the name of a parameter that is the same on all ranks of one of the groups beyond its mesh, if any."""
    return {
        part: info.name
        for unit in units
        for (_, _, part, _), infos in unit.groups.items()
        for info in infos
        if not all(map(info.divided, beyond.get(part, beyond[""])))
    }
