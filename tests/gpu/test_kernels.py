"""The Triton kernels, compiled, on a device: messages of the torch path, byte for byte, at sizes that fill it."""

from __future__ import annotations

import math

import pytest
import torch

from zeromesh.comm.quantise import QuantFormat, Quantiser
from zeromesh.comm.summing import Target

pytest.importorskip("triton")

from zeromesh.comm.kernels import TritonQuantiser  # imports triton

FORMS = [
    QuantFormat(bits=bits, block=block, scale_dtype=scale_dtype)
    for bits, block, scale_dtype in [
        (8, 128, torch.float32),
        (4, 128, torch.float32),
        (8, 24, torch.bfloat16),
        (4, 24, torch.float32),
        (4, 256, torch.bfloat16),
    ]
]
NUMELS = [1, 300, 1500, 3_000_001]
DEVICE = torch.device("cuda")


def random(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))


def room(form: QuantFormat, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=device)


def on_host(form: QuantFormat, numel: int) -> Quantiser:
    return Quantiser(form, form.blocks(numel) * form.block, torch.device("cpu"))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_and_values_equal_those_of_the_host(form, numel, dtype):
    source = random(numel, 1).clamp(-6e4, 6e4).to(dtype)
    expected, got = room(form, numel), room(form, numel, DEVICE)
    host, device = on_host(form, numel), TritonQuantiser(form)
    host.quantise(source, expected)
    device.quantise(source.to(DEVICE), got)
    assert torch.equal(got.cpu(), expected)
    target, wanted = torch.full_like(source, math.nan, device=DEVICE), torch.empty_like(source)
    device.dequantise(got, target)
    host.dequantise(expected, wanted)
    assert torch.equal(target.cpu(), wanted)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_error_feedback_equals_that_of_the_host(form):
    numel = 100_001
    source, lost = random(numel, 2), random(numel, 3) / 50
    expected, got, residual = room(form, numel), room(form, numel, DEVICE), lost.to(DEVICE, copy=True)
    on_host(form, numel).quantise(source, expected, lost)
    TritonQuantiser(form).quantise(source.to(DEVICE), got, residual)
    assert torch.equal(got.cpu(), expected)
    torch.testing.assert_close(residual.cpu(), lost, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("own_index", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "scale", "accumulate"),
    [(torch.float32, 1 / 3, False), (torch.float32, 1 / 3, True), (torch.bfloat16, 1.0, True)],
)
def test_sums_equal_those_of_the_host(form, own_index, dtype, scale, accumulate):
    numel, ranks, before = 100_003, 4, 100
    messages = torch.zeros(ranks, form.message_bytes(numel) + 64, dtype=torch.uint8)
    for rank in range(ranks):
        on_host(form, numel).quantise(random(numel, 10 + rank), messages[rank])
    messages[own_index] = 255  # nan, were it read
    own, start = random(numel, 10 + own_index).to(dtype), random(before + numel + 1, 20).to(dtype)
    expected, got = start.clone(), start.to(DEVICE)
    part = slice(before, before + numel)
    on_host(form, numel).reduce(
        messages, own, own_index, Target(out=expected, scale=scale, accumulate=accumulate), part
    )
    TritonQuantiser(form).reduce(
        messages.to(DEVICE), own.to(DEVICE), own_index, Target(out=got, scale=scale, accumulate=accumulate), part
    )
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_may_take_the_place_of_the_own_piece(accumulate):
    form, numel = QuantFormat(bits=8), 100_003
    messages = torch.zeros(2, form.message_bytes(numel), dtype=torch.uint8)
    on_host(form, numel).quantise(random(numel, 1), messages[0])
    expected, got = random(numel, 2), random(numel, 2).to(DEVICE)
    for quantiser, received, out in (
        (on_host(form, numel), messages, expected),
        (TritonQuantiser(form), messages.to(DEVICE), got),
    ):
        quantiser.reduce(received, out, 1, Target(out=out, scale=0.5, accumulate=accumulate), slice(0, numel))
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(bits):
    form = QuantFormat(bits=bits, block=128, stochastic=True)
    quantiser = TritonQuantiser(form, torch.Generator().manual_seed(0))
    source = random(128, 4).to(DEVICE).repeat(4096)
    message, target = room(form, source.numel(), DEVICE), torch.zeros_like(source)
    quantiser.quantise(source, message)
    quantiser.dequantise(message, target)
    step = source.abs().max() / form.largest
    assert (target - source).abs().max() <= step * (1 + 1e-5)
    # 4096 samples of an element: 6 sigma of their mean, at half a step of standard deviation.
    assert (target.view(4096, 128).mean(0) - source[:128]).abs().max() <= 6 * 0.5 * step / 64


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_element_makes_its_block_non_finite(value):
    form = QuantFormat(bits=8, block=16)
    source = torch.ones(32, device=DEVICE)
    source[3] = value
    message, target = room(form, 32, DEVICE), torch.zeros(32, device=DEVICE)
    TritonQuantiser(form).quantise(source, message)
    TritonQuantiser(form).dequantise(message, target)
    assert not target[:16].isfinite().all()
    assert target[16:].isfinite().all()
