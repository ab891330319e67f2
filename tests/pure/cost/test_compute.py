"""Seconds of computation, the constants' sources, and that the fitting script finds the shipped constants."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.device import Device, Kernel
from zeromesh.cluster.level import LINK_KINDS
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants, provenance
from zeromesh.errors import InternalError
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.spec import MatmulSpec, Recomputation, UnitKind

CONSTANTS = default_constants()
A100 = ComputeModel(device=preset("a100-8x-hdr").device, constants=CONSTANTS)
EMBEDDING, BLOCK = (
    next(u for u in model_preset("llama-7b").units if u.kind is kind) for kind in (UnitKind.EMBEDDING, UnitKind.BLOCK)
)


def test_every_constant_says_where_it_comes_from():
    entries = {entry.name: entry for entry in provenance()}
    links = {f"link_share.{kind}" for kind in LINK_KINDS if kind != "auto"}
    assert set(entries) == links | {name for name in CONSTANTS.__slots__ if name != "link_share"}
    assert {entry.how for entry in entries.values()} <= {"fitted", "cited", "assumed"}
    assert all(len(entry.source) > 10 for entry in entries.values())
    # Constants out of range are refused.
    with pytest.raises(InternalError, match="out of range: launch_s"):
        replace(CONSTANTS, launch_s=-1.0)
    with pytest.raises(InternalError, match="no link_share for"):
        replace(CONSTANTS, link_share={})


def test_large_products_reach_the_measured_rate():
    matmul = MatmulSpec(name="m", inner=10**6, outer=10**6)
    rate = matmul.forward_flops * 10**6 / A100.matmul(matmul, 10**6)
    assert rate == pytest.approx(271.2e12 * CONSTANTS.matmul_share, rel=1e-3)
    assert A100.matrix_flops == 271.2e12
    v100 = ComputeModel(device=preset("dgx2-v100-400g").device, constants=CONSTANTS)
    assert v100.matrix_flops == pytest.approx(125e12 * CONSTANTS.achievable_share)


def test_recomputation_repeats_what_it_says():
    """A block runs below its peak, and not absurdly so; frozen weights save their gradient."""
    unit = {r: A100.unit(BLOCK, tokens=4096, seq_len=4096, recomputation=r) for r in Recomputation}
    assert unit[Recomputation.NONE].recompute == 0
    assert unit[Recomputation.FULL].recompute == unit[Recomputation.FULL].forward
    assert 0 < unit[Recomputation.SELECTIVE].recompute < unit[Recomputation.FULL].recompute
    assert len({u.backward for u in unit.values()}) == 1
    assert 0.5 * 312e12 < BLOCK.forward_flops(4096) * 4096 / unit[Recomputation.NONE].forward < 271.2e12
    frozen = replace(BLOCK, matmuls=tuple(replace(m, trainable_share=0.0) for m in BLOCK.matmuls))
    both = [A100.unit(u, tokens=4096, seq_len=512, recomputation=Recomputation.NONE).backward for u in (BLOCK, frozen)]
    assert 0.5 * both[0] < both[1] < 0.7 * both[0]


def test_memory_is_waited_for_as_long_as_without_it_nothing_is():
    """Seconds if memory were endless, or if nothing but memory took time."""
    for recomputation in Recomputation:
        seconds = A100.unit(BLOCK, tokens=4096, seq_len=4096, recomputation=recomputation)
        endless = replace(A100, device=replace(A100.device, memory_bytes_per_s=1e30))
        left = endless.unit(BLOCK, tokens=4096, seq_len=4096, recomputation=recomputation)
        assert seconds.total * (1 - seconds.moving) == pytest.approx(left.total)
        assert 0.1 < seconds.moving < 0.3 and left.moving < 1e-9
    assert A100.unit(EMBEDDING, tokens=4096, seq_len=4096, recomputation=Recomputation.NONE).moving == 1.0


@pytest.mark.parametrize("window", [None, 8192, 4096, 1024, 1])
def test_attention_computes_the_scores_that_a_token_sees(window):
    """Token t sees the last `window` of t + 1 tokens: counted one by one, and in the share of an unmasked kernel."""
    seq_len = 4096
    assert BLOCK.attention is not None
    block = replace(BLOCK, attention=replace(BLOCK.attention, window=window))
    bare = replace(block, attention=None)
    seen = sum(min(t + 1, window or seq_len) for t in range(seq_len)) / seq_len
    attention = block.attention
    kwargs = {"tokens": seq_len, "seq_len": seq_len, "recomputation": Recomputation.NONE}
    with_it, without = (A100.unit(unit, **kwargs) for unit in (block, bare))
    flops = 4 * attention.heads * attention.head_dim * seen * seq_len
    rate = A100.matrix_flops * CONSTANTS.attention_forward_share
    # Each token has a whole score with itself, where the formula has half of one.
    slack = 0.5 / seen
    assert with_it.forward - without.forward == pytest.approx(flops / rate, rel=1.01 * slack)
    backward = 2.5 * flops / (A100.matrix_flops * CONSTANTS.attention_backward_share)
    assert with_it.backward - without.backward == pytest.approx(backward, rel=1.01 * slack)


def test_a_device_without_memory_bandwidth_has_the_usual_one():
    device = replace(A100.device, memory_bytes_per_s=None)
    usual = 312e12 / CONSTANTS.flops_per_byte * CONSTANTS.memory_share
    assert ComputeModel(device=device, constants=CONSTANTS).memory_bytes_per_s == pytest.approx(usual)
    assert 1e12 < usual < 2.5e12
    assert A100.memory(2039e9) == pytest.approx(1 / CONSTANTS.memory_share)
    assert A100.optimizer(1e9) == pytest.approx(30e9 / 2039e9 / CONSTANTS.memory_share)
    # Processors have no driver and no buffers of communicators.
    one, two = (CONSTANTS.overhead_bytes(messages=False, communicators=n, dynamic_bytes=1e9) for n in (1, 2))
    assert two - one == CONSTANTS.communicator_bytes
    allocator_bytes = pytest.approx(1e9 * CONSTANTS.allocator_share)
    assert one - CONSTANTS.context_bytes - CONSTANTS.communicator_bytes == allocator_bytes
    assert CONSTANTS.overhead_bytes(messages=True, communicators=4, dynamic_bytes=1e9) == allocator_bytes


def test_what_was_measured_at_the_models_shapes_is_believed():
    """A block's products at measured shapes take the measured times, forward and backward, in the dtype measured."""
    device = Device(
        name="cpu",
        memory_bytes=1e12,
        peak_flops={"fp32": 1e11, "bf16": 1e11},
        kernels=(
            Kernel(kind="product", dtype="bf16", shape=(128, 256, 512), forward=1e9, backward=5e8),
            Kernel(kind="product", dtype="bf16", shape=(128, 4096, 4096), forward=1e13, backward=1e13),
            Kernel(kind="attention", dtype="bf16", shape=(64, 32), forward=2e9, backward=1e9),
            Kernel(kind="optimizer", dtype="bf16", forward=3e9, backward=3e9),
            Kernel(kind="gradients", dtype="bf16", forward=3e9, backward=1e9),
        ),
    )
    model = ComputeModel(device=device, constants=default_constants(), dtype="bf16")
    assert model.product(128, 256, 512, flops=1e9) == pytest.approx(1.0)
    assert model.product(128, 256, 512, flops=1e9, backward=True) == pytest.approx(2.0)
    assert model.attention(2e9, shape=(64, 32)) == pytest.approx(1.0)
    assert model.optimizer(1e8) == pytest.approx(1e8 * default_constants().optimizer_bytes / 3e9)
    assert [model.gradients(3e9, added=added) for added in (False, True)] == pytest.approx([1.0, 3.0])
    other = ComputeModel(device=device, constants=default_constants(), dtype="fp32")
    assert other.product(128, 256, 512, flops=1e9) < 1.0  # nothing measured in it


SCRIPT = Path(__file__).parents[3] / "tools" / "fit_costs.py"


@pytest.fixture(scope="module")
def fit():
    spec = importlib.util.spec_from_file_location("fit_costs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_holds_what_the_script_finds(fit):
    shipped = {entry.name: (entry.value, entry.how, entry.source) for entry in provenance()}
    latencies, inside_s, between_s = fit.tuning()
    found = {f"link_share.{kind}": entry for kind, entry in fit.link_shares().items()} | latencies | fit.cited()
    for name, (value, how, source) in found.items():
        assert shipped[name] == (pytest.approx(value), how, source), name
    assert (inside_s, between_s) == (pytest.approx(3.4e-6, rel=0.01), pytest.approx(14e-6, rel=0.01))


def test_the_compute_constants_fit_their_rows(fit):
    """Shipped constants against the rows they were fitted on: a half of them within 2 %, all but one within 12 %."""
    samples = [*fit._foundry_samples(), *fit._galvatron_samples()]
    errors = sorted(abs(predict(default_constants()) / seconds - 1) for seconds, predict in samples)
    assert errors[len(errors) // 2] < 0.02
    assert errors[-2] < 0.12
    found = fit.nelder_mead(lambda p: (p[0] - 3) ** 2 + abs(p[1] - 0.5), [1.0, 1.0])
    assert found == pytest.approx([3, 0.5], abs=1e-4)
