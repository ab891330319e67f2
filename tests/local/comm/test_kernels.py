"""The Triton kernels where Triton is installed: in its interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromesh.comm import quantised
from zeromesh.comm.messages import Messages
from zeromesh.comm.quantised import _Wire
from zeromesh.comm.transport import Native
from zeromesh.wires import blocks
from zeromesh.wires.blocks import QuantFormat

ROOM_BYTES = 64 << 20
INSTALLED = importlib.util.find_spec("triton") is not None
TYPES = {
    "codes": "*i8",
    "scales": "*fp32",
    "sum_codes": "*i8",
    "sum_scales": "*fp32",
    "factor": "fp32",
} | dict.fromkeys(("source", "own", "target", "out", "residual"), "*bf16")
"""Types of the kernels' arguments, as Triton spells them; the others are `i64`."""
SINGLE = ("skipped", "own_index", "blocks", "seed")
"""Arguments of any value. The others are addresses, strides and lengths of whole granules."""
THREADS = 128
"""Threads of a program: Triton's default."""


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def compiled(kernel: Any, fixed: Mapping[str, Any]) -> Any:
    """A kernel for sm_90, with these constants."""
    from zeromesh.wires.blocks import kernels

    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else TYPES.get(name, "i64") for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    even = [name for name in names if name not in (*fixed, *SINGLE, "factor")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=values, attrs=attributes)
    return compiler.compile(source, target=target, options=kernels.LAUNCH).asm


def instructions(cubin: bytes, file: Path) -> list[str]:
    """The machine's instructions, without subroutines behind a CALL (the slow way of a division)."""
    file.write_bytes(cubin)
    triton = Path(importlib.util.find_spec("triton").origin).parent  # type: ignore[union-attr, arg-type]  # INSTALLED
    disassembler = triton / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, "-c", file], capture_output=True, text=True, check=True).stdout
    main = re.split(r"^\s*\.type\s+\$|^\$", text, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", main)
    return [name for name in found if name != "NOP"]


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "bits", "options", "most", "widest"),
    [
        ("quantise", 8, {"STOCHASTIC": False, "FEEDBACK": False}, 16, "LDG.E.128"),
        ("dequantise", 8, {}, 7, "STG.E.128"),
        ("reduce", 8, {"TERMS": 2, "ACCUMULATE": False}, 17, "LDG.E.128"),
        ("requantise", 8, {"STOCHASTIC": True, "TERMS": 2, "FEEDBACK": False}, 43, "LDG.E.128"),
        ("quantise", 4, {"STOCHASTIC": True, "FEEDBACK": False}, 30, "LDG.E.128"),
        ("requantise", 4, {"STOCHASTIC": True, "TERMS": 4, "FEEDBACK": True}, 49, "LDG.E.128"),
    ],
)
def test_machine_code(name, bits, options, most, widest, tmp_path):
    """Few instructions an element and wide accesses; no approximate division, no product fused into a sum, and nothing
    spilt to memory, so that codes are those of torch's operations."""
    from zeromesh.wires.blocks import kernels

    quantiser = kernels.TritonQuantiser(QuantFormat(bits=bits, stochastic=True), torch.Generator())
    rounding = quantiser._rounding if "STOCHASTIC" in options else {}
    made = compiled(getattr(kernels, f"_{name}_kernel"), quantiser._shape | rounding | options)
    assert not [word for word in ("div.full", "fma.rn", "st.local") if word in made["ptx"]]
    found = instructions(made["cubin"], tmp_path / "kernel.cubin")
    assert widest in found and len(found) * THREADS <= most * kernels.ROWS * quantiser.form.block


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
        assert kept.numel == on_host.numel <= Messages.longest  # messages are kept as on the host
