"""Lower bounds on a device's memory, vectorised over layouts. Padding, which only adds, is left out.

With Psi parameters, Psi' of them trainable, w the dtypes' bytes and N3, N3d, N2, N1 the products of the axis sizes at
each stage:

    parameters  w_p * Psi / (N3 * N3d)
    gradients   w_g * Psi' / (N3 * N2)
    states      (w_m + moments) * Psi' / (N3 * N3d * N2 * N1)       w_m = 0 where masters are parts of compute copies
    kept        w * Psi / (product of the parameter axes that are not kept)

The first three lie on the device or, by the stage of the host, in its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zeromesh.cluster.cluster import Cluster
from zeromesh.model.spec import DTYPE_BYTES, ModelSpec, Recomputation, TensorSpec, UnitKind, UnitSpec
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.planner.space import STAGES, Block
from zeromesh.planner.time_bound import Floats
from zeromesh.planner.workload import Workload
from zeromesh.schedule.memory import reduce_slots
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.schedule.unit import BUCKET_BYTES
from zeromesh.simulator.computation import held_bytes
from zeromesh.simulator.division import Division
from zeromesh.simulator.mechanics import ENGINES, Mechanics
from zeromesh.simulator.memory import MOMENTS
from zeromesh.simulator.owned import is_matrix
from zeromesh.simulator.units import schedule_units
from zeromesh.strategy import Stage, Wire
from zeromesh.wires import coded


@dataclass(frozen=True)
class Elements:
    """Element counts of a model, separately for experts that `ep` ranks divide. Frozen codes, whose elements have other
    sizes, are left out."""

    model: ModelSpec
    ep: int

    def layouts(self, block: Block) -> Iterator[tuple[Block, tuple[int, int]]]:
        """Layouts with their elements, all and trainable: `block` for everything but divided experts, which have the
        axes that the `ep` ranks leave."""
        yield block, self.total[False]
        if self.total[True][0]:
            yield block.without(self.ep), self.total[True]

    @cached_property
    def total(self) -> dict[bool, tuple[int, int]]:
        """Elements, all and trainable: outside experts, and of experts."""
        units = self.model.units
        trained = {part: sum(u.count * of[id(u)][0] for u in units) for part, of in self.by_unit.items()}
        return {
            part: (sum(u.count * sum(of[id(u)]) for u in units), trained[part]) for part, of in self.by_unit.items()
        }

    @cached_property
    def by_unit(self) -> dict[bool, dict[int, tuple[int, int]]]:
        """Trainable and frozen elements of each unit: outside experts, and of experts."""
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


PREFETCH = 1
"""Units gathered ahead, the notation's default; the planner searches no other."""

_PARAM_STAGES = [stage for stage in STAGES if stage.shards_params]
_DROPPED_STAGES = [stage for stage in _PARAM_STAGES if not stage.kept]
_GRAD_STAGES = [stage for stage in STAGES if stage.shards_grads]


def bytes_each(wire: str) -> float:
    """Bytes of one element on a wire, the scales of quantised blocks included."""
    form = coded(wire)
    numel = form.granule if form else 1
    return wire_bytes(numel, wire) / numel


@dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """Lower bounds on memory for a model and its workload on a cluster.

    If the model is divided, `division` says how, and `part` which kind of rank's `model` and `cluster` are.
    """

    model: ModelSpec
    cluster: Cluster  # cut to the world in use
    workload: Workload
    wires: tuple[str, ...] = ()  # by level, as after `@`; "" for the default
    mechanics: Mechanics = ENGINES["zeromesh"]
    division: Division | None = None
    part: int = 0
    host: Stage = Stage.ZERO  # of the host's memory

    @property
    def parallel(self) -> Parallel:
        return WHOLE if self.division is None else self.division.parallel

    @cached_property
    def elements(self) -> Elements:
        return Elements(self.model, self.parallel.ep)

    @cached_property
    def joined(self) -> tuple[tuple[UnitSpec, ...], ...]:
        """The units that the engine joins if no parameters are sharded."""
        return schedule_units(self.model, self.workload.fixed(1, Recomputation.NONE), BUCKET_BYTES)[1]

    @cached_property
    def joins(self) -> bool:
        """Whether it joins units other than the root and its neighbour, as in small models."""
        first, *others = self.joined
        edge = len(first) <= 2 and all(spec.count == 1 for spec in first)
        return not edge or any(len(specs) > 1 for specs in others)

    def state_bytes(self, block: Block) -> Floats:
        """Parameters, gradients, optimizer states, kept copies and slots of each layout, on the device."""
        # A quantised refresh needs a master of its own: the bound leaves it out.
        parts = [self._part_bytes(own, bool(experts)) for experts, (own, _) in enumerate(self.elements.layouts(block))]
        return np.asarray(self.model.whole_bytes + sum(parts) - self._fewer_moments / state_degree(block))

    def _part_bytes(self, block: Block, experts: bool) -> Floats:
        work, numels = self.workload, self.elements.by_unit[experts]
        params, trainable = self.elements.total[experts]
        width = DTYPE_BYTES[work.param_dtype]
        by_param = block.degree(*_PARAM_STAGES).astype(np.float64)
        by_grad = block.degree(*_GRAD_STAGES).astype(np.float64)
        dropped = block.degree(*_DROPPED_STAGES).astype(np.float64)
        blocks = sum(u.count * sum(numels[id(u)]) for u in self.model.units if u.kind is UnitKind.BLOCK)
        kept_width = min(bytes_each(wire) for wire in self._param_wires)
        copied = (dropped > 1) & (dropped < by_param)  # others stay gathered
        kept = np.where(copied, kept_width * blocks / dropped, 0.0)
        of_units = [numels[id(unit)] for unit in self.model.units]
        gather = self._slots(width, [sum(each) for each in of_units], PREFETCH + 1)
        sent = self._slots(DTYPE_BYTES[work.wire_dtype], [trained for trained, _ in of_units], reduce_slots(PREFETCH))
        reduce = sent if self.mechanics.planned else 0.0  # the engine allocates reduce slots once, as ours does
        of_device = (shard for shard, on_host in self._shards(block, params, trainable) if not on_host)
        gathered = (by_param > 1) | self.host.shards_params
        shared = (dropped > 1) | (by_param == 1)  # slots
        return np.asarray(
            sum(of_device, kept)
            + np.where(gathered, np.where(shared, gather, width * params), 0.0)
            + np.where((by_grad > 1) & (gathered | (not self.joins)), reduce, 0.0)
        )

    def _shards(self, block: Block, params: int, trainable: int) -> list[tuple[Floats, bool]]:
        """Bytes of parameters, of gradients and of states of each layout, and whether they lie on the host."""
        work, host = self.workload, self.host
        return [
            (DTYPE_BYTES[work.param_dtype] * params / block.degree(*_PARAM_STAGES), host.shards_params),
            (DTYPE_BYTES[work.grad_dtype] * trainable / block.degree(*_GRAD_STAGES), host.shards_grads),
            (self._state_width * trainable / state_degree(block), host.shards_states),
        ]

    def host_bytes(self, block: Block) -> Floats:
        """Bytes of each layout in the host's memory: shards, and gradients and compute copies of the step there."""
        work, host, found = self.workload, self.host, np.zeros(len(block))
        if host is Stage.ZERO:
            return found
        cast = 0 if host.shards_params or work.param_dtype == work.master_dtype else DTYPE_BYTES[work.param_dtype]
        passing = cast + (0 if host.shards_grads else DTYPE_BYTES[work.grad_dtype])
        for own, (params, trainable) in self.elements.layouts(block):
            found += passing * trainable / state_degree(own)
            found += sum(shard for shard, on_host in self._shards(own, params, trainable) if on_host)
        return found

    def copied_bytes(self, block: Block) -> Floats:
        """Bytes copied down and up by each layout, per micro-batch and per step; empty without the host. Second gathers
        and copies in the lane of gathers are left out."""
        work, host, found = self.workload, self.host, np.zeros((2, 2, len(block)))
        if host is Stage.ZERO:
            return found[:0]
        for own, (params, trainable) in self.elements.layouts(block):
            (param, _), (grad, _), _ = self._shards(own, params, trainable)
            state = trainable / state_degree(own)
            found[0, 1] += DTYPE_BYTES[work.grad_dtype] * state
            if host.shards_grads:  # the last micro-batch's go down with the step's
                found[0] += grad, -grad
            found[1] += (param, 0 * param) if host.shards_params else (0 * state, DTYPE_BYTES[work.param_dtype] * state)
        return found

    @property
    def _state_width(self) -> float:
        """Bytes of the optimizer's states for each element."""
        work, together = self.workload, self.host.shards_states == self.host.shards_params
        master = 0.0 if work.param_dtype == work.master_dtype and together else DTYPE_BYTES[work.master_dtype]
        return master + MOMENTS * DTYPE_BYTES[work.master_dtype]

    @property
    def _fewer_moments(self) -> float:
        """Bytes by which Muon's one momentum is below AdamW's two. The owners' other memory is left out."""
        if self.workload.optimizer != "muon":
            return 0.0
        less = MOMENTS * DTYPE_BYTES[self.workload.master_dtype] - DTYPE_BYTES[self.workload.grad_dtype]
        return less * sum(tensor.num_elements for tensor in self.elements.matrices)

    @property
    def least_bytes(self) -> float:
        """Bytes of parameters, gradients and optimizer states if everything is sharded over all ranks."""
        work, world = self.workload, float(self.cluster.world)
        of_trained = DTYPE_BYTES[work.grad_dtype] + self._state_width
        shards = {False: world, True: world / self.elements.ep}
        params, trained = (sum(self.elements.total[part][i] / shards[part] for part in shards) for i in range(2))
        fewer = self._fewer_moments / world
        return self.model.whole_bytes - fewer + DTYPE_BYTES[work.param_dtype] * params + of_trained * trained

    @property
    def _param_wires(self) -> Iterator[str]:
        """The parameter wire of each level: a kept copy has the format of one of them."""
        for text in self.wires or ("",):
            yield (Wire.parse(text).param if text else None) or self.workload.param_dtype

    def _slots(self, width: float, numels: Sequence[int], shared: int) -> float:
        units = list(zip(self.model.units, numels, strict=True))
        blocks = [(unit, numel) for unit, numel in units if unit.kind is UnitKind.BLOCK and numel]
        resident = sum(numel for unit, numel in units if unit.kind is not UnitKind.BLOCK)
        count = min(shared, sum(unit.count for unit, _ in blocks))
        return width * (resident + count * max((numel for _, numel in blocks), default=0))

    def activation_bytes(self, sequences: int, recomputation: Recomputation) -> float:
        """Bytes of activations at the end of a micro-batch's forward."""
        work = self.workload.fixed(sequences, recomputation, self.parallel)
        found = work.micro_batch_tokens * self.model.peak_activation_bytes(work.seq_len, recomputation)
        if self.division is None:
            return found
        count = work.global_batch_tokens // (work.micro_batch_tokens * self.cluster.world)
        return found + held_bytes(self.division.parts[self.part], self.parallel, work, count)
