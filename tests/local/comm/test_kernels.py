"""The Triton kernels where Triton is installed: in its interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeromesh.comm import quantised
from zeromesh.comm.quantised import _Wire
from zeromesh.comm.transport import Messages, Native
from zeromesh.wires import QuantFormat, blocks

ROOM_BYTES = 64 << 20
INSTALLED = importlib.util.find_spec("triton") is not None
TYPES = {
    "source": "*bf16", "own": "*bf16", "target": "*fp32", "out": "*fp32", "residual": "*fp32", "codes": "*i8",
    "scales": "*fp32", "sum_codes": "*i8", "sum_scales": "*fp32", "factor": "fp32",
}  # fmt: skip
"""Of the kernels' arguments, as Triton spells them; the others are `i32`."""


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_compile_for_a_gpu_and_round_as_torch_does(bits):
    """No approximate division, no product fused into a sum, and nothing spilt to memory."""
    from zeromesh.wires.blocks import kernels

    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    quantiser = kernels.TritonQuantiser(QuantFormat(bits=bits, stochastic=True), torch.Generator())
    for kernel, options in (
        (kernels._quantise_kernel, {**quantiser._rounding, "FEEDBACK": True}),
        (kernels._dequantise_kernel, {}),
        (kernels._reduce_kernel, {"TERMS": 4, "ACCUMULATE": True}),
        (kernels._requantise_kernel, {**quantiser._rounding, "TERMS": 4, "FEEDBACK": True}),
    ):
        fixed = quantiser._shape | options
        types = {name: "constexpr" if name in fixed else TYPES.get(name, "i32") for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        source = compiler.ASTSource(fn=kernel, signature=types, constexprs=values)
        assembly = compiler.compile(source, target=target, options=kernels.LAUNCH).asm
        assert len(assembly["cubin"]) > 1000
        found = [word for word in ("div.full", "fma.rn", "st.local") if word in assembly["ptx"]]
        assert "st.global" in assembly["ptx"] and not found, (kernel, found)


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_a_device_s_messages_fill_the_workspace(monkeypatch):
    for module in (quantised, blocks):
        monkeypatch.setattr(module, "has_triton", lambda device_type: device_type == "meta")
    form = QuantFormat(bits=8)
    workspace = torch.empty(ROOM_BYTES, dtype=torch.uint8, device="meta")
    for size in (2, 8, 64):
        wire = _Wire.cut(form, SimpleNamespace(transport=Native("cuda"), size=size), workspace, None, directions=2)
        taken = sum(room.numel() for room in (*wire.incoming, *wire.outgoing))
        assert 0.98 * ROOM_BYTES < taken <= ROOM_BYTES
        assert wire.window == 1 and wire.numel > Messages.longest
        other = SimpleNamespace(transport=Messages("cpu"), size=size)
        kept, on_host = (
            _Wire.cut(form, other, room, None, directions=2)
            for room in (workspace, torch.empty_like(workspace, device="cpu"))
        )
        assert kept.numel == on_host.numel <= Messages.longest  # what was brought to the host is kept as it was there
