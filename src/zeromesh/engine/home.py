"""Where the layouts of a model and of its parts are: meshes and their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from zeromesh.engine.control import Control, Span
from zeromesh.engine.elements import Place
from zeromesh.errors import ModelError
from zeromesh.strategy import Axis, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where one layout is: that of the model, or of a part of it.

    Args:
        mesh: None in a single process.
    """

    layout: Layout
    mesh: DeviceMesh | None
    control: Control

    def ambiguous(self, model: Control) -> bool:
        """Whether it has plain tensors that only some of the model's ranks share: on the others are others, under the
        same names. DTensors would be divided over more than `model` knows of."""
        return self.layout.share < 1 and set(self.control.beyond) <= set(model.beyond)

    def spans(self, model: Control, axes: Sequence[Axis]) -> tuple[Span, ...]:
        """The ranks over which flat buffers that are sharded over `axes` are divided beyond their DTensors' meshes; by
        default all of the model's."""
        copies = self.layout.world // self.layout.degree(axes)
        return (Span(group=model.group if self.ambiguous(model) else self.control.group, copies=copies),)

    def place(self, ranks: tuple[int, ...], padded: int, axes: Sequence[Axis], start: int, numel: int) -> Place | None:
        """Key of how a tensor at `start` of a flat buffer is divided: the division of the buffer, the first shard with
        some of its elements, and the number of elements before the next shard begins. Equal where every rank has the
        same of it; None where each has all.

        Args:
            ranks: of the mesh.
            padded: elements of the buffer, sharded over `axes`.
            numel: elements of the tensor.
        """
        mesh = tuple(size for _, size in self.layout.mesh)
        names = [name for name, _ in self.layout.mesh]
        found = tuple((names.index(axis.mesh_axis), axis.size, axis.stride) for axis in axes if axis.size > 1)
        if not found:
            return None
        shard = padded // self.layout.degree(axes)
        first, before = divmod(start, shard)
        alone = before + numel <= shard
        return (ranks, mesh, found, 0 if alone else shard), first, 0 if alone else shard - before


def require_one_of_a_name(homes: Mapping[str, Home]) -> None:
    """Raises ModelError where other ranks have other parameters under the same names: none of them is whole, or a known
    part of a whole one, to be saved or loaded."""
    for part, home in homes.items():
        if home.ambiguous(homes[""].control):
            raise ModelError(
                f"parameters of part {part} are other tensors on other ranks, since its mesh has {home.layout.world} "
                f"of the model's {home.layout.feeders} ranks and they are whole on each: what is saved and loaded by "
                f"name must be one tensor. Make them DTensors over the axis that divides them, as with "
                f"distribute_tensor(param, mesh, [Shard(0)])"
            )


def require_own_tokens(homes: Mapping[str, Home]) -> None:
    """Raises ModelError where gradients on a rank come of other ranks' tokens too: [Note: Weights] of
    `zeromesh.engine.lifecycle`."""
    for part, home in homes.items():
        if home.layout.share < 1:
            raise ModelError(
                f"gradients of part {part} come of several ranks' tokens, which have weights of their own: let each "
                f"rank's loss carry its weight, as in: with zm.accumulate(model, last=..., weight=..., total=...) as "
                f"weigh: weigh(loss).backward()"
            )
