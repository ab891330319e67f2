"""Refusals of wires, which strategies name: in which dtypes an axis sends parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zeromesh.comm.quantised import check_quantisable
from zeromesh.engine.units import DTYPES, ModuleUnit, Precision
from zeromesh.errors import InputError, NotationError
from zeromesh.schedule.buffer_layout import place
from zeromesh.schedule.transfer import GATHERS
from zeromesh.schedule.unit import ITEM_BYTES
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
        NotationError: a gather would stage regions of two widths.
    """
    described, repeated = [unit.describe(precision) for unit in units], _repeated_over(units, beyond)
    for placed in {placed for unit in place(layouts[""], described, layouts) for placed in unit}:
        for lane, route in placed.routes.items():
            # Staged regions lie in the same memory: a rank's chunk of the next one is where the one before left it, or
            # beside that. Of another width it would overlap.
            wires = dict.fromkeys(step.wire for step in route.staged)
            if lane in GATHERS and len({ITEM_BYTES[wire] for wire in wires}) > 1:
                raise NotationError(
                    f"parameters in {route.held} cannot be gathered over axes in {' and in '.join(wires)}, of other "
                    f"widths: give these axes one wire dtype, or let one of them have the parameters' own"
                )
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
