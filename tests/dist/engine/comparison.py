"""Holds sharded training against plain training: gradients, parameters, optimizer states, norms, padding, replicas."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards

if TYPE_CHECKING:
    from tests.dist.engine.reference import Case, Optimizers, Step


class Unequal(AssertionError):
    """Sharded and plain training differ."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Collects differences on this rank; `finish` raises on all ranks if there are any on one."""

    engine: Engine
    case: Case
    start: dict[str, Tensor]
    terms: dict[str, Tensor]
    found: list[str] = field(default_factory=list)

    def number(self, what: str, got: float, expected: float) -> None:
        tolerance = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-3, "bf16-wire": 5e-2}[self.case.precision]
        if not abs(got - expected) <= tolerance * max(1.0, abs(expected)):
            self.found.append(f"{what}: {got} instead of {expected}")

    def gradients(self, step: int, record: Step) -> None:
        params = list(self.engine.optimizer_params())
        for param in params:
            expected = record.grads.get(param.full_name)
            if (param.grad is None) != (expected is None):
                self.found.append(f"gradient {step} of {param.full_name}: {param.grad} instead of {expected}")
        pairs = {
            param.full_name: (param.grad.local, self._slice(param, record.grads[param.full_name]))  # type: ignore[attr-defined]
            for param in params
            if param.grad is not None and record.grads.get(param.full_name) is not None
        }
        if self.case.precision == "fp64" or step == 0:
            self._compare(f"gradient {step}", pairs, record.grads)

    def parameters(self, step: int, record: Step) -> None:
        if self.case.precision.startswith("bf16"):
            return  # one ulp in a master flips a bf16 rounding, which changes later gradients by a bf16 ulp
        if self.case.precision == "fp32" and self.case.optimizer != "sgd":
            return  # AdamW magnifies the rounding of gradients that are mathematically zero
        pairs = {
            param.full_name: (param.local, self._slice(param, record.params[param.full_name]))
            for param in self._trained()
        }
        self._compare(f"parameter {step}", pairs, record.params)

    def stepped(self, optimizer: Optimizers, record: Step, norm: float) -> None:
        """Parameters and moments after the first step are what torch makes of gradients within their bound.

        Each element of them rises or falls with its own gradient or with its magnitude. So they lie between what the
        optimizer makes, in fp64, of the ends of the gradient's interval and of the point in it that is nearest to zero,
        give or take the rounding of the optimizer's few operations.

        Args:
            optimizer: after its first step.
            record: of the first step.
            norm: as the engine has told it, by which it has clipped.
        """
        if self.case.precision == "fp64":
            return  # compared outright
        low, high = (self._grads_off_by(sign, record.grads) for sign in (-1, 1))
        near = {name: torch.zeros_like(grad).clamp(grad, high[name]) for name, grad in low.items()}
        ends = [self._step_plainly(grads, norm) for grads in (low, high, near)]
        for param in self._trained():
            name = param.full_name
            got = {"parameter": param.local} | optimizer.tensors(param)
            if any(end[name].keys() != got.keys() for end in ends):
                self.found.append(f"states of {name}: {sorted(got)} instead of {sorted(ends[0][name])}")
                continue
            for key, value in got.items():
                found = torch.stack([end[name][key].double() for end in ends])
                size = found.abs().amax(0)
                if key == "parameter":
                    size = size + self._slice(param, self.start[name]).abs()
                slack = 8 * torch.finfo(torch.float32).eps * size
                if not bool(((value >= found.amin(0) - slack) & (value <= found.amax(0) + slack)).all()):
                    self.found.append(f"{key} of {name} after the first step: not from a gradient within the bound")

    def _grads_off_by(self, sign: int, grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """This rank's slices of `grads`, each element as far off as it may be."""
        return {
            param.full_name: self._slice(param, grads[param.full_name]).double()
            + sign * self._allowed(param, grads[param.full_name])
            for param in self._trained()
            if grads[param.full_name] is not None
        }

    def _step_plainly(self, grads: dict[str, Tensor], norm: float) -> dict[str, dict[str, Tensor]]:
        """Parameters and states after one step from the start, of this rank's slices, given their gradients."""
        slices = {param.full_name: self._slice(param, self.start[param.full_name]) for param in self._trained()}
        values = {name: slices[name].to(torch.float64, copy=True) for name in self.start}  # in the optimizer's order
        for name, grad in grads.items():
            values[name].grad = grad * min(1.0, (self.case.clip or math.inf) / (norm + 1e-6))
        optimizer = self.case.make_optimizer(values.values())
        optimizer.step()
        return {name: {"parameter": value} | optimizer.tensors(value) for name, value in values.items()}

    def states(self, optimizer: Optimizers, expected: dict[str, dict[str, Tensor]]) -> None:
        if self.case.precision != "fp64":
            return
        for param in self._trained():
            got, wholes = optimizer.tensors(param), expected[param.full_name]
            if got.keys() != wholes.keys():
                self.found.append(f"states of {param.full_name}: {sorted(got)} instead of {sorted(wholes)}")
                continue
            for key, whole in wholes.items():
                part = whole if key == "step" else self._slice(param, whole)
                self._elementwise(key, {param.full_name: (got[key], part)})

    def padding(self) -> None:
        """Zeros in every shard: what lies there would leak into the next gather or reduction."""
        self.engine.at_rest()  # what nobody has waited for may still be written
        for unit in self.engine.units:
            for buffer in unit.buffers:
                for kind, tensor in _padding(buffer):
                    if tensor.any() or tensor.isnan().any():
                        self.found.append(f"padding of {kind} of unit {unit.name!r}: {tensor.tolist()}")

    def finish(self, strategy: str, optimizer: Optimizers) -> None:
        """Compares replicas, every rank's slice by its bits, and raises on all ranks if any rank has found anything."""
        everyone: list[Any] = [None] * self.case.world
        dist.all_gather_object(everyone, (self.found, _digests(self.engine, optimizer)))
        lines = [f"rank {rank}: {line}" for rank, (found, _) in enumerate(everyone) for line in found]
        first: dict[Any, str] = {}
        for rank, (_, digests) in enumerate(everyone):
            for key, value in digests.items():
                if first.setdefault(key, value) != value:
                    lines.append(f"rank {rank}: its replica of {key} is not that of the ranks before it")
        if lines:
            more = f"\n... and {len(lines) - 12} more" if len(lines) > 12 else ""
            raise Unequal(f"{strategy}, {self.case}\n" + "\n".join(lines[:12]) + more)

    def _slice(self, param: Any, whole: Tensor | None) -> Tensor:
        assert whole is not None
        own = whole.detach().flatten()[param.flat_start : param.flat_start + param.local.numel()]
        return own.to(param.local.device)

    def _compare(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]], whole: Any) -> None:
        if self.case.precision == "fp64":
            self._elementwise(what, pairs)
        elif self.case.precision == "bf16-wire":
            self._rounded(what, pairs, whole)
        else:
            self._normwise(what, pairs, whole)

    def _elementwise(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (got, expected) in pairs.items():
            error = float((got - expected).abs().max()) if got.numel() else 0.0
            if not error <= 1e-10:
                self.found.append(f"{what} of {name}: off by {error}")

    def _normwise(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]], whole: Any) -> None:
        squares = torch.stack([(got.double() - e.double()).square().sum() for got, e in pairs.values()])
        dist.all_reduce(squares)  # every element once for each of its replicas
        layout = self.engine.schedule.layout
        errors = (squares / layout.degree(layout.replica_axes)).sqrt().tolist()
        for name, error in zip(pairs, errors, strict=True):
            norm = float(torch.linalg.vector_norm(whole[name].double()))
            if not error <= self._bound * norm:
                self.found.append(f"{what} of {name}: off by {error / norm:.3g} of its norm; allowed {self._bound:.3g}")

    def _rounded(self, what: str, pairs: dict[str, tuple[Tensor, Tensor]], whole: Any) -> None:
        for param in self.engine.optimizer_params():
            if param.full_name in pairs:
                got, expected = pairs[param.full_name]
                if not bool(((got - expected).abs() <= self._allowed(param, whole[param.full_name])).all()):
                    self.found.append(f"{what} of {param.full_name}: off by more than {self._roundings} roundings")

    @property
    def _bound(self) -> float:
        """Of a tensor's error, relative to its norm."""
        return 8 * torch.finfo(torch.float32).eps * math.sqrt(self.case.summands)

    @property
    def _roundings(self) -> int:
        """Of a partial sum to bf16: twice on each axis, and once more."""
        return 2 * len(self.engine.schedule.layout.axes) + 1

    def _allowed(self, param: Any, grad: Tensor | None) -> Tensor:
        """How far each element of this rank's slice of a first gradient may be off.

        Each wire rounds partial sums to bf16: half an ulp, 2^-8, of at most the sum of the terms' magnitudes. Without
        such wires: no element is further off than the whole tensor may be.
        """
        assert grad is not None
        if self.case.precision == "bf16-wire":
            return self._slice(param, self.terms[param.full_name]) * self._roundings * 2**-8 + 1e-12
        return torch.linalg.vector_norm(grad.double()) * self._bound

    def _trained(self) -> list[Any]:
        return [param for param in self.engine.optimizer_params() if param.requires_grad]


def _padding(buffer: FlatShards) -> Iterator[tuple[str, Tensor]]:
    numel = buffer.spec.numel
    held = {"params": (buffer.params, buffer.param_range), "full": (buffer.full, slice(0, buffer.padded))}
    if buffer.master is not None and buffer.grads is not None:
        held |= {
            "master": (buffer.master, buffer.state_range),
            "grads": (buffer.reduced, buffer.state_range),  # beside it is what was sent
        }
    del held["full"]  # a slot: it may hold another unit by now
    for kind, (tensor, where) in held.items():
        yield kind, tensor[max(0, numel - where.start) :]


def _digests(engine: Engine, optimizer: Optimizers) -> dict[Any, str]:
    digests = {}
    for param in engine.optimizer_params():
        where = (param.full_name, param.flat_start, param.local.numel())
        digests[("value", *where)] = _digest(param.local)
        for key, value in optimizer.state(param).items():
            if isinstance(value, Tensor):
                digests[(key, *where)] = _digest(value)
    return digests


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
