"""The Triton kernels in Triton's interpreter, against the torch path: the same messages, byte for byte.

Run by `test_kernels` in a process of its own: whether Triton interprets is settled when it is first imported.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from zeromesh.comm.collectives import uneven_chunks
from zeromesh.comm.kernels import TritonQuantiser
from zeromesh.comm.quantise import QuantFormat, Quantiser
from zeromesh.comm.quantised import _Wire
from zeromesh.comm.summing import Target

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
    target, wanted = torch.full_like(source, math.nan), torch.empty_like(source)
    TritonQuantiser(form).dequantise(got, target)
    torch_quantiser(form, numel).dequantise(expected, wanted)
    if dtype == torch.float32:
        assert torch.equal(target, wanted)
    else:  # the interpreter cuts bf16 off where devices round
        torch.testing.assert_close(target, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_error_feedback_equals_that_of_torch(form):
    source, lost = random(500, 2), random(500, 3) / 50
    expected, got, residual = room(form, 500), room(form, 500), lost.clone()
    torch_quantiser(form, 500).quantise(source, expected, lost)
    TritonQuantiser(form).quantise(source, got, residual)
    assert torch.equal(got, expected)
    torch.testing.assert_close(residual, lost, rtol=1e-5, atol=1e-6)


def wire(form: QuantFormat, quantiser: Quantiser | TritonQuantiser, numel: int) -> _Wire:
    """Of the second of three ranks."""
    rounds = torch.zeros(2, 3, form.message_bytes(numel) + 64, dtype=torch.uint8).unbind()
    group = SimpleNamespace(rank=1)
    return _Wire(group=group, form=form, quantiser=quantiser, numel=numel, incoming=rounds[:1], outgoing=rounds[1:])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("numel", [900, 899, 300])  # three equal chunks; the last shorter; the last empty
def test_messages_of_all_ranks_equal_those_of_torch(form, numel):
    chunk = 300 if numel > 300 else 150
    results = []
    for quantiser in (torch_quantiser(form, chunk), TritonQuantiser(form)):
        wired = wire(form, quantiser, chunk)
        source, lost, target = random(numel, 1), random(numel, 2) / 50, torch.zeros(numel)
        sources, residuals, targets = (uneven_chunks(whole, 3) for whole in (source, lost, target))
        slots = [wired.room(slot, piece) for slot, piece in zip(wired.outgoing[0], sources, strict=True)]
        sent = list(wired.quantise_others(sources, slots, residuals))
        assert not sent[1].any()  # the own one
        wired.dequantise_all(sent, targets, skipped=1)
        results.append((torch.cat(sent), lost, target))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0])


def test_every_rank_has_noise_of_its_own():
    form = QuantFormat(bits=8, stochastic=True)
    sources = random(128, 4).repeat(3).split(128)
    messages = room(form, 3 * 128).view(3, -1)
    TritonQuantiser(form, torch.Generator().manual_seed(0)).quantise_all(sources, messages.unbind())
    assert len({message.numpy().tobytes() for message in messages}) == 3


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("own_index", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "scale", "accumulate"),
    [(torch.float32, 1 / 3, False), (torch.float32, 1 / 3, True), (torch.bfloat16, 1.0, True)],
)
def test_sums_equal_those_of_torch(form, own_index, dtype, scale, accumulate):
    numel, ranks, before = 400, 3, 100
    messages = torch.zeros(ranks, form.message_bytes(numel) + 64, dtype=torch.uint8)
    for rank in range(ranks):
        torch_quantiser(form, numel).quantise(random(numel, 10 + rank), messages[rank])
    messages[own_index] = 255  # nan, were it read
    own, start = random(numel, 10 + own_index).to(dtype), random(before + numel + 1, 20).to(dtype)
    expected, got = start.clone(), start.clone()
    part = slice(before, before + numel)
    torch_quantiser(form, numel).reduce(
        messages, own, own_index, Target(out=expected, scale=scale, accumulate=accumulate), part
    )
    TritonQuantiser(form).reduce(messages, own, own_index, Target(out=got, scale=scale, accumulate=accumulate), part)
    if dtype == torch.float32:
        assert torch.equal(got, expected)
    else:  # the interpreter cuts bf16 off where devices round
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_may_take_the_place_of_the_own_piece(accumulate):
    form, numel = QuantFormat(bits=8), 400
    messages = torch.zeros(2, form.message_bytes(numel), dtype=torch.uint8)
    torch_quantiser(form, numel).quantise(random(numel, 1), messages[0])
    expected, got = random(numel, 2), random(numel, 2)
    for quantiser, received, out in (
        (torch_quantiser(form, numel), messages, expected),
        (TritonQuantiser(form), messages, got),
    ):
        quantiser.reduce(received, out, 1, Target(out=out, scale=0.5, accumulate=accumulate), slice(0, numel))
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
