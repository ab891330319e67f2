"""The emitted DeepSpeed configurations are run, where DeepSpeed is installed, against training without it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def test_engines_train_as_without_deepspeed(tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    program = Path(__file__).with_name("deepspeed_ranks.py")
    done = subprocess.run([sys.executable, program, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(out.read_text())
    expected = {"fp32": results.pop("plain float32"), "bf16": results.pop("plain bfloat16")}
    assert expected["fp32"][-1] < 0.9 * expected["fp32"][0]
    assert len(results) == 13
    for name, result in results.items():
        # bf16: roundings of bf16 gradients, which Adam's first steps turn into whole steps of their sign
        fp32 = "bf16" not in name
        tolerance = 1e-5 if fp32 else 1e-2
        assert result["losses"] == pytest.approx(expected["fp32" if fp32 else "bf16"], abs=tolerance), name
        assert result["shards"] == (4 if "node=3" in name else 0), name
        assert result["secondary_shards"] == (2 if "3k" in name else 0), name

    for strategy in ("node=1,cluster=1", "node=2,cluster=2", "node=3,cluster=3"):  # the wire's dtype arrives
        wires = [results[f"{strategy} {label}"]["losses"] for label in ("bf16", "bf16, reduced in fp32")]
        assert wires[0] != wires[1], strategy
