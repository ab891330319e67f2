"""Models of transformers whose values are read when they are sharded: each rank reads its own slices.

A model is as `from_pretrained` of transformers makes it, but on the meta device. It has the same class, dtype, names
and generation settings, and its weights are renamed and packed in the same way.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import core_model_loading as library
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import meta_device_safe_creation_ops

from zeromesh.checkpoint.safetensors import Stored, read_headers
from zeromesh.checkpoint.sources import Computed, FileSource, Last, Tiled, joined, stacked
from zeromesh.engine.lazy import make_lazy
from zeromesh.errors import InputError, ModelError
from zeromesh.integrations.versions import require_attributes, require_known
from zeromesh.modules import DTYPE_NAMES, DTYPES
from zeromesh.progress import progress
from zeromesh.strategy.stage import dtype_name

require_known("transformers")


@progress("making the model")
def from_pretrained(
    kind: Any, directory: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None, **options: Any
) -> Any:
    """Makes a transformers model on the meta device. Each rank reads its values when the model is sharded.

    No rank ever holds more than its shard and one unit. Add adapters and shard the model like any other. Code that
    reads values earlier loads those tensors whole. Rank 0 initialises tensors that are in no file (a new head), with a
    warning. No code from the directory is run.

    Args:
        kind: `AutoModelForCausalLM`, `LlamaForCausalLM` or another class with `from_pretrained`.
        directory: a directory with `config.json` and safetensors, which all ranks see.
        dtype: dtype of the parameters. Default, or "auto": that of the configuration, else that of the files.
        options: options of the model's configuration, and `config` or `attn_implementation`.

    Raises:
        InputError: the directory holds no model, or the model is quantised.
        CheckpointError: a file is damaged, or of an unsupported kind.
        ModelError: the files do not fit the model.
    """
    location = Path(directory)
    if not (location / "config.json").is_file() and "config" not in options:
        raise InputError(
            f"{location} must be the directory of a model of transformers, with config.json and safetensors files; "
            f"for a model of the Hub: hf download NAME --local-dir DIRECTORY"
        )
    stored = read_headers(location)
    named = None if dtype == "auto" else dtype_name(dtype, "dtype")
    floats = (tensor.dtype for tensor in stored.values() if tensor.dtype in DTYPE_NAMES)
    made_in = DTYPES[named] if named else next(floats, torch.float32)
    model = _build(kind, location, made_in, explicit=named is not None, **options)
    sources, missing, unexpected = _plan(model, stored)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in sources:
            param._is_hf_initialized = True  # so that transformers does not initialise it
    make_lazy(model, sources, str(location))
    if missing or unexpected:
        parts = [f"{what} {', '.join(names[:8])}" + " and others" * (len(names) > 8) for what, names in (
            ("begins anew with", missing), ("leaves out of the files", unexpected)) if names]  # fmt: skip
        warnings.warn(f"{type(model).__name__} from {location} {'; '.join(parts)}", stacklevel=2)
    model.eval()
    return model


def _build(kind: Any, location: Path, dtype: torch.dtype, *, explicit: bool, **options: Any) -> Any:
    config = copy.deepcopy(options.pop("config", None))
    if config is None:
        build = {
            name: options.pop(name) for name in ("attn_implementation", "experts_implementation") if name in options
        }
        config, unused = transformers.AutoConfig.from_pretrained(
            str(location), trust_remote_code=False, return_unused_kwargs=True, **options
        )
        options = build | unused
    if getattr(config, "quantization_config", None) is not None:
        method = getattr(config.quantization_config, "quant_method", None) or dict(config.quantization_config).get(
            "quant_method", "a way that is not named"
        )
        raise InputError(
            f"{location} is quantised ({method}), which cannot be sharded from its files: give the model before it was "
            f"quantised"
        )
    dtype = dtype if explicit or config.dtype is None else config.dtype
    auto = hasattr(kind, "_model_mapping")
    make = kind.from_config if auto else kind._from_config
    with torch.device("meta"), meta_device_safe_creation_ops():
        model = make(config, dtype=dtype, **options)
    require_attributes("transformers", model, "_get_dtype_plan", "_adjust_missing_and_unexpected_keys")
    model.config.name_or_path = model.name_or_path = str(location)
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, by_group, _ = library.build_glob_alternation(list(plan))
        for name, param in model.named_parameters():
            found = pattern.search(name)
            if found:
                param.data = param.data.to(plan[by_group[found.lastgroup]])
    if model.can_generate() and (location / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(location))
    return model


@dataclass(slots=True, kw_only=True)
class _Target:
    """A tensor of the model to be filled, or several tensors that one operation makes together."""

    converter: Any
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def _plan(model: Any, stored: Mapping[str, Stored]) -> tuple[dict[str, FileSource], list[str], list[str]]:
    """Returns the sources by name, the names without a source, and names in the files that have no place in the model.
    The matching is that of transformers."""
    empty, mapping = dict(model.state_dict()), get_model_conversion_mapping(model)
    sources, unexpected = sources_of(model, stored, empty, mapping)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # saving undoes these
    _require_fit(sources, empty)
    _require_one_value(model, sources)
    missing = {name for names in _same(model).values() if not any(n in sources for n in names) for name in names}
    return sources, sorted(_counted(model, missing=missing).missing_keys), sorted(unexpected)


def sources_of(
    model: Any, stored: Mapping[str, Stored], empty: Mapping[str, Tensor], mapping: Sequence[Any] | None = None
) -> tuple[dict[str, FileSource], dict[str, Stored]]:
    """Returns the sources of the model's tensors, by name, matched as transformers does; and the tensors that have no
    place in it.

    Args:
        model: a model of transformers.
        stored: the tensors of the files.
        empty: the model's state dict with whole tensors on the meta device.
        mapping: transformers' conversions. Default: those of the model's class.
    """
    mapping = get_model_conversion_mapping(model) if mapping is None else mapping
    renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, FileSource] = {}
    targets: dict[str, _Target] = {}
    unexpected = dict[str, Stored]()
    for name in sorted(stored, key=library.dot_natural_key):
        found, pattern = library.rename_source_key(name, renamings, converters, model.base_model_prefix, empty)
        if found not in empty and name in empty:
            found, pattern = library.rename_source_key(
                name, [], [], base_model_prefix=model.base_model_prefix, meta_state_dict=empty
            )
        if found not in empty:
            unexpected[found] = stored[name]
        elif pattern is None:
            sources[found] = stored[name]
        else:
            target = targets.setdefault(found, _Target(converter=by_pattern[pattern]))
            target.names[pattern].append(name)
    last = Last()
    for found, target in targets.items():
        sources |= _converted(model, empty, found, target, stored, last)
    left = _counted(model, unexpected={*unexpected}).unexpected_keys
    return sources, {name: unexpected[name] for name in left}


def _counted(model: Any, *, missing: AbstractSet[str] = frozenset(), unexpected: AbstractSet[str] = frozenset()) -> Any:
    """Filters out names that transformers ignores for this model."""
    info = SimpleNamespace(missing_keys={*missing}, unexpected_keys={*unexpected})
    model._adjust_missing_and_unexpected_keys(info)
    return info


def _converted(
    model: Any, empty: Mapping[str, Tensor], name: str, target: _Target, stored: Mapping[str, Stored], last: Last
) -> dict[str, FileSource]:
    def convert(values: Any) -> dict[str, Tensor]:
        """Runs the library's own operations."""
        converter = copy.deepcopy(target.converter)
        for pattern, names in target.names.items():
            for each in names:
                converter.add_tensor(name, each, pattern, lambda each=each: values(stored[each]))
        owner = SimpleNamespace(config=model.config, get_parameter=empty.__getitem__)
        found = converter.convert(name, model=owner, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}

    try:
        shapes = convert(lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"))
    except Exception as error:  # each operation of the library has its own
        listed = ", ".join(each for names in target.names.values() for each in names[:2])
        raise ModelError(f"{name} cannot be made of what the files have ({listed}): {error}") from error
    operations = target.converter.operations
    if len(shapes) == 1 and all(type(each) in (library.MergeModulelist, library.Concatenate) for each in operations):
        return {next(iter(shapes)): _tiled(target, stored)}

    def whole(key: str) -> Tensor:
        return convert(lambda each: each.whole())[key]

    return {
        key: Computed(shape=tuple(made.shape), dtype=made.dtype, compute=partial(whole, key), last=last)
        for key, made in shapes.items()
    }


def _tiled(target: _Target, stored: Mapping[str, Stored]) -> Tiled:
    """The source of packed experts and the like. No element changes, so each rank reads the parts that it needs from
    each file."""
    patterns = [pattern for pattern in target.converter.source_patterns if pattern in target.names]
    groups = [[Tiled.of(stored[name]) for name in target.names[pattern]] for pattern in patterns]
    for operation in target.converter.operations:
        if isinstance(operation, library.MergeModulelist):
            groups = [[stacked(group, operation.dim)] for group in groups]
        else:
            groups = [[joined([part for group in groups for part in group], operation.dim)]]
    ((found,),) = groups
    return found


def _require_fit(sources: Mapping[str, FileSource], empty: Mapping[str, Tensor]) -> None:
    for name, source in sources.items():
        if name not in empty or source.shape != tuple(empty[name].shape):
            wanted = f"shape {tuple(empty[name].shape)}" if name in empty else "no such tensor"
            raise ModelError(f"the files have {name} of shape {source.shape}, and the model has {wanted}")


def _same(model: Any) -> dict[int, list[str]]:
    """Names of the state dict's entries, by the id of their tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return names


def _require_one_value(model: Any, sources: dict[str, FileSource]) -> None:
    """Raises ModelError if tied tensors differ in the files. If equal, they are read once."""
    for names in _same(model).values():
        held = [name for name in names if name in sources]
        for other in held[1:]:
            first, second = sources[held[0]], sources.pop(other)
            if not (isinstance(first, Stored) and isinstance(second, Stored) and first.same_as(second)):
                raise ModelError(
                    f"{held[0]} and {other} are tied in the model and differ in the files: give "
                    f"tie_word_embeddings=False, if they are not to be"
                )
