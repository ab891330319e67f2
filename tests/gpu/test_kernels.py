"""The Triton kernels, compiled, on a device: messages of the torch path, byte for byte, at sizes that fill it."""

from __future__ import annotations

import math

import pytest
import torch

from zeromesh.comm.quantise import QuantFormat, Quantiser

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
    target, total = torch.full_like(source, math.nan, device=DEVICE), torch.ones(numel, device=DEVICE)
    device.dequantise(got, target)
    device.dequantise_add(got, total)
    wanted, wanted_total = torch.empty_like(source), torch.ones(numel)
    host.dequantise(expected, wanted)
    host.dequantise_add(expected, wanted_total)
    assert torch.equal(target.cpu(), wanted)
    assert torch.equal(total.cpu(), wanted_total)


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
def test_reduce_requantise_is_the_three_steps_in_one(form, own_index):
    numel, ranks = 100_003, 4
    chunks = [random(numel, 10 + rank) for rank in range(ranks)]
    messages = torch.zeros(ranks, form.message_bytes(numel), dtype=torch.uint8)
    host, total = on_host(form, numel), torch.zeros(numel)
    for rank, chunk in enumerate(chunks):
        if rank == own_index:
            total += chunk
        else:
            host.quantise(chunk, messages[rank])
            host.dequantise_add(messages[rank], total)
    expected, got = room(form, numel), room(form, numel, DEVICE)
    host.quantise(total * 0.25, expected)
    TritonQuantiser(form).reduce_requantise(
        messages.to(DEVICE), chunks[own_index].to(DEVICE), own_index, got, factor=0.25
    )
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
