"""`zeromesh plan` and `zeromesh simulate`: their contract, their files, and their messages for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeromesh.strategy.plan import Plan

BASE = [
    *("--model", "llama-7b", "--cluster", "a800-8x-hdr", "--world", "64"),
    *("--seq-len", "4096", "--global-batch-tokens", "1048576"),
]
STEP = "strategy engine world micro_batches step_s tokens_per_s_per_device mfu compute_s exposed_comm_s memory_bytes"
SMALL = [*BASE, "--model", "gpt2", "--world", "16", "--seq-len", "1024", "--micro-batch", "1"]
MEMORY = {"params", "grads", "optimizer", "buffers", "activations", "total"}


def check_step(step: dict[str, Any]) -> None:
    assert set(step) >= {*STEP.split(), "fits", "axes"}
    assert set(step["memory_bytes"]) >= MEMORY
    parts = sum(value for key, value in step["memory_bytes"].items() if key != "total")
    assert step["memory_bytes"]["total"] == pytest.approx(parts)
    for axis in step["axes"]:
        assert set(axis) == {"axis", "size", "stage", "bytes_sent_per_device"}


def test_plan_prints_the_contracts_json_and_writes_its_files(zeromesh: Any, tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "out.html"
    code, out, _ = zeromesh("plan", *BASE, "--json", "-o", plan, "--report", report)
    assert code == 0
    answer = json.loads(out)
    assert set(answer) >= {"best", "candidates", "searched", "seconds", "why"}
    for step in (answer["best"], *answer["candidates"]):
        check_step(step)
    for candidate in answer["candidates"]:
        assert candidate["fits"] and candidate["step_s"] >= answer["fastest"]["step_s"]
    assert answer["best"]["step_s"] <= 1.02 * answer["fastest"]["step_s"]
    assert answer["candidates"][0] == answer["best"] and answer["best"]["world"] == 64
    assert answer["searched"] > 1000
    chosen = Plan.load(plan)
    assert str(chosen.strategy) == answer["best"]["strategy"] and str(chosen.strategy) in report.read_text()
    assert dict(chosen.mesh) == {"node": 8, "cluster": 8}
    code, out, _ = zeromesh("plan", *SMALL, "--splits", "none", "--no-robust", "-o", plan)
    assert code == 0 and str(Plan.load(plan).strategy) in out


def test_simulate_prints_the_contracts_json(zeromesh: Any) -> None:
    arguments = ["--micro-batch", "1", "--activation-checkpointing", "none", "--strategy", "node=3,cluster=1", "--json"]
    code, out, _ = zeromesh("simulate", *BASE, *arguments)
    assert code == 0
    step = json.loads(out)
    check_step(step)
    assert (step["strategy"], step["engine"], step["micro_batches"]) == ("node=3,cluster=1", "zeromesh", 4)
    axes = [(axis["axis"], axis["size"], axis["stage"]) for axis in step["axes"]]
    assert axes == [("node", 8, "3"), ("cluster", 8, "1")]
    tokens = 1048576 / step["step_s"] / 64
    assert step["tokens_per_s_per_device"] == pytest.approx(tokens)
    flops = 6 * (6738415616 - 32000 * 4096) + 12 * 32 * 4096 * 4096
    assert step["mfu"] == pytest.approx(tokens * flops / 312e12)
    for engine in ("fsdp", "deepspeed", "amsp"):
        code, out, _ = zeromesh("simulate", *BASE, *arguments, "--engine", engine)
        assert (code, json.loads(out)["engine"]) == (0, engine)


def test_simulate_writes_a_plan_and_lists_choices(zeromesh: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = zeromesh("simulate", *BASE, "--strategy", "node=3,cluster=1", "--top", "3", "--json", "-o", path)
    step = json.loads(out)
    assert code == 0
    check_step(step)
    chosen = Plan.load(path)
    assert str(chosen.strategy) == step["strategy"]
    assert (chosen.micro_batch, chosen.recompute) == (step["micro_batch"], step["recomputation"])
    seconds = [candidate["step_s"] for candidate in step["candidates"]]
    assert seconds == sorted(seconds) and len(seconds) == 3 and seconds[0] == step["step_s"]


def test_simulate_writes_its_files_and_shows_what_does_not_fit(zeromesh: Any, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "out.html"
    code, out, _ = zeromesh("simulate", *SMALL, "--strategy", "zero3", "--trace", trace, "--report", report)
    assert code == 0
    assert "node=3,cluster=3" in out
    assert {"name", "ph", "ts"} <= set(json.loads(trace.read_text())["traceEvents"][-1])
    assert "timeline" in report.read_text()
    code, out, _ = zeromesh("simulate", *SMALL, "--strategy", "node=3,cluster=3", "--emit", "deepspeed")
    assert code == 0
    assert json.loads(out)["zero_optimization"]["stage"] == 3
    code, out, _ = zeromesh("simulate", *BASE, "--strategy", "node=0,cluster=0", "--json")
    step = json.loads(out)
    assert (code, step["fits"]) == (1, False)
    assert step["memory_bytes"]["total"] > 80e9


def test_plan_takes_the_host_s_memory_where_nothing_fits_without(zeromesh, tmp_path):
    base = ("plan", "--model", "llama-7b", "--cluster", "rtx4090-8x-10g", "--world", "4", "--seq-len", "2048")
    base = (*base, "--global-batch-tokens", "64Ki", "--splits", "none", "--activation-checkpointing", "full")
    code, out, _ = zeromesh(*base, "--host-memory", "128GB", "--report", tmp_path / "plan.html")
    assert code == 0 and re.search(r"\n  host=2 fits: [\d.]+ ms more a step, 108 GB of a machine's memory\n", out)
    assert "recommended: host=2,node=3,cluster=0;step=device" in out  # four ranks would step in one memory
    assert re.search(r"\n    [\d.]+ GB \+ 27 GB on the host \(108 GB a machine\); \d+ micro-batch", out)
    assert "memory of its host: 27 GB per device, 108 GB a machine (122 GB usable)" in out
    assert re.search(r"ZeRO-1  host=\d,node=1,cluster=0\n    does not fit: \d+ GB of a machine's memory are", out)
    page = (tmp_path / "plan.html").read_text()
    assert "27 GB on the host (108 GB a machine)" in page and 'GB + 27.4 GB on the host" data-step-s' in page
    answer = json.loads(zeromesh(*base, "--host-memory", "128GB", "--micro-batch", "8", "--json")[1])
    step = answer["best"]
    assert step["machine_memory_bytes"] == 4 * step["host_memory_bytes"] < step["machine_memory_limit_bytes"] == 121.6e9
    assert 0 < answer["host_s"] < step["step_s"] and answer["front"][0]["host_memory_bytes"] > 20e9
    assert any(reason["host_memory_bytes"] for reason in answer["why"])


def test_plan_compares_with_what_another_network_or_engine_would_give(zeromesh: Any) -> None:
    changes = ["--what-if", "cluster.bandwidth=2x", "--what-if", "node.latency=1 us,memory=141 GB"]
    base = ["plan", *SMALL, *["--splits", "none", "--no-robust", "--activation-checkpointing", "none"]]
    code, out, _ = zeromesh(*base, *changes, "--engine", "fsdp", "--json")
    answer = json.loads(out)
    assert code == 0 and [each["change"] for each in answer["what_if"]] == changes[1::2]
    for step in (answer["zeromesh"], *(each[key] for each in answer["what_if"] for key in ("best", "fastest"))):
        check_step(step)
    code, out, err = zeromesh(*base, *changes[:2], "--emit", "fsdp2")
    assert code == 0 and "fully_shard" in out
    assert "recommended for fsdp2: node" in err and "what if cluster.bandwidth=2x: node" in err
    assert "fsdp2 takes " in err and " than zeromesh with its fastest layout, " in err
    fp8 = ["--cluster", "h100-8x-ndr", "--engine", "fsdp", "--products", "fp8"]  # zeromesh has no such products
    code, out, _ = zeromesh(*base, *fp8)
    assert code == 0 and "than zeromesh" not in out
    code, _, err = zeromesh(*base, "--what-if", "rack.bandwidth=2x")
    assert code == 2 and "--what-if changes node.bandwidth" in err


def test_simulate_refuses_quantised_wires_where_asked_to(zeromesh: Any) -> None:
    base = ["simulate", *SMALL, "--strategy"]
    code, _, err = zeromesh(*base, "node=3@int8/,cluster=1", "--wire", "lossless")
    assert code == 2
    assert "--wire lossless takes no strategy with quantised wires, got node=3@int8/,cluster=1" in err
    assert zeromesh(*base, "node=3@int8/,cluster=1")[0] == 0
    assert zeromesh(*base, "node=3@fp32/,cluster=1", "--wire", "lossless")[0] == 0


WRONG = {
    "model": (["--model", "llama-8b"], "nn.Module; did you mean"),
    "cluster": (["--cluster", "a800-8x"], "a800-8x-hdr"),
    "world": (["--world", "12"], "partly filled: take 8 or 16"),
    "batch": (["--global-batch-tokens", "1048577"], "not a multiple of the sequence length 4096"),
    "uneven": (["--global-batch-tokens", "409600"], "100 sequences cannot be divided evenly among 64 devices"),
    "trainable": (["--trainable", "lora"], "lora:RANK is required, got 'lora'"),
    "dtype": (["--grad-dtype", "fp8"], "--grad-dtype must be one of fp32, bf16; got 'fp8'"),
    "checkpointing": (["--activation-checkpointing", "ful"], "did you mean full"),
    "margin": (["--memory-margin", "1.5"], "must lie in"),
    "micro-batch": (["--micro-batch", "3"], "not a multiple of micro_batch 3"),
    "negative": (["--micro-batch", "-1"], "must be at least 1"),
    "seq-len": (["--seq-len", "0"], "seq_len must be at least 1"),
    "engine": (["--engine", "megatron"], "unknown engine 'megatron'"),
    "emit": (["--emit", "fsdp"], "did you mean fsdp2"),
    "wire": (["--wire", "lossles"], "did you mean lossless"),
    "top": (["--top", "0"], "--top must be at least 1, got 0"),
    "file": (["--model", "missing/config.json"], "cannot be read"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_wrong_input_is_one_message_and_exit_code_2(zeromesh: Any, what: str) -> None:
    changed, message = WRONG[what]
    for command in (["plan"], ["simulate", "--strategy", "node=3,cluster=0"]):
        code, out, err = zeromesh(*command, *BASE, *changed)
        assert (code, out) == (2, "")
        assert message in err


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("simulate", "--strategy node=4,cluster=0", "stage must be one of"),
        ("simulate", "--strategy zero4", "did you mean"),
        ("plan", "--splits one", "--splits must be one of none, once, all; got 'one'"),
        ("plan", "--space ful", "did you mean full"),
        ("plan", "--collective ring", "--collective must be one of auto, hierarchical, ho_ring; got 'ring'"),
        ("plan", "--host 1", "--host must be one of auto, any, none; got '1'"),
        ("plan", "--pp-schedule zero", "--pp-schedule must be one of gpipe"),
        ("plan", "--tp 0", "--tp must be at least 1, got 0"),
        (
            "plan",
            "--model llama-65b --world 8 --global-batch-tokens 32768 --host none",
            "devices of this kind would do",
        ),
        (
            "plan",
            "--model gpt2 --seq-len 1024 --micro-batch 1 --splits none --no-robust -o missing/plan.json",
            "cannot be written",
        ),
    ],
)
def test_wrong_options_of_one_command(zeromesh: Any, command: str, options: str, message: str) -> None:
    code, _, err = zeromesh(command, *BASE, *options.split())
    assert code == 2
    assert message in err


def test_plan_and_simulate_take_degrees(zeromesh: Any, tmp_path: Path) -> None:
    base = [*BASE, *["--world", "32", "--seq-len", "2048", "--global-batch-tokens", "131072", "--micro-batch", "1"]]
    base += ["--activation-checkpointing", "full"]
    page = tmp_path / "page.html"
    arguments = ["--strategy", "node=3,cluster=1", "--tp", "4", "--pp", "2", "--report", page]
    code, out, _ = zeromesh("simulate", *base, *arguments)
    assert code == 0 and "tp=4,pp=2 (1f1b) node=3,cluster=1" in out and "ranks of the pipeline: 0: " in out
    assert (
        "tp, pp: predicted step times of Llama in fp8 under Megatron" in " ".join(out.split())
        and "tp=4,pp=2 (1f1b)" in page.read_text()
    )
    code, out, _ = zeromesh("plan", *base, "--space", "full", "--cp", "1", "--pp", "4", "--emit", "fsdp2")
    assert code == 2


def test_the_answer_says_what_two_blocks_ahead_take(zeromesh: Any) -> None:
    """Where parameters are gathered over two axes, which then work at once."""
    once = ["simulate", *BASE, *["--cluster", "b200-8x-efa", "--global-batch-tokens", "262144"]]
    _, one, _ = zeromesh(*once, "--strategy", "node=3,cluster=3")
    _, two, _ = zeromesh(*once, "--strategy", "node=3,cluster=3;prefetch=2", "--json")
    assert f"(;prefetch=2), the step would take {json.loads(two)['step_s']:.4g} s" in " ".join(one.split())
    for strategy in ("node=3,cluster=1", "node=3,cluster=3;prefetch=2"):
        _, answer, _ = zeromesh(*once, "--strategy", strategy)
        assert "would take" in answer and "ahead" not in answer


def test_kernels_change_the_step_and_the_answer_says_what_compiled_ones_take(zeromesh: Any) -> None:
    once = ["simulate", *SMALL, "--strategy", "zero3", "--activation-checkpointing", "none"]
    _, eager, _ = zeromesh(*once)
    _, compiled, _ = zeromesh(*once, "--kernels", "compiled", "--json")
    assert f"would take {json.loads(compiled)['step_s']:.4g} s" in " ".join(eager.split())
    code, _, error = zeromesh(*once, "--kernels", "inductor")
    assert code == 2 and "--kernels must be one of eager, compiled, liger, megatron; got 'inductor'" in error
    code, _, error = zeromesh(*once, "--products", "fp8")
    assert code == 2 and "name an engine that has it, fsdp" in error
    of_fsdp = [*SMALL, "--cluster", "h100-8x-ndr", "--engine", "fsdp", "--splits", "none", "--no-robust", "--json"]
    steps = [json.loads(zeromesh("plan", *of_fsdp, *more)[1])["best"]["step_s"] for more in ((), ("--products", "fp8"))]
    assert 0.5 < steps[1] / steps[0] < 1


def test_tokens_may_have_a_prefix(zeromesh: Any) -> None:
    once = ["simulate", *SMALL, "--strategy", "zero3", "--json"]
    answers = [zeromesh(*once, "--global-batch-tokens", tokens)[1] for tokens in ("1048576", "1Mi")]
    assert answers[0] == answers[1]
    code, _, error = zeromesh(*once, "--global-batch-tokens", "4.5")
    assert code == 2 and 'expected a whole number, such as "4194304", "4M" or "4Mi"' in " ".join(error.split())
