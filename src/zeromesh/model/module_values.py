"""Values for fake tensors: those computed only from lengths, ids and masks, so that a model can ask for them.

A model in eager mode asks small questions of its data: whether a mask hides anything, how many tokens an expert has.
Fake tensors hold no values. So small results that do not depend on weights are also computed for real. A router's
choices do depend on weights: here, as in every other prediction, tokens spread evenly over all choices. All numbers are
finite. Any other yes or no that weights decide is a no, and `assumed` says where. A number or a shape that weights
decide is unknown. Imports torch.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
LARGEST = 1 << 24
"""Values of larger tensors are not kept. This is a mask over 4,096 by 4,096 tokens."""

_CHOICES = {aten.topk: 1, aten.sort: 1, aten.argsort: None, aten.argmax: None, aten.max: 1}
"""Operations that choose, with the index of their output that holds places; None if there is one output."""

_RANDOM = {aten.rand}
"""Random operators that are replaced by their mean. So a layer is kept if it is dropped with a chance below half."""


_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class KnownValues:
    """The known values of fake tensors, by storage and place in it: autograd saves tensors as other objects. Views
    share values, as tensors share memory."""

    def __init__(self) -> None:
        self._values: dict[int, dict[tuple[Any, ...], Tensor]] = {}
        self.assumed: dict[str, None] = {}  # an ordered set

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Records that `tensor` holds `value` from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._values:
            self._values[storage._cdata] = {}
            weakref.finalize(storage, self._values.pop, storage._cdata, None)
        self._values[storage._cdata][_place(tensor)] = value

    def assume(self, sentence: str) -> None:
        """Notes an assumption, for the user."""
        self.assumed[sentence] = None

    def fill(self, tensor: Tensor, value: float) -> None:
        """Records that all elements of `tensor` are `value` from now on, unless its values are known."""
        if tensor.numel() <= LARGEST and not self._knows(tensor):
            with unset_fake_temporarily():
                real = torch.full(tensor.shape, value, dtype=tensor.dtype)
            self.learn(tensor, real)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs `func` on fake tensors, and if possible on their values.

        Raises:
            DataDependentOutputException: it asks for values that are not known.
            DynamicOutputShapeException: the shape of its result depends on unknown values.
        """
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(self._knows(one) for one in given)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if known:
                return self._fake(self._compute(func, args, kwargs))
            if func.overloadpacket is aten._local_scalar_dense and args[0].dtype is torch.bool:
                self.assume(f"what its weights decide at {place_of(traceback.extract_stack())} is taken to be no")
                return False
            masks = [one for one in args[1] if one is not None] if func.overloadpacket is aten.index else []
            if not masks or not all(self._knows(one) for one in masks):
                raise
            return func(args[0], [place for one in args[1] for place in self._places(one)])
        if known and all(leaf.numel() <= LARGEST for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            self._pair(out, self._compute(func, args, kwargs))
            return out
        if func.overloadpacket in _RANDOM:
            self.fill(out, 0.5)
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        elif func.overloadpacket in _CHOICES:
            self._spread(func, args, kwargs, out)
        return out

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """Converts a known mask's index to places."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        value = self._value(index)
        assert value is not None  # the caller has checked that it is known
        with unset_fake_temporarily():
            places = list(value.nonzero().unbind(1))
        return [self._fake(place) for place in places]

    def _fake(self, real: Any) -> Any:
        """Makes fake tensors with the shapes and known values of `real`."""
        out = tree_map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf, real)
        self._pair(out, real)
        return out

    def _knows(self, tensor: Tensor) -> bool:
        return self._value(tensor) is not None

    def _value(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return None if tensor.device.type == "meta" else tensor
        return self._values.get(tensor.untyped_storage()._cdata, {}).get(_place(tensor))

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def value(leaf: Any) -> Any:
            return self._value(leaf) if isinstance(leaf, Tensor) else leaf

        with unset_fake_temporarily():
            return func(*tree_map(value, tuple(args)), **tree_map(value, dict(kwargs)))

    def _pair(self, out: Any, real: Any) -> None:
        for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake, FakeTensor):
                self.learn(fake, value)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forgets the values of storages that unknown values have been written to."""
        named = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in named if _writes(argument)]
        written += [kwargs[one.name] for one in func._schema.arguments if one.name in kwargs and _writes(one)]
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor):
                self._values.get(tensor.untyped_storage()._cdata, {}).clear()

    def _spread(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Spreads choices evenly: the first row takes the first ones, the next row those after them, and so on. If
        there are fewer places than choices, places are spaced equally."""
        which = _CHOICES[func.overloadpacket]
        places = out if which is None else out[which] if isinstance(out, tuple | list) else None
        if not isinstance(places, FakeTensor) or places.numel() > LARGEST:
            return
        dim = named_arguments(func, args, kwargs).get("dim", -1)
        choices = args[0].shape[dim] if dim is not None else args[0].numel()
        # a reduction over a dimension keeps the others' order
        last = places.movedim(dim, -1).shape if places.ndim == args[0].ndim and places.ndim else places.shape
        apart = max(1.0, choices / max(1, places.numel()))
        with unset_fake_temporarily():
            value = (torch.arange(places.numel()) * apart).long().remainder(max(1, choices)).reshape(last)
            value = value.movedim(-1, dim) if places.ndim == args[0].ndim and places.ndim else value
        self.learn(places, value)


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Learns the values of tensors made inside it, except floating-point ones, since weights are large."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._values.run(func, args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(tensor.is_floating_point() for tensor in tensors):
            return out
        return self._values.run(func, args, kwargs or {})


def place_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """File, line and text of the innermost frame that is neither in torch nor here: in the model."""
    others = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_MODEL)]
    frame = others[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} ({frame.line})"


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
