"""The Triton kernels in Triton's interpreter, against the torch path: the same messages, byte for byte.

Run by `test_kernels` in a process of its own: whether Triton interprets is settled when it is first imported.
"""

from __future__ import annotations

import math

import pytest
import torch

from zeromesh.comm.kernels import TritonQuantiser
from zeromesh.comm.quantise import QuantFormat, Quantiser

CPU = torch.device("cpu")
FORMS = [
    QuantFormat(bits=bits, block=block, scale_dtype=scale_dtype)
    for bits, block, scale_dtype in [
        (8, 128, torch.float32),
        (4, 128, torch.float32),
        (8, 24, torch.bfloat16),
        (4, 24, torch.float32),
    ]
]


def random(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))


def room(form: QuantFormat, numel: int) -> torch.Tensor:
    return torch.zeros(form.message_bytes(numel), dtype=torch.uint8)


def torch_quantiser(form: QuantFormat, numel: int) -> Quantiser:
    return Quantiser(form, form.blocks(numel) * form.block, CPU)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("numel", [1, 300, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_and_values_equal_those_of_torch(form, numel, dtype):
    source = random(numel, 1).to(dtype)
    expected, got = room(form, numel), room(form, numel)
    torch_quantiser(form, numel).quantise(source, expected)
    TritonQuantiser(form).quantise(source, got)
    assert torch.equal(got, expected)
    target, total = torch.full_like(source, math.nan), torch.ones(numel)
    TritonQuantiser(form).dequantise(got, target)
    TritonQuantiser(form).dequantise_add(got, total)
    wanted, wanted_total = torch.empty_like(source), torch.ones(numel)
    torch_quantiser(form, numel).dequantise(expected, wanted)
    torch_quantiser(form, numel).dequantise_add(expected, wanted_total)
    if dtype == torch.float32:
        assert torch.equal(target, wanted)
    else:  # the interpreter cuts bf16 off where devices round
        torch.testing.assert_close(target, wanted, rtol=2**-7, atol=0)
    torch.testing.assert_close(total, wanted_total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_error_feedback_equals_that_of_torch(form):
    source, lost = random(500, 2), random(500, 3) / 50
    expected, got, residual = room(form, 500), room(form, 500), lost.clone()
    torch_quantiser(form, 500).quantise(source, expected, lost)
    TritonQuantiser(form).quantise(source, got, residual)
    assert torch.equal(got, expected)
    torch.testing.assert_close(residual, lost, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reduce_requantise_is_the_three_steps_in_one(form):
    numel, ranks, own_index = 400, 3, 1
    chunks = [random(numel, 10 + rank) for rank in range(ranks)]
    messages = torch.zeros(ranks, form.message_bytes(numel), dtype=torch.uint8)
    quantiser, total = torch_quantiser(form, numel), torch.zeros(numel)
    for rank, chunk in enumerate(chunks):
        if rank == own_index:
            total += chunk
        else:
            quantiser.quantise(chunk, messages[rank])
            quantiser.dequantise_add(messages[rank], total)
    expected, got = room(form, numel), room(form, numel)
    quantiser.quantise(total * 0.5, expected)
    TritonQuantiser(form).reduce_requantise(messages, chunks[own_index], own_index, got, factor=0.5)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(bits):
    form = QuantFormat(bits=bits, block=128, stochastic=True)
    quantiser = TritonQuantiser(form, torch.Generator().manual_seed(0))
    source = random(128, 4).repeat(64)
    message, target = room(form, source.numel()), torch.zeros_like(source)
    quantiser.quantise(source, message)
    quantiser.dequantise(message, target)
    step = source.abs().max() / form.largest
    assert (target - source).abs().max() <= step * (1 + 1e-5)
    # 64 samples of an element: 5 sigma of their mean, at half a step of standard deviation.
    mean = target.view(64, 128).mean(0)
    assert (mean - source[:128]).abs().max() <= 5 * 0.5 * step / 8
    again = room(form, source.numel())
    quantiser.quantise(source, again)
    assert not torch.equal(again, message)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, inside the interpreter
def test_a_non_finite_element_makes_its_block_non_finite(value):
    form = QuantFormat(bits=8, block=16)
    source = torch.ones(32)
    source[3] = value
    message, target = room(form, 32), torch.zeros(32)
    TritonQuantiser(form).quantise(source, message)
    TritonQuantiser(form).dequantise(message, target)
    assert not target[:16].isfinite().all()
    assert target[16:].isfinite().all()
