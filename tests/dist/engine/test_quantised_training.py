"""A language model trained over quantised wires ends where an unquantised one does, and needs all its means for it.

The model is small but as demanding as large ones: tokens have Zipf's frequencies, so gradients that are hundreds of
times apart lie in one message, and AdamW makes the small ones count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import Pool
from zeromesh.schedule import transfer
from zeromesh.wires import blocks, coded
from zeromesh.wires.blocks import QuantFormat

VOCAB, WIDTH, TOKENS, STEPS, RANKS = 128, 8, 128, 60, 4
QUANTISED = "node=3@int8/int4+ef,cluster=0@/int4+ef"
BOUND = 0.025


class Bigrams(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + torch.tanh(self.mix(x)))


class Language:
    """Tokens of Zipf's frequencies, spread over the vocabulary, and the successors of each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._frequency = (1 / torch.arange(1, VOCAB + 1))[torch.randperm(VOCAB, generator=generator)]
        self._follows = self._frequency * torch.exp(2 * torch.randn(VOCAB, VOCAB, generator=generator))

    def loss(self, model: nn.Module, count: int, seed: int) -> Tensor:
        """Mean over `count` pairs of tokens."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.multinomial(self._frequency, count, replacement=True, generator=generator)
        targets = torch.multinomial(self._follows[tokens], 1, generator=generator).squeeze(1)
        return nn.functional.cross_entropy(model(tokens), targets)


def trained(broken: Callable[[], AbstractContextManager[object]]) -> float:
    """On a rank: the loss on held-out tokens at the end."""
    torch.manual_seed(0)
    with broken():
        model = zm.shard(Bigrams(), mesh_of(2, 2), QUANTISED)
    return train(model, [dist.get_rank()])


def train(model: nn.Module, places: Sequence[int]) -> float:
    """`trained`, on the tokens of these places; of all of them it is plain training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    language = Language()
    for step in range(STEPS):
        losses = [language.loss(model, TOKENS, 1000 + RANKS * step + place) for place in places]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(language.loss(model, 20_000, 1))


@contextmanager
def without_block_scales() -> Iterator[None]:
    """One scale for the whole of each message."""

    def one_scale(wire):
        form = coded(wire)
        return replace(form, block=4096) if isinstance(form, QuantFormat) else form

    with mock.patch.object(blocks, "LARGEST_BLOCK", 4096), mock.patch.object(transfer, "coded", one_scale):
        yield


def test_losses_end_within_a_bound_that_one_scale_for_all_misses(pool: Pool):
    torch.manual_seed(0)
    lossless = train(Bigrams(), range(RANKS))
    quantised, broken = (pool.run(RANKS, trained, how)[0] for how in (nullcontext, without_block_scales))
    assert lossless < 3.3  # from ln(128) = 4.9: it has learnt
    assert quantised != lossless
    assert abs(quantised / lossless - 1) < BOUND, (quantised, lossless)
    # Without the means that make int4 work the same bound fails, so it says something.
    assert abs(broken / lossless - 1) > 1.5 * BOUND, (broken, lossless)
