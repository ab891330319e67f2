"""The example of torchtitan's Trainer, on ranks that are there already: it takes the process group that it finds."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dist.pool import Pool

EXAMPLE = Path(__file__).parents[3] / "examples/torchtitan_llama.py"


def example(steps: int, folder: Path) -> str:
    """Runs the example; returns the output of this rank."""
    spec = importlib.util.spec_from_file_location("torchtitan_llama", EXAMPLE)
    assert spec is not None and spec.loader is not None
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    arguments = [str(EXAMPLE), "--check", "--steps", str(steps), "--folder", str(folder)]
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("ignore")  # torchtitan's, and torch's about its calls
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        module.main()
    return printed.getvalue()


def test_torchtitans_trainer_gives_plain_losses_and_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """The example compares losses and norms itself, to 3e-5 of them, and fails where they differ."""
    pytest.importorskip("torchtitan")
    own = Pool()  # torchtitan changes settings of its process
    try:
        for ranks, steps, compared in ((4, 2, (1, 2)), (2, 3, (3,))):
            printed, *_ = own.run(ranks, example, steps, tmp_path, spoils=True)
            found = [line for line in printed.splitlines() if "plainly" in line]
            assert [int(line.split()[1]) for line in found] == list(compared)
    finally:
        own.remove()
