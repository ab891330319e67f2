"""What FSDP has allocated at the peak of a backward, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from validation.allocated import AllocatedPeak
from zeromesh.model import ModelSpec, Recomputation, UnitKind, preset
from zeromesh.model.shape import MEGATRON

TOKENS, WORLD = 4096, 8
HIDDEN, FFN, VOCAB = 4096, 11008, 32000
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN


def llama(blocks: int) -> ModelSpec:
    model = preset("llama2-7b", kernels=MEGATRON)
    return replace(model, units=tuple(replace(u, count=blocks) if u.kind is UnitKind.BLOCK else u for u in model.units))


def peak(model: ModelSpec, recomputation: Recomputation = Recomputation.NONE) -> float:
    return AllocatedPeak(
        model=model, world=WORLD, tokens=TOKENS, seq_len=TOKENS, recomputation=recomputation
    ).above_backward_end()


def test_with_one_block_the_head_is_the_peak():
    """Its weight, the weight's gradient and a copy of the logits, beside all that was saved; the norm's weight is
    gathered, and none of the gradient shards that the end of the backward holds is there yet."""
    model = llama(1)
    beside = 2 * (VOCAB * HIDDEN) + 2 * HIDDEN + 2 * (VOCAB * HIDDEN) + 2 * TOKENS * VOCAB
    shards = 4 * model.num_params / WORLD
    saved = TOKENS * model.saved_activation_bytes(TOKENS, Recomputation.NONE)
    assert peak(model) == pytest.approx(saved + beside - shards)


def test_with_two_blocks_the_copy_of_the_last_ones_gradients_is():
    """Two blocks gathered, the second one's gradients twice, its input and that one's gradient; of the shards those of
    head and norm are there."""
    model = llama(2)
    one = next(u for u in model.units if u.kind is UnitKind.BLOCK)
    embedding = VOCAB * HIDDEN
    saved = TOKENS * (8 + one.saved_bytes(TOKENS, Recomputation.NONE))
    expected = saved + 2 * 2 * BLOCK + 2 * 2 * BLOCK + 2 * 2 * TOKENS * HIDDEN - 4 * (embedding + 2 * BLOCK) / WORLD
    assert peak(model) == pytest.approx(expected)


def test_recomputation_lowers_the_peak_of_many_blocks():
    assert peak(llama(8), Recomputation.FULL) < 0.5 * peak(llama(8))
