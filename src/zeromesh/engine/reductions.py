"""Numbers of a whole tensor, computed from every rank's slice of it: sums, norms, extremes.

[Note: Meetings] Each is a collective of all ranks that have the tensor. Before ranks exchange anything for a function
that users call, each says which function of which tensor it is about to compute. Where they differ, all raise. Where
one never comes, the others raise after the timeout of the process group, and say who was missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.engine.control import Span, reduce_over
from zeromesh.engine.elements import Elements
from zeromesh.errors import InputError


def slice_norms(
    slices: Sequence[Tensor], spans: Sequence[tuple[Span, ...]], order: float, known: Sequence[Tensor | None] = ()
) -> Tensor:
    """Norms of the tensors that `slices`, 1-D and in the same order on every rank, are this rank's parts of, in fp64;
    the same on every rank. `order` is p of the p-norm; infinity gives the maximum. `known` has the norms of slices that
    need not be read, in fp64; None for the others.

    Raises:
        InputError: the order is not above 0.
    """
    if not order > 0:
        raise InputError(f"the order of a norm over sharded parameters must be above 0, or inf; got {order}")
    if not slices:  # alike on every rank
        return torch.zeros(0, dtype=torch.float64)
    indices: dict[tuple[Span, ...], list[int]] = defaultdict(list)
    for index, own in enumerate(spans):
        indices[own].append(index)
    # Where some lie on the host and others on a device, the ranks exchange numbers of the device.
    device = max((each.device for each in slices), key=lambda each: each.type != "cpu")
    known, powers = known or [None] * len(slices), dict[tuple[Span, ...], Tensor]()
    for own, held in indices.items():
        norms = own_norms([slices[index] for index in held], order, device, [known[index] for index in held])
        powers[own] = norms if math.isinf(order) else norms.pow(order)
    _over_spans(powers, largest=math.isinf(order))
    by_index = {i: each for own, held in indices.items() for i, each in zip(held, powers[own].unbind(), strict=True)}
    found = torch.stack([by_index[index] for index in range(len(slices))]) if len(powers) > 1 else powers[spans[0]]
    return found if math.isinf(order) else found.pow(1 / order)


def _over_spans(values: dict[tuple[Span, ...], Tensor], *, largest: bool) -> None:
    """Each rank's values, summed (or the largest of them) over the ranks that each one's tensor is divided over.

    A sum over a span's ranks counts each element as often as there are copies of it, which are bit-equal. Values of
    equal spans lie together: to pick them by indices would copy those to the device, for which the host waits.
    """
    reduce = _largest if largest else _total
    for span in dict.fromkeys(span for own in values for span in own if span.group is not None):
        members = [own for own in values if span in own]
        found = reduce(torch.cat([values[own] for own in members]), span)
        values.update(zip(members, torch.split(found, [len(values[own]) for own in members]), strict=True))


def _total(values: Tensor, span: Span) -> Tensor:
    total = reduce_over(span.group, values)
    return total / span.copies if total.is_floating_point() else total // span.copies


def _largest(values: Tensor, span: Span) -> Tensor:
    """A maximum over ranks drops nan or keeps it by their order."""
    if not values.is_floating_point():
        return reduce_over(span.group, values, dist.ReduceOp.MAX)
    unknown = values.isnan()
    words = torch.cat([values.masked_fill(unknown, -math.inf), unknown.to(values.dtype)])
    largest, unknowns = reduce_over(span.group, words, dist.ReduceOp.MAX).chunk(2)
    return largest.masked_fill(unknowns > 0, math.nan)


_ROW = 1 << 12  # elements whose squares fp32 adds up with an error of 1e-7


def own_norms(slices: Sequence[Tensor], order: float, device: torch.device, known: Sequence[Tensor | None]) -> Tensor:
    """Norms of these slices alone, in fp64: squares of fp32 neither overflow nor round. A few kernels for all slices,
    which are as many as a model has parameters."""
    read = [tensor for tensor, norm in zip(slices, known, strict=True) if norm is None and tensor.numel()]
    long = [order == 2 and x.is_cpu and x.dtype == torch.float32 and x.numel() > _ROW for x in read]
    short = [tensor for tensor, rows in zip(read, long, strict=True) if not rows]
    found = iter(torch._foreach_norm(short, order, torch.float64) if short else ())
    by_rows = iter(_norms_by_rows([x for x, rows in zip(read, long, strict=True) if rows]) if any(long) else ())
    kinds, nothing = iter(long), torch.zeros((), dtype=torch.float64, device=device)
    norms = [
        norm if norm is not None else nothing if not tensor.numel() else next(by_rows if next(kinds) else found)
        for tensor, norm in zip(slices, known, strict=True)
    ]
    if there := [norm for norm in norms if norm.device != device]:
        # Pinned, or the host waits for the device.
        pinned = torch.empty(len(there), dtype=torch.float64, device="cpu", pin_memory=True)
        sent = iter(torch.stack(there, out=pinned).to(device, non_blocking=True))
        norms = [norm if norm.device == device else next(sent) for norm in norms]
    return torch.stack(norms)


def _norms_by_rows(tensors: Sequence[Tensor]) -> Tensor:
    """2-norms of fp32 on the host, in fp64. There fp64 of all values takes ten times as long as reading them, so rows
    are added up in fp32, by all threads, unless their sum is outside of its middle range."""
    cut = [(tensor, tensor.numel() // _ROW) for tensor in tensors]
    rows = [torch.linalg.vector_norm(tensor[: n * _ROW].view(n, _ROW), dim=1) for tensor, n in cut]
    ends = [tensor[n * _ROW :] for tensor, n in cut]
    sums = torch.stack(torch._foreach_norm(ends, 2, torch.float64)).square_()
    counts = torch.tensor([n for _, n in cut], device="cpu")  # users may have another default
    owner = torch.repeat_interleave(torch.arange(len(cut), device="cpu"), counts)
    norms = sums.index_add_(0, owner, torch.cat(rows).double().square_()).sqrt()
    # Squares below fp32's range are lost in such a sum, and none is above it.
    for index in (~((norms > 1e-10) & (norms < 1e12))).nonzero().flatten().tolist():
        norms[index] = torch.linalg.vector_norm(tensors[index], dtype=torch.float64)
    return norms


@dataclass(frozen=True, slots=True)
class Reduction:
    """A number of a whole tensor."""

    part: Callable[..., Tensor]  # of this rank's elements, perhaps none: one number, or the sum and the count of a mean
    finish: Callable[[Tensor], Tensor] = lambda found: found[0]  # the number, from those of all ranks
    largest: bool = False  # whether it is the largest of all ranks' numbers, and not their sum


def _wide(values: Tensor) -> Tensor:
    """In fp64 or int64: sums of other ranks' numbers are rounded once, at the end."""
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


def _sum(values: Tensor) -> Tensor:
    return _wide(values).sum()


def _top(values: Tensor) -> Tensor:
    wide = _wide(values)
    least = -math.inf if wide.is_floating_point() else torch.iinfo(torch.int64).min
    return wide.amax() if wide.numel() else torch.full((), least, dtype=wide.dtype, device=wide.device)


def _some(values: Tensor) -> Tensor:
    return _wide(values.bool()).sum()


_SUM, _TOP = Reduction(_sum), Reduction(_top, largest=True)
_BOTTOM = Reduction(lambda values: _top(-_wide(values)), lambda found: -found[0], largest=True)
_DOT = Reduction(lambda one, other: (_wide(one) * _wide(other)).sum())

REDUCTIONS: dict[str, Reduction] = {
    "sum": _SUM,
    "mean": Reduction(
        lambda values: torch.stack([_sum(values), torch.full_like(_sum(values), values.numel())]),
        lambda found: found[0] / found[1],
    ),
    "amax": _TOP,
    "max": _TOP,
    "amin": _BOTTOM,
    "min": _BOTTOM,
    "count_nonzero": Reduction(_some),
    "any": Reduction(_some, lambda found: found[0] > 0),
    "all": Reduction(lambda values: _some(~values.bool()), lambda found: found[0] == 0),
    "dot": _DOT,
    "vdot": _DOT,
    "equal": Reduction(lambda one, other: _some(one != other), lambda found: found[0] == 0),
    "allclose": Reduction(
        lambda one, other, **options: _some(~torch.isclose(one, other, **options)), lambda found: found[0] == 0
    ),
    # One element, which some ranks have: of the others' nothing the largest is it, to the bit.
    "item": _TOP,
}


def whole_value(name: str, elements: Elements, operands: Sequence[Tensor], options: dict[str, Any]) -> Tensor:
    """The number of the whole tensor, 0-d, on every rank, from this rank's elements of the operands."""
    kind, control = REDUCTIONS[name], elements.control
    part = kind.part(*operands, **options).reshape(-1)
    if control is None:
        return kind.finish(part)
    with control.meeting(f"{name}{options or ''}", f"{elements} in {part.dtype}"):
        found = {elements.spans: part}
        _over_spans(found, largest=kind.largest)
    return kind.finish(found[elements.spans])


def whole_norms(name: str, elements: Sequence[Elements], slices: Sequence[Tensor], order: float) -> list[Tensor]:
    """The same for a function that users call: 0-d tensors, each in the dtype of its slice."""
    control = next((each.control for each in elements if each.control is not None), None)
    names = ", ".join(map(str, elements))
    with nullcontext() if control is None else control.meeting(f"{name} of order {order}", names):
        found = slice_norms(slices, [each.spans for each in elements], order)
    by_dtype = {dtype: found.to(dtype).unbind() for dtype in {each.dtype for each in slices}}
    return [by_dtype[each.dtype][at] for at, each in enumerate(slices)]
