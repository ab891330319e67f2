"""A measured run sets the device's rate: `--like`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeromesh.cli.app import main
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.errors import InputError
from zeromesh.model.load import load_model
from zeromesh.model.spec import Recomputation
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.like import MeasuredStep, calibrate, read_run
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Strategy

TOKENS = 2**20
BASE = (
    *("--model", "llama-7b", "--cluster", "a800-8x-hdr", "--world", "64", "--seq-len", "4096"),
    *("--global-batch-tokens", str(TOKENS), "--micro-batch", "2", "--json"),
)


@pytest.mark.parametrize("factor", [0.4, 1.3])
def test_a_device_of_other_rates_is_found_again(factor):
    cluster = find_cluster("a800-8x-hdr").take(64)
    work = Workload(seq_len=4096, global_batch_tokens=TOKENS, micro_batch=2, recomputation=Recomputation.NONE)
    model, strategy = load_model("llama-7b", seq_len=4096), Strategy.parse("node=3,cluster=1", ["node", "cluster"])

    def predict(on):
        return simulate_choices(model, on, work, strategy)[0].simulation

    device = cluster.device
    rates = {dtype: rate * factor for dtype, rate in device.achievable_flops}
    other = replace(
        device,
        peak_flops={dtype: max(rate, rates.get(dtype, 0)) for dtype, rate in device.peak_flops},
        achievable_flops=rates,
        memory_bytes_per_s=device.memory_bytes_per_s * factor,
    )
    measured = MeasuredStep(step_s=predict(replace(cluster, device=other)).step_s, source="another")
    found = calibrate(cluster, measured, str(strategy), predict)
    assert found.factor == pytest.approx(factor, rel=3e-3)
    assert predict(found.cluster).step_s == pytest.approx(measured.step_s, rel=2e-3)
    assert found.predicted_s == predict(cluster).step_s
    assert found.exposed_s == pytest.approx(predict(found.cluster).exposed_comm_s)
    assert f"{found.exposed_s / measured.step_s:.1%} of that step is waiting for the network" in found.describe()


def test_what_a_run_has_written_is_read(tmp_path: Path):
    metrics = [{"step": i + 1, "tokens": 1000, "step_s": 9.0 if i == 0 else 2.0 + i % 2} for i in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    assert read_run(str(tmp_path), 1000).step_s == 2.5  # the first, which warms up, is left out
    with pytest.raises(InputError, match=r"a step of .* has 1,000 tokens and --global-batch-tokens says 4,000"):
        read_run(str(tmp_path), 4000)
    answers = [line | {"tokens": 30, "positions": 1000} for line in metrics]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    assert read_run(str(tmp_path / "answers.jsonl"), 1000).step_s == 2.5
    with pytest.raises(InputError, match="has 1,000 tokens and"):
        read_run(str(tmp_path / "answers.jsonl"), 1100)
    state = {"log_history": [{"loss": 1.0}, {"train_steps_per_second": 0.25}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(str(tmp_path / "trainer_state.json"), 1000).step_s == 4.0
    state["log_history"][1]["train_runtime"] = 41.0
    (tmp_path / "trainer_state.json").write_text(json.dumps(state | {"max_steps": 10}))
    assert read_run(str(tmp_path / "trainer_state.json"), 1000).step_s == 4.1  # and not a rounded one
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"loss": 1.0}]}')
    for name, text in (("odd", '{"log_history": [3, {"train_steps_per_second": "fast"}]}'), ("none", "[1]")):
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(InputError, match=f"{name}.json has no train_steps_per_second"):
            read_run(str(tmp_path / f"{name}.json"), 1000)
    (tmp_path / "endless.jsonl").write_text('{"step_s": 1.0, "tokens": 1e400}\n')
    assert read_run("500 tokens/s", 1000).step_s == 2.0
    for run, message in (
        (tmp_path / "trainer_state.json", "has no train_steps_per_second"),
        (tmp_path / "missing.jsonl", "must be the file or the directory of a run.*missing.jsonl"),
        (tmp_path / "endless.jsonl", "line 1, is no step"),
        ("-5", "must be positive"),
    ):
        with pytest.raises(InputError, match=message):
            read_run(str(run), 1000)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match="line 1, is no step"):
        read_run(str(tmp_path), 1000)


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--like-strategy", "node=3,cluster=1"),
        ("simulate", "--strategy", "node=3,cluster=1"),
    ],
)
def test_the_command_plans_with_the_measured_step(command, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["zeromesh", *command, *BASE, "--like", "120000 tokens/s"])
    with pytest.raises(SystemExit, match="0"):
        main()
    found = json.loads(capsys.readouterr().out)
    like = found["like"]
    best = found.get("best", found)
    assert like["measured_step_s"] == pytest.approx(TOKENS / 120000)
    assert like["off"] == pytest.approx(like["predicted_step_s"] / like["measured_step_s"] - 1) and like["off"] < -0.4
    # The fastest of a slower device may be another layout, and is never slower than the run's.
    assert best["step_s"] <= like["measured_step_s"] * 1.002
    if command[0] == "simulate":
        assert best["step_s"] == pytest.approx(like["measured_step_s"], rel=2e-3)
        monkeypatch.setattr("sys.argv", ["zeromesh", *command, *BASE, "--like", "1e12"])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "no rate of the device explains that" in capsys.readouterr().err
