"""The Triton kernels against torch's path: the same messages, byte for byte.

On a device, compiled, at sizes that fill it; under TRITON_INTERPRET=1 on the host, at small ones, which is how
`tests/local/comm/test_kernels.py` runs them where there is no device. Whether Triton interprets is settled when it is
first imported.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.blocks.quantiser import Quantiser
from zeromesh.wires.target import Target

pytest.importorskip("triton")

from zeromesh.wires.blocks.kernels import TritonQuantiser  # imports triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOST = torch.device("cpu")
DEVICE = HOST if INTERPRETED else torch.device("cuda")
SHAPES = [(8, 128), (4, 24)] + ([] if INTERPRETED else [(4, 256), (4, 128), (8, 24)])
FORMS = [QuantFormat(bits=bits, block=block) for bits, block in SHAPES]
NUMELS = [300] if INTERPRETED else [1, 300, 1500, 3_000_001]
LONG = 403 if INTERPRETED else 100_003
COPIES = 64 if INTERPRETED else 4096
"""Values of a block whose mean is looked at."""


def random(numel: int, seed: int, device: torch.device = HOST) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    return values.to(device)


def room(form: QuantFormat, numel: int, device: torch.device = HOST) -> torch.Tensor:
    return torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=device)


def on_host(form: QuantFormat, numel: int) -> Quantiser:
    whole = form.blocks(numel) * form.block
    return Quantiser(form, whole, torch.zeros(form.memory_bytes(whole), dtype=torch.uint8))


def both(form: QuantFormat, numel: int) -> list[tuple[Quantiser | TritonQuantiser, torch.device]]:
    return [(on_host(form, numel), HOST), (TritonQuantiser(form), DEVICE)]


def require_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    if INTERPRETED and got.dtype == torch.bfloat16:  # the interpreter cuts bf16 off where devices round
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(got.cpu(), expected)


def received(form: QuantFormat, numel: int, ranks: int, own_index: int) -> torch.Tensor:
    """Messages of all ranks, with room between them; the own one is nan, were it read."""
    messages = torch.zeros(ranks, form.message_bytes(numel) + 64, dtype=torch.uint8)
    for rank in range(ranks):
        on_host(form, numel).quantise(random(numel, 10 + rank), messages[rank])
    messages[own_index] = 255
    return messages


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_and_values_equal_those_of_torch(form, numel, dtype):
    source = random(numel, 1).clamp(-6e4, 6e4).to(dtype)
    expected, got = room(form, numel), room(form, numel, DEVICE)
    host, device = on_host(form, numel), TritonQuantiser(form)
    host.quantise(source, expected)
    device.quantise(source.to(DEVICE), got)
    assert torch.equal(got.cpu(), expected)
    target, wanted = torch.full_like(source, math.nan, device=DEVICE), torch.empty_like(source)
    device.dequantise(got, target)
    host.dequantise(expected, wanted)
    require_equal(target, wanted)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_error_feedback_equals_that_of_torch(form):
    results = []
    for quantiser, device in both(form, LONG):
        sent, lost = room(form, LONG, device), (random(LONG, 3) / 50).to(device)
        quantiser.quantise(random(LONG, 2, device), sent, lost)
        results.append((sent.cpu(), lost.cpu()))
    assert torch.equal(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_messages_of_all_ranks_equal_those_of_torch(form):
    numel, chunk, results = 3 * LONG, LONG, []
    for quantiser, device in both(form, chunk):
        rounds = torch.zeros(2, 3, form.message_bytes(chunk) + 64, dtype=torch.uint8, device=device).unbind()
        wholes = [random(numel, 1, device), (random(numel, 2) / 50).to(device), torch.zeros(numel, device=device)]
        sources, residuals, targets = (
            [whole[index * chunk : (index + 1) * chunk] for index in range(3)] for whole in wholes
        )
        slots = [slot[: form.message_bytes(len(piece))] for slot, piece in zip(rounds[1], sources, strict=True)]
        sent = list(quantiser.quantise_each(sources, slots, residuals, skipped=1))
        assert not sent[1].any()  # the own one
        quantiser.dequantise_each(sent, targets, skipped=1)
        results.append((torch.cat(sent).cpu(), wholes[1].cpu(), wholes[2].cpu()))
    assert torch.equal(results[1][0], results[0][0])
    for got, expected in zip(results[1][1:], results[0][1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("own_index", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "scale", "accumulate"),
    [(torch.float32, 1 / 3, False), (torch.float32, 1 / 3, True), (torch.bfloat16, 1.0, True)],
)
def test_sums_equal_those_of_torch(form, own_index, dtype, scale, accumulate):
    before, results = 100, []
    messages = received(form, LONG, 4, own_index)
    for quantiser, device in both(form, LONG):
        own, out = random(LONG, 10 + own_index, device).to(dtype), random(before + LONG + 1, 20, device).to(dtype)
        target = Target(out=out, scale=scale, accumulate=accumulate)
        quantiser.reduce(messages.to(device), own, own_index, target, slice(before, before + LONG))
        results.append(out)
    require_equal(results[1], results[0])


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_may_take_the_place_of_the_own_piece(accumulate):
    form, results = QuantFormat(bits=8), []
    messages = received(form, LONG, 2, 1)
    for quantiser, device in both(form, LONG):
        out = random(LONG, 2, device)
        target = Target(out=out, scale=0.5, accumulate=accumulate)
        quantiser.reduce(messages.to(device), out, 1, target, slice(0, LONG))
        results.append(out)
    require_equal(results[1], results[0])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("own_index", [0, 2])
@pytest.mark.parametrize("feedback", [False, True])
def test_sums_that_go_on_are_the_sums_quantised(form, own_index, feedback):
    before, scale = 100, 0.25
    part = slice(before, before + LONG)
    messages = received(form, LONG, 3, own_index)
    results = []
    for quantiser, device in both(form, LONG):
        out, sent = random(before + LONG + 1, 20, device), room(form, LONG, device)
        own, lost = out[part].copy_(random(LONG, 10 + own_index)), (random(LONG, 21) / 50).to(device)
        target = Target(out=out, scale=scale, accumulate=False)
        owed = lost if feedback else None
        quantiser.requantise(messages.to(device), own, own_index, target, part, sent, owed)
        results.append((sent.cpu(), out.cpu(), lost.cpu()))
    in_steps, total = on_host(form, LONG), random(LONG, 10 + own_index)
    sent, lost, out = room(form, LONG), random(LONG, 21) / 50, random(before + LONG + 1, 20)
    in_steps.reduce(messages, total, own_index, Target(out=total, scale=scale, accumulate=False), slice(0, LONG))
    in_steps.quantise(total, sent, lost if feedback else None)
    in_steps.dequantise(sent, out[part])
    for got_sent, got, got_lost in results:
        assert torch.equal(got_sent, sent) and torch.equal(got, out)
        torch.testing.assert_close(got_lost, lost, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(bits):
    form = QuantFormat(bits=bits, block=128, stochastic=True)
    quantiser = TritonQuantiser(form, torch.Generator().manual_seed(0))
    source = random(128, 4, DEVICE).repeat(COPIES)
    message, target = room(form, source.numel(), DEVICE), torch.zeros_like(source)
    quantiser.quantise(source, message)
    quantiser.dequantise(message, target)
    step = source.abs().max() / form.largest
    assert (target - source).abs().max() <= step * (1 + 1e-5)
    # Six sigma of the mean of that many samples of an element, at half a step of standard deviation each.
    mean = target.view(COPIES, 128).mean(0)
    assert (mean - source[:128]).abs().max() <= 6 * 0.5 * step / math.sqrt(COPIES)
    again = torch.zeros_like(message)
    quantiser.quantise(source, again)
    assert not torch.equal(again, message)


def test_every_rank_has_noise_of_its_own():
    form = QuantFormat(bits=8, stochastic=True)
    sources = random(128, 4, DEVICE).repeat(3).split(128)
    messages = room(form, 3 * 128, DEVICE).view(3, -1)
    list(TritonQuantiser(form, torch.Generator().manual_seed(0)).quantise_each(sources, messages.unbind()))
    assert len({message.cpu().numpy().tobytes() for message in messages}) == 3


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, inside the interpreter
def test_a_non_finite_element_makes_its_block_non_finite(value):
    form = QuantFormat(bits=8, block=16)
    source = torch.ones(32, device=DEVICE)
    source[3] = value
    message, target = room(form, 32, DEVICE), torch.zeros(32, device=DEVICE)
    TritonQuantiser(form).quantise(source, message)
    TritonQuantiser(form).dequantise(message, target)
    assert not target[:16].isfinite().all()
    assert target[16:].isfinite().all()
