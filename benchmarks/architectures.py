"""Plans for every text architecture of transformers: which ones can be read, and whether the reading is right.

    make bench-architectures ARGS="-o architectures.json"     # 45 minutes of a processor

For each config class of a causal, masked or encoder-decoder language model, a config.json that only names the type is
loaded as by `zeromesh plan --model`, and a step is simulated. Parameters are compared with the model's own on the meta
device. For FLOPs, the config is made small by the names of its keys (see SMALLER), if that gives a model that runs. The
FLOPs of a plan for it are compared with torch's count in a real step on the CPU, forward and backward. An architecture
that takes more than --limit processor seconds counts as failed.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from benchmarks.harness import parser, save
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.errors import ModelError
from zeromesh.model.from_module import from_module, token_inputs
from zeromesh.model.from_transformers import HEADS, trained_as
from zeromesh.model.load import load_model
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Strategy

SEQ_LEN = 448
SMALL_LEN = 61

SMALLER = (
    (r"vocab_size", lambda value: min(value, 120)),
    (r"(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(en|de)coder_layers|num_hidden_groups)", lambda v: min(v, 4)),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*_num_experts)", lambda value: min(value, 8)),
    (r"(num_experts_per_tok|moe_topk|moe_top_k|top_k|moe_k)", lambda value: min(value, 2)),
    (r"(n_group|topk_group)", lambda value: 1),
    (
        r"(?!max_|num_|type_|chunk|.*(window|image|patch|position|kernel|chunk|state|conv)).*"
        r"(hidden|intermediate|ffn|dim|d_model|d_ff|d_kv|d_inner|n_embd|embedding|_size|rank|width).*",
        lambda value: value // 8 if value >= 64 else value,
    ),
)
"""New values of integer keys, by the first pattern that matches the whole name."""

MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "blenderbot": (128, {}),  # as many positions as its type has
    "blt": (SEQ_LEN, {"patching_mode": "static"}),  # else chosen by its weights for each byte
    "perceiver": (2048, {}),
    "reformer": (4096, {}),
    "xmod": (SEQ_LEN, {"default_language": "en_XX"}),
}
"""Values that some types expect from their files: the only length that they run on, and keys."""

AUTO = {"layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers"}
"""Lists with one entry per layer, which the class makes if they are left out."""

aten = torch.ops.aten

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers", "zeromesh.planner.plan"])


def types() -> list[str]:
    """Returns the model types of all text architectures."""
    known = transformers.CONFIG_MAPPING
    return [name for name in known if any(known[name] in auto._model_mapping for auto in HEADS)]


def check(model_type: str, limit: int) -> dict[str, Any]:
    """Checks whether one architecture plans, and whether the reading is right. It runs in a separate process, which
    ends when its time is over, or by an error of torch."""
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(model_type, limit, writer))
    process.start()
    writer.close()
    try:
        found: dict[str, Any] = reader.recv()
    except EOFError:
        found = {"plans": False}
    process.join()
    if process.exitcode:
        slow = process.exitcode == -signal.SIGXCPU
        found["why"] = f"takes more than {limit} s of a processor" if slow else f"ended with {process.exitcode}"
    return {"model_type": model_type} | found


def _work(model_type: str, limit: int, writer: Connection) -> None:
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + limit, used + limit + 5))
    start()
    found = _check(model_type)
    writer.send(found | {"seconds": round(time.process_time() - used, 1)})


def _check(model_type: str) -> dict[str, Any]:
    try:
        seq_len, keys = MORE.get(model_type, (SEQ_LEN, {}))
        spec = load(model_type, keys, seq_len)
        step_s = step(spec, seq_len)
    except ModelError as error:
        return {"plans": False, "why": reason(str(error)), "message": str(error)}
    except Exception as error:  # the check is to find these
        return {"plans": False, "why": f"raw {type(error).__name__}", "message": str(error)[:500]}
    own = sum(parameter.numel() for parameter in meta_model(model_type).parameters())
    found = {"plans": True, "params": spec.num_params, "params_off": spec.num_params - own, "step_s": step_s}
    return found | compared(model_type)


def step(spec: ModelSpec, seq_len: int) -> float:
    """Seconds that the simulator predicts for a step on sixteen GPUs."""
    cluster = find_cluster("a800-8x-hdr").take(16)
    work = Workload(
        seq_len=seq_len, global_batch_tokens=16 * seq_len, micro_batch=1, recomputation=Recomputation.SELECTIVE
    )
    strategy = Strategy.parse("node=3,cluster=1", [name for name, _ in cluster.axes])
    return simulate_choices(spec, cluster, work, strategy)[0].simulation.step_s


def load(model_type: str, keys: dict[str, Any], seq_len: int = SEQ_LEN) -> ModelSpec:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps({"model_type": model_type} | keys))
        return load_model(str(path), seq_len=seq_len)


def reason(message: str) -> str:
    """The class of a failure: the exception of transformers while it built or ran the model."""
    found = re.search(r"cannot build .*?: (\w+): ", message, re.DOTALL)
    if found:
        return f"cannot be built: {found[1]}"
    found = re.search(r"does not run .*?\((\w+): ([^.:]*)", message, re.DOTALL)
    return f"does not run: {found[1]} {found[2][:60]}" if found else message.partition(": ")[2][:80]


def meta_model(model_type: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(model_type, **MORE.get(model_type, (0, {}))[1])
    with torch.device("meta"):
        return trained_as(config).from_config(config)  # type: ignore[no-any-return]  # transformers'


# FLOPs ----------------------------------------------------------------------------------------------------------------


def compared(model_type: str) -> dict[str, Any]:
    """Returns our FLOPs over torch's, for a small instance."""
    try:
        module = small_model(model_type)
        asked, _ = MORE.get(model_type, (SEQ_LEN, {}))
        length = SMALL_LEN if asked == SEQ_LEN else asked
        spec = from_module(module, seq_len=length, dtype="fp32")  # before it runs, since that may leave states in it
        real = real_flops(module, length)
    except Exception as error:  # names may not suffice to make a config small
        return {"flops": f"not compared: {type(error).__name__}: {str(error)[:150]}"}
    forward, backward = planned_flops(spec, length)
    return {"forward": round(forward / real[0], 6), "backward": round(backward / real[1], 6)}


def small_model(model_type: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(model_type, **MORE.get(model_type, (0, {}))[1])
    keys = smaller(config.to_dict())
    config = transformers.AutoConfig.for_model(model_type, **{k: v for k, v in keys.items() if k != "model_type"})
    module: nn.Module = trained_as(config).from_config(config)
    if sum(parameter.numel() for parameter in module.parameters()) > 3e8:
        raise ValueError("more than 300 M parameters are left")
    return module.train()


def smaller(keys: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for key, value in keys.items():
        if key in AUTO:
            continue
        if isinstance(value, dict):
            value = smaller(value)
        elif isinstance(value, bool):
            pass
        elif isinstance(value, float) and re.search(r"drop", key):
            value = 0.0
        elif isinstance(value, int) and key.endswith("token_id"):
            value = min(value, 119)
        elif isinstance(value, int):
            rule = next((change for pattern, change in SMALLER if re.fullmatch(pattern, key)), None)
            value = rule(value) if rule else value
        made[key] = value
    return made


def planned_flops(spec: ModelSpec, seq_len: int) -> tuple[float, float]:
    """Planned FLOPs of a forward and of a backward for one sequence."""
    forward = sum(unit.count * unit.forward_flops(seq_len) for unit in spec.units)
    return forward * seq_len, sum(unit.count * unit.backward_flops(seq_len) for unit in spec.units) * seq_len


def real_flops(module: nn.Module, seq_len: int) -> tuple[int, int]:
    """FLOPs of a forward and of a backward, counted while they compute."""
    inputs = dict(token_inputs(module, seq_len))
    with FlopCounterMode(display=False, custom_mapping=dict(formulas())) as counter:
        output = module(*inputs.pop("*", ()), **inputs)
        loss = output.loss if getattr(output, "loss", None) is not None else output[0].float().sum()
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False, custom_mapping=dict(formulas())) as counter:
        loss.backward()
    return forward, counter.get_total_flops()


def formulas() -> Iterator[tuple[Any, Any]]:
    """Yields formulas for CPU operations that torch's counter does not know, and for the backward of convolutions:
    there it ignores that groups need fewer products."""

    def attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch's

    def attention_backward(
        grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
    ) -> int:
        return int(2.5 * sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch's

    def grouped(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(2 * left[-2] * left[-1] * right[-1] * (left[0] if len(left) == 3 and len(right) == 3 else 1))

    def convolution_backward(grad: Any, x: Any, weight: Any, *given: Any, out_shape: Any = None, **__: Any) -> int:
        transposed, wanted = given[4], given[7]
        return int(sum(wanted[:2]) * conv_flop_count(x, weight, grad, transposed=transposed))

    yield aten.convolution_backward, convolution_backward
    yield aten._scaled_dot_product_flash_attention_for_cpu, attention
    yield aten._scaled_dot_product_flash_attention_for_cpu_backward, attention_backward
    yield aten._grouped_mm, grouped


# The sweep ------------------------------------------------------------------------------------------------------------


def start() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    plans = [one for one in records if one["plans"]]
    compared = [one for one in plans if "forward" in one]
    return {
        "architectures": len(records),
        "plan": len(plans),
        "fail": dict(Counter(one["why"].partition(":")[0] for one in records if not one["plans"])),
        "parameters_differ": [one["model_type"] for one in plans if one["params_off"]],
        "flops_compared": len(compared),
        "forward_off_by_more_than_0.1%": {
            one["model_type"]: one["forward"] for one in compared if abs(one["forward"] - 1) > 1e-3
        },
        "backward_off_by_more_than_5%": {
            one["model_type"]: one["backward"] for one in compared if abs(one["backward"] - 1) > 0.05
        },
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", default=[], help="model types; all if none")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--limit", type=int, default=240, help="seconds of a processor for one architecture")
    given = options.parse_args()
    chosen = given.only or types()
    records = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for record in pool.map(check, chosen, [given.limit] * len(chosen)):
            records.append(record)
            print(json.dumps(record)[:400], flush=True)
    records.sort(key=lambda record: record["model_type"])
    versions = {"transformers": transformers.__version__, "seq_len": SEQ_LEN}
    save(given.out, **versions, records=records, summary=summary(records))


if __name__ == "__main__":
    main()
