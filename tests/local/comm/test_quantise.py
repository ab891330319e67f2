"""Quantised messages: size, error, bias, error feedback, lengths that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import InputError, NotationError
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.blocks.quantiser import Quantiser
from zeromesh.wires.target import Target

FORMS = st.builds(
    QuantFormat, bits=st.sampled_from([4, 8]), block=st.sampled_from([8, 32, 128]), stochastic=st.booleans()
)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def host_codec(form: QuantFormat, numel: int, generator: torch.Generator | None = None) -> Quantiser:
    return Quantiser(form, numel, torch.zeros(form.memory_bytes(numel), dtype=torch.uint8), generator)


def there_and_back(form: QuantFormat, source: torch.Tensor, seed: int = 0) -> torch.Tensor:
    quantiser = host_codec(form, form.blocks(max(source.numel(), 1)) * form.block, noise(seed))
    message = torch.full((form.message_bytes(source.numel()),), 255, dtype=torch.uint8)
    quantiser.quantise(source, message)
    target = torch.full_like(source, math.nan)
    quantiser.dequantise(message, target)
    return target


def blocks(form: QuantFormat, tensor: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(form.blocks(tensor.numel()) * form.block, dtype=torch.float64)
    padded[: tensor.numel()] = tensor.double()
    return padded.view(-1, form.block)


def random(numel: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(numel, generator=generator))
    return torch.randn(numel, generator=generator) * size


@given(form=FORMS, numel=st.integers(0, 700), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 3.0, 20.0]))
def test_error_is_within_the_bound_in_every_block(form, numel, seed, spread):
    source = random(numel, seed, spread)
    error = blocks(form, there_and_back(form, source, seed) - source).abs()
    largest = blocks(form, source).abs().amax(1, keepdim=True)
    assert (error <= form.error_bound(1) * largest + 1e-35).all()


@given(form=FORMS, numel=st.integers(1, 300), seed=st.integers(0, 99))
def test_codes_times_scale_survive_a_second_pass(form, numel, seed):
    once = there_and_back(form, random(numel, seed, 0.0), seed)
    if not form.stochastic:
        torch.testing.assert_close(there_and_back(form, once), once, rtol=1e-6, atol=0)


@given(bits=st.sampled_from([4, 8]), numel=st.integers(0, 1000))
def test_messages_are_as_long_as_the_schedule_says(bits, numel):
    assert QuantFormat(bits=bits).message_bytes(numel) == wire_bytes(numel, f"int{bits}")


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(bits):
    form = QuantFormat(bits=bits, block=64, stochastic=True)
    source = random(64, 1, 0.0)
    repeats = 4000
    quantiser = host_codec(form, 64, torch.Generator().manual_seed(0))
    message, target = torch.zeros(form.message_bytes(64), dtype=torch.uint8), torch.zeros(64)
    mean = torch.zeros(64, dtype=torch.float64)
    for _ in range(repeats):
        quantiser.quantise(source, message)
        quantiser.dequantise(message, target)
        mean += target.double() / repeats
    step = source.abs().max() / form.largest
    # One rounding has at most half a step of standard deviation; 5 sigma of the mean of 4000, 64 elements.
    allowed = 5 * 0.5 * step / math.sqrt(repeats)
    assert ((mean - source).abs() < allowed).all()
    nearest = there_and_back(QuantFormat(bits=bits, block=64), source)
    assert ((nearest - source).abs() > allowed).any()


def test_block_scales_keep_small_blocks_next_to_large_ones():
    source = torch.cat([torch.full((64,), 1e-4), torch.full((64,), 1e4)])
    assert torch.allclose(there_and_back(QuantFormat(bits=4, block=64), source), source)
    assert (there_and_back(QuantFormat(bits=4, block=128), source)[:64] == 0).all()
    for tiny in (0.0, 1e-38, 1e-36):
        assert (there_and_back(QuantFormat(bits=8, block=8), torch.full((8,), tiny)) == 0).all()
    # Each pair of codes of int4, in blocks whose scale the first element sets.
    codes = torch.cartesian_prod(torch.arange(-7.0, 8), torch.arange(-7.0, 8)).flatten()
    blocks = torch.cat([codes, codes.new_zeros(-len(codes) % 14)]).view(-1, 14)
    sent = torch.cat([blocks.new_full((len(blocks), 2), 7.0), blocks], 1).flatten() * 0.5
    assert torch.equal(there_and_back(QuantFormat(bits=4, block=16), sent), sent)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_element_makes_its_block_non_finite(bits, value):
    """And is forgotten by error feedback."""
    form, source = QuantFormat(bits=bits, block=16), torch.ones(32)
    source[3] = value
    back = there_and_back(form, source)
    assert not back[:16].isfinite().all()
    assert back[16:].isfinite().all()
    residual = torch.full((32,), 0.5)
    host_codec(form, 32).quantise(source, torch.zeros(form.message_bytes(32), dtype=torch.uint8), residual)
    assert (residual[:16] == 0).all()


@pytest.mark.parametrize("own_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", [QuantFormat(bits=4, block=8), QuantFormat(bits=8, block=24)], ids=str)
def test_a_sum_is_that_of_dequantised_messages_in_the_order_of_the_ranks(form, accumulate, out_dtype, own_dtype):
    quantiser, numel, own_index = host_codec(form, 72), 60, 1
    messages = torch.zeros(3, form.message_bytes(numel), dtype=torch.uint8)
    own, out = random(numel, 1, 1.0).to(own_dtype), random(numel + 4, 2, 1.0).to(out_dtype)
    total, term = torch.zeros(numel), torch.empty(numel)
    for rank, message in enumerate(messages):
        if rank == own_index:
            total += own.float()
            message.fill_(255)  # nan, were it read
        else:
            quantiser.quantise(random(numel, 10 + rank, 1.0), message)
            quantiser.dequantise(message, term)
            total += term
    part, expected = slice(3, 3 + numel), out.clone()
    expected[part] = total * 0.3 + (out[part].float() if accumulate else 0.0)
    quantiser.reduce(messages, own, own_index, Target(out=out, scale=0.3, accumulate=accumulate), part)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: QuantFormat(bits=2), "8 or 4 bits; got 2"),
        (lambda: QuantFormat(bits=8, block=100), r"multiple of 8 elements, 8 to 1024.*got int8\[100\]"),
        (lambda: host_codec(QuantFormat(bits=8, stochastic=True), 128), "needs a generator of its own"),
        (lambda: host_codec(QuantFormat(bits=8), 100), "multiple of the granule of 128; got 100"),
    ],
)
def test_wrong_formats_say_so(make, match):
    with pytest.raises((InputError, NotationError), match=match):
        make()
