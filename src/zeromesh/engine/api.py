"""`zm.shard` of a given strategy; `steps` has the public functions for sharded models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeromesh.engine.build import build_engine, make_control, make_homes, mesh_axes, mesh_device
from zeromesh.engine.engine import Engine
from zeromesh.engine.optim import watch_optimizers
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.shardable import keep_others_out, require_unwrapped
from zeromesh.engine.state_dict import install_state_dict
from zeromesh.engine.units import ModuleUnit, Precision, find_units, join_modules, spreads_of
from zeromesh.errors import InputError, ModelError
from zeromesh.modules import DTYPES, Lazy, Source, give_method, tensors_of
from zeromesh.options import Options
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.stage import DEFAULT_WIRE, DTYPE_FIELDS, dtype_name

if TYPE_CHECKING:
    from zeromesh.strategy.parts import Parts
    from zeromesh.strategy.plan import Plan

ModelT = TypeVar("ModelT", bound=nn.Module)

ENGINE = "_zeromesh_engine"

Beyond = dict[str, tuple[ProcessGroup, ...]]


def shard(
    model: ModelT, mesh: DeviceMesh | None, strategy: str | Strategy | Plan, options: Options | None = None
) -> ModelT:
    """`zeromesh.shard` of a given strategy; see there for the options and the errors.

    Examples:
        >>> model = shard(nn.Linear(4, 4), None, "node=3")
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    options = options or Options()
    parts, meshes = options.parts or {}, dict[str, DeviceMesh]()
    if parts:
        from zeromesh.engine.parts import meshes_of  # of parts=

        meshes = meshes_of(parts)

    def prepare() -> tuple[Precision, dict[str, Layout], list[ModuleUnit], Beyond, dict[str, Source]]:
        own = (isinstance(param, ShardedParameter) for param in model.parameters())
        if any(hasattr(module, ENGINE) for module in model.modules()) or any(own):
            raise ModelError(
                "this model, or a part of it, is already sharded: call zm.shard once, on the whole model, and choose "
                "the classes that are gathered together by units="
            )
        if options.bucket_bytes < 0:
            raise InputError(f"bucket_bytes must not be negative; got {options.bucket_bytes}")
        require_unwrapped(model)
        tensors = [tensor for _, tensor in tensors_of(model)]
        lazy, divided = dict[str, Source](), any(isinstance(tensor, DTensor) for tensor in tensors)
        if any(tensor.is_meta or isinstance(tensor, Lazy) for tensor in tensors):
            from zeromesh.engine.materialise import lazy_sources  # of tensors without values

            lazy = lazy_sources(model)
        if divided:
            from zeromesh.engine.spread import groups_beyond, require_whole_buffers  # of DTensors

            require_whole_buffers(model)
        precision = precision_of(options.dtypes, strategy)
        layouts = resolve(mesh, strategy, parts)
        shares = {part: layout.strategy.percent for part, layout in layouts.items() if layout.strategy.percent < 100}
        found = find_units(model, options.units, options.resident, precision, list(layouts)[1:], shares)
        if not any(layout.gathers for layout in layouts.values()):
            found = join_modules(found, precision, options.bucket_bytes)
        beyond: Beyond = {"": ()}
        if len(layouts) > 1:
            from zeromesh.engine.parts import beyond_of, require_known_buffers  # of parts=

            require_known_buffers(model, layouts)
            beyond = beyond_of(spreads_of(found), mesh, meshes)
        elif divided:
            beyond = {"": groups_beyond(mesh, spreads_of(found).get("", ()))}
        if any(axis.wire != DEFAULT_WIRE for layout in layouts.values() for axis in layout.axes):
            from zeromesh.engine.wires import require_wires  # which the strategy names

            require_wires(layouts, found, precision, beyond)
        return precision, layouts, found, beyond, lazy

    debug, register = (
        os.environ.get(name, "0") not in ("", "0") if given is None else given
        for name, given in (("ZEROMESH_DEBUG", options.debug), ("ZEROMESH_REGISTER", options.register))
    )
    control = make_control(mesh)
    precision, layouts, found, beyond, lazy = control.together(prepare)
    homes = make_homes(layouts, mesh, meshes, beyond, control)
    engine = build_engine(
        model, homes, found, precision, options.init, lazy=lazy.keys(), debug=debug, register=register
    )
    watch_optimizers(engine)
    install_state_dict(model, engine)
    object.__setattr__(model, ENGINE, engine)
    give_method(model, "zero_grad", _zero_grad)
    keep_others_out(model)
    if engine.schedule.memory.host:
        from zeromesh.engine.hosted import show_device  # of host=

        show_device(model, mesh_device(mesh, model))
    if lazy:
        from zeromesh.engine.materialise import read_lazy

        buffers = [buffer for unit in engine.units for buffer in unit.buffers]
        control.together(lambda: read_lazy(model, buffers, lazy), left="The model has lost its parameters")
        engine.changed()
    return model


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """The model's own `zero_grad`. Dropping gradients begins the step again. Zeros are still a gradient of the step,
    which all ranks show as it ends."""
    if set_to_none:
        engine_of(model).discard_grads()
    else:
        type(model).zero_grad(model, set_to_none=False)


def resolve(mesh: DeviceMesh | None, strategy: str | Strategy | Plan, parts: Parts) -> dict[str, Layout]:
    """The layouts of the model (first, under "") and its parts on `mesh`; refuses those that the engine cannot run."""
    plan = None if isinstance(strategy, str | Strategy) else strategy
    chosen: str | Strategy = plan.strategy if plan else strategy  # type: ignore[assignment]  # told apart above
    # Without a mesh, presets name axes that are there only so.
    axes = mesh_axes(mesh, Strategy.parse(chosen, ("node", "cluster")).names if mesh is None else ())
    whole = plan.on_axes(axes) if plan else Strategy.parse(chosen, [name for name, _ in axes])
    if parts or whole.parts:
        from zeromesh.engine.parts import layouts_with_parts  # of parts=

        layouts = layouts_with_parts(whole, axes, parts, mesh)
    else:
        layouts = {"": Layout.of(whole, axes)}
    for layout in layouts.values():
        layout.require_runnable()
    return layouts


def precision_of(given: Mapping[str, torch.dtype | str | None], named: object) -> Precision:
    """The dtypes `given` by `DTYPE_FIELDS`, else those that `named`, a plan or a workload, has, else the defaults."""
    names = [dtype_name(given.get(field) or getattr(named, field, None), field) for field in DTYPE_FIELDS]
    param, reduce, grad, master = (DTYPES[name] if name else None for name in names)
    return Precision(param=param, reduce=reduce, grad=grad or torch.float32, master=master or torch.float32)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model; raises ModelError for any other."""
    engine = getattr(model, ENGINE, None)
    if not isinstance(engine, Engine):
        raise ModelError(
            f"{type(model).__name__} is not sharded (or is a part of a sharded model): call zm.shard first"
        )
    return engine
