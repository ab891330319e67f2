"""The example of torchtitan's Trainer, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples/torchtitan_llama.py"


def test_torchtitans_trainer_gives_plain_losses_and_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """The example compares losses and norms itself, to 3e-5 of them, and fails where they differ."""
    pytest.importorskip("torchtitan")
    for ranks, steps, compared in ((4, 2, (1, 2)), (2, 3, (3,))):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLE)]
        done = subprocess.run(
            [sys.executable, *command, "--check", "--steps", str(steps), "--folder", str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = [line for line in done.stdout.splitlines() if "plainly" in line]
        assert [int(line.split()[1]) for line in found] == list(compared)
