"""How many elements a model has, which bounds ask for often; experts that `ep` cuts have a layout of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zeromesh.model.spec import ModelSpec, TensorSpec
from zeromesh.planner.space import STAGES, Block
from zeromesh.simulator.owned import is_matrix


@dataclass(frozen=True)
class Elements:
    """Element counts of a model, split by whether they are experts that `ep` ranks divide; frozen codes, whose elements
    are of other sizes than those of parameters, are left out of lower bounds."""

    model: ModelSpec
    ep: int

    def layouts(self, block: Block) -> Iterator[tuple[Block, tuple[int, int]]]:
        """Layouts with the elements, all and trainable, that lie in them: `block` for all but the experts that ep cuts,
        which have what its ranks leave of it."""
        yield block, self.total[False]
        if self.total[True][0]:
            yield block.without(self.ep), self.total[True]

    @cached_property
    def total(self) -> dict[bool, tuple[int, int]]:
        """All and trainable, of what is no experts and of those."""
        units = self.model.units
        trained = {part: sum(u.count * of[id(u)][0] for u in units) for part, of in self.by_unit.items()}
        return {
            part: (sum(u.count * sum(of[id(u)]) for u in units), trained[part]) for part, of in self.by_unit.items()
        }

    @cached_property
    def by_unit(self) -> dict[bool, dict[int, tuple[int, int]]]:
        """Trainable and frozen elements of each unit: of what is no experts, and of those."""
        found: dict[bool, dict[int, tuple[int, int]]] = {False: {}, True: {}}
        for unit in self.model.units:
            trained, frozen = (
                sum(t.num_elements for t in unit.tensors if t.ep > 1 and t.trainable is trainable)
                for trainable in (True, False)
            )
            codes = sum(t.num_elements for t in unit.tensors if t.dtype is not None)
            found[False][id(unit)] = (unit.num_trainable - trained, unit.num_frozen - frozen - codes)
            found[True][id(unit)] = (trained, frozen)
        return found

    @cached_property
    def matrices(self) -> list[TensorSpec]:
        """The matrices that Muon steps on."""
        return [
            tensor
            for unit in self.model.units
            for tensor in unit.tensors
            if is_matrix(unit, tensor)
            for _ in range(unit.count)
        ]


def state_degree(block: Block) -> npt.NDArray[np.float64]:
    """Into how many shards each layout of `block` cuts optimizer states."""
    return np.asarray(block.degree(*[stage for stage in STAGES if stage.shards_states]), dtype=np.float64)
