"""Configuration files of DeepSpeed, accelerate, FSDP and torchtitan, as a strategy and keys of `zeromesh train`.

Each format has one table, from the library's keys to our keys with the same value. A few keys describe the layout
together; one function a format reads them. All other keys that matter are listed as having no equivalent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.errors import InputError, MeshError, one_of
from zeromesh.files.users import parse_json, parse_toml, read_text
from zeromesh.strategy.plan import Plan
from zeromesh.strategy.stage import HOST, dtype_name

SUFFIXES = (".json", ".yaml", ".yml", ".toml")
"""Suffixes of files that may stand in place of a strategy."""

Sizes = Sequence[tuple[str, int]]

DEEPSPEED = {
    "train_batch_size": "batch.global_sequences",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_clipping": "optimizer.clip_norm",
    "communication_data_type": "dtypes.reduce",
    "torch_autocast.dtype": "dtypes.param",
    "data_types.grad_accum_dtype": "dtypes.grad",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
    "scheduler.params.total_num_steps": "run.steps",
}

ACCELERATE = {"deepspeed_config.gradient_clipping": "optimizer.clip_norm"}

TORCHTITAN = {
    "training.local_batch_size": "batch.micro",
    "training.batch_size": "batch.micro",  # its older name
    "training.global_batch_size": "batch.global_sequences",
    "training.seq_len": "data.seq_len",
    "training.max_norm": "optimizer.clip_norm",
    "training.steps": "run.steps",
    "training.seed": "run.seed",
    "training.mixed_precision_param": "dtypes.param",
    "training.mixed_precision_reduce": "dtypes.reduce",
    "activation_checkpoint.mode": "model.activation_checkpointing",
    "optimizer.lr": "optimizer.lr",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler.min_lr_factor": "optimizer.final_lr_ratio",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "parallelism.tensor_parallel_degree": "--tp",
    "parallelism.context_parallel_degree": "--cp",
    "parallelism.pipeline_parallel_degree": "--pp",
    "parallelism.expert_parallel_degree": "--ep",
}

_NEEDLESS = re.compile(
    r"""(.*\.)?(
    fsdp_(version|auto_wrap_policy|transformer_layer_cls_to_wrap|use_orig_params)
    | overlap_comm | contiguous_gradients | reduce_scatter | allgather_partitions | round_robin_gradients | pin_memory
    | .*bucket_size | stage3_.* | sub_group_size | .*prefetch.* | implementation | selective_ac_option
    | torch_autocast.enabled | context_parallel_rotate_method | zero_allow_untested_optimizer
    | fsdp_(cpu_ram_efficient_loading|sync_module_states|state_dict_type) | zero3_.*
    | compute_environment | debug | machine_rank | main_.* | rdzv_backend | same_network | tpu_.* | gpu_ids | use_cpu
    | enable_cpu_affinity | deepspeed_multinode_launcher | steps_per_print | wall_clock_breakdown
    )|(job|profiling|metrics)\..*""",
    re.VERBOSE,
)
"""Keys that need no equivalent: zeromesh does this by itself, or they are for launchers and loggers."""

_TAKE_NOTHING = (
    "checkpoint.keep",
    "model.activation_checkpointing",
    "optimizer.clip_norm",
    "optimizer.final_lr_ratio",
    "optimizer.weight_decay",
)
"""Our keys that are not off by default: if a file has 0 or "none", they must be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A file of another library.

    Its `parts` are (stage, ranks) of groups of ranks, innermost first; 0 ranks means all that are left, or those of a
    machine.
    """

    source: str  # the library
    parts: tuple[tuple[str, int], ...]
    host: str = ""  # the stage of the host, as it stands in a strategy; "" for none
    keys: Mapping[str, Any]  # our keys, dotted; those of `zeromesh plan` begin with "--"
    mesh: tuple[tuple[str, int], ...] = ()  # (axis, ranks), innermost first, if the file has numbers of ranks
    without: tuple[str, ...] = ()  # the library's keys that have no equivalent

    def strategy(self, mesh: Sizes = ()) -> str:
        """The strategy in our notation.

        The mesh is (axis, ranks), innermost first, with 0 ranks if they are not known. Default: the file's own, or a
        node and a cluster, where a group of ranks counts as a node. Raises MeshError if a group of ranks does not fit
        the mesh.
        """
        axes = mesh or self.mesh or (("node", 0), ("cluster", 0))
        (inner, left), (outer, _) = self.parts[0], self.parts[-1]
        if not all(size for _, size in axes):
            axes, left = [*((name, 1) for name, _ in axes[:-1]), (axes[-1][0], 2)], 1  # a group counts as a node
        left = left or prod(size for _, size in (axes[:-1] or axes))
        terms = []
        for name, size in axes:
            if left % size == 0:
                terms.append(f"{name}={inner}")
                left //= size
            elif size % left == 0:
                terms += [f"{name}[{left}]={inner}", f"{name}[*]={outer}"] if left > 1 else [f"{name}={outer}"]
                left = 1
            else:
                break
        if left > 1:
            raise MeshError(f"{self.source} shards over {self.parts[0][1]} ranks, which are no part of {dict(axes)}")
        return ",".join([f"{HOST}{self.host}"] * bool(self.host) + terms)

    def to_toml(self, mesh: Sizes = ()) -> str:
        """The keys as a file of `zeromesh train`; comments list the keys without an equivalent."""
        sizes = [f"{name} = {size}" for name, size in reversed(mesh or self.mesh)]
        lines = [f"# from {self.source}", f"strategy = {json.dumps(self.strategy(mesh))}"]
        lines += [f"mesh = {{ {', '.join(sizes)} }}"] * bool(sizes)
        tables: dict[str, list[str]] = {}
        for key, value in self.keys.items():
            table, _, name = key.rpartition(".")
            if not key.startswith("--"):
                tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
        for table, rows in tables.items():
            lines += ["", f"[{table}]", *rows]
        degrees = [f"#   {key} {value}" for key, value in self.keys.items() if key.startswith("--")]
        missing = [f"#   {key}" for key in self.without]
        lines += ["", "# for zeromesh plan and simulate alone:", *degrees] if degrees else []
        lines += ["", "# no equivalent:", *missing] if missing else []
        return "\n".join(lines)


def is_file(strategy: str) -> bool:
    """Whether the text is the name of a file, in place of a strategy."""
    return strategy.endswith(SUFFIXES)


def read_strategy(text: str, mesh: Sizes) -> str:
    """The strategy's text. If it names a file, the file's strategy on the mesh, whose sizes come innermost first.
    Raises InputError or MeshError as `read_file` and `Imported.strategy`."""
    if not is_file(text):
        return text
    found = read_file(Path(text))
    return found.strategy(mesh) if isinstance(found, Imported) else str(found.strategy)


def read_file(path: Path) -> Plan | Imported:
    """Reads a plan, or a file of another library. Raises InputError if it cannot be read, or is neither."""
    if path.suffix == ".json" and "zeromesh_plan" in read_text(path, kind="a plan"):
        return Plan.load(path)
    return read_foreign(path)


def sharding_options(path: Path, mesh: Any) -> dict[str, Any]:
    """The options of `zm.Sharding` in a file, for a mesh or its sizes; for None, the file's own mesh."""
    found = read_file(path)
    own: dict[str, Any] = {"strategy": found, "mesh": mesh or dict(found.mesh[::-1])}
    if isinstance(found, Plan):
        return own
    named = zip(mesh.mesh_dim_names, mesh.shape, strict=True) if hasattr(mesh, "mesh_dim_names") else mesh
    sizes = tuple(dict(named).items())[::-1] if named else found.mesh
    degrees = [key for key in found.keys if key.startswith("--")]
    if degrees or not sizes:
        needs = f"cuts the model beside data ({', '.join(degrees)})" if degrees else "does not say a mesh: give one"
        raise InputError(f"{path} {needs}; `zeromesh import` prints all that is in it")
    own |= {f"{key[7:]}_dtype": value for key, value in found.keys.items() if key.startswith("dtypes.")}
    return own | {"strategy": found.strategy(sizes)}


def read_foreign(path: Path) -> Imported:
    """Reads a file of another library. Raises InputError if it cannot be read, or is of no known library."""
    found, fsdp = _tables(path), {}
    if isinstance(section := found.get("fsdp_config", found), dict):
        fsdp = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in section.items()}
    try:
        if path.suffix == ".toml" and "parallelism" in found:
            return _imported("torchtitan", found, TORCHTITAN, _torchtitan)
        if "distributed_type" in found:
            beside = found.get("deepspeed_config", {}).pop("deepspeed_config_file", None)
            inner = read_foreign(path.parent / beside) if beside else None
            return _imported("accelerate", found, ACCELERATE, lambda has: _accelerate(has, inner))
        if "zero_optimization" in found or "train_micro_batch_size_per_gpu" in found:
            return _imported("DeepSpeed", found, DEEPSPEED, _deepspeed)
        if fsdp.keys() & {"fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy"}:
            return _imported("FSDP", {"distributed_type": "FSDP", "fsdp_config": fsdp}, ACCELERATE, _accelerate)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: a value is none that such a file has: {error}") from error
    raise InputError(
        f"{path}: not a zeromesh plan, and no configuration of DeepSpeed (zero_optimization), accelerate "
        f"(distributed_type), FSDP (fsdp_version) or torchtitan ([parallelism])"
    )


def _tables(path: Path) -> dict[str, Any]:
    text, where = read_text(path, kind="a configuration"), str(path)
    if path.suffix == ".toml":
        return parse_toml(text, where=where)
    if path.suffix == ".json":
        found = parse_json(text, where=where)
    else:
        try:
            import yaml  # type: ignore[import-untyped]  # it has no types of its own
        except ImportError as error:
            raise InputError(f"{path}: to read YAML takes PyYAML: pip install pyyaml") from error
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"{path}: not YAML: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: a configuration has keys with values")
    return found


class _Has(dict[str, Any]):
    """Dotted keys with their values, and the keys that were asked for. Values of "auto" are left out: the Trainer of
    transformers fills them in from its own arguments."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        super().__init__((key, value) for key, value in _flat(tables) if value not in ("auto", None))
        self.asked: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return self.get(key, default)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _imported(
    source: str, tables: Mapping[str, Any], table: Mapping[str, str], read: Callable[[_Has], dict[str, Any]]
) -> Imported:
    has, keys, without = _Has(tables), dict[str, Any](), list[str]()
    layout = read(has)
    for key, value in has.items():
        ours = table.get(key)
        off = value in (0, "none", "no") and (ours not in _TAKE_NOTHING or value is False)
        if off or value in (None, "", [], -1, "Adam", "AdamW") or key in has.asked:
            continue
        if key.endswith("gradient_accumulation_steps"):  # zeromesh derives it from the batch of all ranks
            known = value == 1 or "train_batch_size" in has
            without += [] if known else [f"{key} = {value}: set batch.global_sequences, of all ranks and micro-batches"]
        elif ours == "checkpoint.keep" and value == 0:
            without.append(f"{key} = 0: set checkpoint.keep to as many as the run saves, to keep all of them")
        elif ours is None:
            without += [] if _NEEDLESS.fullmatch(key) else [f"{key} = {value}"]
        elif not (ours.startswith("--") and value == 1):
            keys[ours] = dtype_name(value, key) if ours.startswith("dtypes.") else value
    keys = layout.pop("keys", {}) | keys
    without += layout.pop("without", [])
    return Imported(source=source, keys=keys, without=tuple(without), **layout)


def _deepspeed(has: _Has) -> dict[str, Any]:
    def zero(key: str, default: Any = None) -> Any:
        return has.take(f"zero_optimization.{key}", default)

    stage = int(zero("stage", 0))
    wire = f"{'int8' * bool(zero('zero_quantized_weights'))}/{'int4' * bool(zero('zero_quantized_gradients'))}"
    wire = "" if wire == "/" or stage < 3 else f"@{wire}"
    inner, hpz, mics = f"{stage}{wire}", int(zero("zero_hpz_partition_size", 1)), int(zero("mics_shard_size", -1))
    zero("mics_hierarchical_params_gather")
    outer = f"{stage}k{wire}" if hpz > 1 else "0" if mics > 0 else ""
    dtype = next((name for name in ("bf16", "fp16") if has.take(f"{name}.enabled") is True), "fp32")
    keys = {} if dtype == "fp32" else {"dtypes.param": dtype}
    devices = [zero(f"offload_{kind}.device", "none") for kind in ("optimizer", "param")]
    return {
        "parts": ((inner, max(hpz, mics)), (outer, 0)) if outer else ((inner, 0),),
        "keys": keys,
        **_offload(stage, devices, zero("offload_optimizer.ratio", 1.0)),
    }


def _offload(stage: int, devices: Sequence[str], ratio: float = 1.0) -> dict[str, Any]:
    """The host's stage for DeepSpeed's offload: the inverse of `emit_deepspeed`."""
    states, params = (device == "cpu" for device in devices)
    without = [f"offload to nvme ({', '.join(devices)})"] if "nvme" in devices else []
    host = 3 if params and stage == 3 else min(stage, 2) if states else 0
    without += ["offload_param without offload_optimizer: host=3 has both"] if host == 3 and not states else []
    share = "" if ratio == 1 else f"[{100 * ratio:g}%]"
    return {"host": f"{share}={host}" if host else "", "without": without}


_FSDP = {"FULL_SHARD": "3", "SHARD_GRAD_OP": "3k", "NO_SHARD": "0", "HYBRID_SHARD": "3", "HYBRID_SHARD_ZERO2": "3k"}
"""Stages of torch's `ShardingStrategy`, whose values may also be given by number, from 1 on."""


def _accelerate(has: _Has, beside: Imported | None = None) -> dict[str, Any]:
    kind = has.take("distributed_type")
    dtype = has.take("mixed_precision", "no")
    keys: dict[str, Any] = {"dtypes.param": "fp16" if dtype == "fp16" else "bf16"} if dtype != "no" else {}
    without = ["mixed_precision = fp8"] if dtype == "fp8" else []
    found: dict[str, Any] = {"keys": keys, "mesh": _mesh(has), "without": without}
    if beside is not None:
        keys |= beside.keys
        return found | {"parts": beside.parts, "host": beside.host, "without": [*without, *beside.without]}
    if kind == "DEEPSPEED":
        zero = int(has.take("deepspeed_config.zero_stage", 2))
        devices = [has.take(f"deepspeed_config.offload_{each}_device", "none") for each in ("optimizer", "param")]
        offload = _offload(zero, devices)
        return found | {"parts": ((str(zero), 0),), "host": offload["host"], "without": without + offload["without"]}
    if kind != "FSDP":
        return found | {"parts": (("0", 0),)}

    def fsdp(key: str, default: Any = None) -> Any:
        return has.take(f"fsdp_config.fsdp_{key}", default)

    reshard = str(fsdp("reshard_after_forward", True)).upper()  # in version 1 it names the strategy
    named = str(fsdp("sharding_strategy", "FULL_SHARD" if reshard in ("TRUE", "FALSE") else reshard)).upper()
    named = [*_FSDP][int(named) - 1] if named.isdecimal() and 0 < int(named) <= len(_FSDP) else named
    if named not in _FSDP:
        raise InputError(f"fsdp_sharding_strategy must be {one_of(named, _FSDP)}")
    stage = "3k" if reshard == "FALSE" else _FSDP[named]
    if fsdp("activation_checkpointing"):
        keys["model.activation_checkpointing"] = "full"
    replicas, shards = (
        has.take(f"parallelism_config.parallelism_config_dp_{n}_size", 1) for n in ("replicate", "shard")
    )
    hybrid = named.startswith("HYBRID") or int(replicas) > 1
    parts = ((stage, int(shards) if int(replicas) > 1 else 0), ("0", 0)) if hybrid else ((stage, 0),)
    return found | {"parts": parts, "host": "=3" if fsdp("offload_params") else ""}


def _mesh(has: _Has) -> tuple[tuple[str, int], ...]:
    world, machines = int(has.take("num_processes", 0)), int(has.take("num_machines", 1))
    if world % machines:
        raise ValueError(f"{world} processes on {machines} machines")
    sizes = ("node", world // machines), ("cluster", machines)
    return sizes[: 1 + (machines > 1)] if world else ()


def _torchtitan(has: _Has) -> dict[str, Any]:
    def degree(key: str, default: Any) -> Any:
        return has.take(f"parallelism.{key}", default)

    replicas, shards = (int(degree(f"data_parallel_{name}_degree", n)) for name, n in (("replicate", 1), ("shard", -1)))
    stage = "3k" if degree("fsdp_reshard_after_forward", "default") == "never" else "3"
    stage = "0" if shards == 1 else stage
    keys = {"model.activation_checkpointing": "selective", "dtypes.param": "bf16", "dtypes.reduce": "fp32"}
    every = has.take("checkpoint.interval", 500)
    if has.take("checkpoint.enable", has.take("checkpoint.enable_checkpoint")):
        keys["checkpoint.every"] = every
    betas = [has.take(f"optimizer.beta{n}", default) for n, default in ((1, 0.9), (2, 0.95))]
    return {
        "parts": ((stage, max(0, shards)), ("0", 0)) if replicas > 1 and stage != "0" else ((stage, 0),),
        "host": "=3" if has.take("training.enable_cpu_offload") else "",
        "keys": keys | {"optimizer.betas": betas},
    }
