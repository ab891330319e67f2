"""Seconds and bytes of kernels, against figures worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.forks import run_python
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.errors import InputError
from zeromesh.rehearsal.hardware import Hardware, moved_bytes
from zeromesh.simdev import build

aten = torch.ops.aten
ROWS, INNER, OUTER = 4096, 1024, 2048


def meta(*sizes, dtype=torch.bfloat16):
    return torch.empty(*sizes, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(find_cluster("a800-8x-hdr").take(64))


def test_seconds_of_products_and_attention(hardware: Hardware) -> None:
    a, b, bias = meta(ROWS, INNER), meta(INNER, OUTER), meta(OUTER)
    flops = 2 * ROWS * INNER * OUTER
    compute = hardware.kernels.compute
    forward = compute.product(ROWS, INNER, OUTER, flops=flops)
    backward = compute.product(ROWS, INNER, OUTER, flops=flops, backward=True)
    seconds = hardware.kernels.seconds
    assert seconds(aten.mm.default, (a, b), a @ b, backward=False) == forward
    assert seconds(aten.mm.default, (a, b), a @ b, backward=True) == backward > forward
    assert seconds(aten.addmm.default, (bias, a, b, 1, 1), a @ b, backward=False) == forward
    wide = (a.float(), b.float())
    slower = seconds(aten.mm.default, wide, wide[0] @ wide[1], backward=False)
    fp32 = hardware.cluster.device.compute_dtype("fp32")
    assert (slower > forward) == (fp32 == "fp32")  # a device without a rate for it is taken at its own
    # A causal kernel of attention computes half of the scores.
    q = meta(1, 8, 512, 64)
    flash = aten._scaled_dot_product_flash_attention.default
    whole, half = (
        hardware.kernels.seconds(flash, (q, q, q, 0.0, causal, False, None), (q,), backward=False)
        for causal in (False, True)
    )
    assert whole == 2 * half == hardware.kernels.compute.attention(4 * 8 * 512 * 512 * 64)


def test_seconds_of_other_kernels_and_collectives(hardware: Hardware) -> None:
    x, size = meta(ROWS, INNER), ROWS * INNER * 2
    table, words = meta(32000, INNER), meta(ROWS, dtype=torch.int64)
    assert moved_bytes(aten.add.Tensor, (x, x, 1), meta(ROWS, INNER)) == 3 * size
    assert moved_bytes(aten.add_.Tensor, (x, x, 1), x) == 3 * size
    assert moved_bytes(aten.fill_.Scalar, (x, 0), x) == size
    assert moved_bytes(aten.add.Tensor, (x, meta(1, INNER).expand(ROWS, INNER), 1), x) == 2 * size + INNER * 2
    assert moved_bytes(aten.embedding.default, (table, words, -1, False, False), meta(ROWS, INNER)) == 2 * size
    assert moved_bytes(None, (x, x), None) == 2 * size  # a copy
    added = hardware.kernels.seconds(aten.add.Tensor, (x, x, 1), x, backward=False)
    assert added == hardware.kernels.compute.memory(3 * size)
    # Collectives take as long as in plans.
    from zeromesh.strategy import Layout

    node, cluster = Layout.of("node=3,cluster=1", hardware.cluster.axes).axes
    planned = hardware.transfers.joint((node,), "all_gather", 1 << 20, "bf16")
    assert hardware.collective((node,), "all_gather", 2 << 20) == planned
    assert hardware.collective((cluster,), "all_gather", 2 << 20).seconds > planned.seconds


# ---- The simulated device is built for one torch, and says so where another is installed


def test_another_torch_builds_another_device_or_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build._directory()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build._directory() != here and build._directory().parent == here.parent
    # Also where an extension's build is at fault: its words follow.
    calls: list[str] = []

    def fails(**options: object) -> None:
        calls.append(str(options["name"]))
        raise RuntimeError("Error building extension: no member named 'data_ptr'")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(cpp_extension, "load", fails)
    build.native.cache_clear()
    try:
        with pytest.raises(InputError, match=r"not compile with torch 2\.99\.0: use a torch that docs.*data_ptr"):
            build.native()
    finally:
        build.native.cache_clear()
    assert len(calls) == 1 and not list(tmp_path.rglob(build.DONE))


# ---- Where the virtual device cannot be compiled, the command names the missing compiler, once


CONFIG = """
strategy = "node=3"
mesh = { node = 8 }
run = { directory = "out", steps = 1 }
model = { config = { model_type = "tiny" } }
data = { files = ["*.txt"], seq_len = 8, holdout = 0 }
batch = { global_sequences = 8, micro = 1 }
optimizer = { lr = 1e-2 }
"""


def test_without_a_compiler_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "some.txt").write_text("a text to learn from " * 8)
    fake = Path(__file__).parents[1] / "train" / "fake"
    around = {
        "PYTHONPATH": f"{fake}:{os.environ.get('PYTHONPATH', '')}",
        "CXX": "no-such-compiler",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "nothing-built"),
    }
    ended = run_python("-m", "zeromesh.cli", "rehearse", tmp_path / "run.toml", env=os.environ | around)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("zeromesh: ") == 1 and "Traceback" not in ended.stderr
    assert "compiled on first use, which needs a C++ compiler" in ended.stderr
    assert "apt install g++" in ended.stderr
