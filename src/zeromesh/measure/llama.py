"""A Llama of a few million parameters to train in measurements: the module of `transformers`, without that library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeromesh.measure.work import SHAPES
from zeromesh.model.shape import TransformerShape


def make_llama(size: str) -> Llama:
    """Makes a model of one of `SHAPES`, with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Llama(SHAPES[size])


class Blocks(nn.Module):
    """Only blocks, from activations [batch, sequence, hidden] to the same."""

    def __init__(self, shape: TransformerShape, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(shape) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Llama(nn.Module):
    """A Llama from token ids [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(ids)[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.hidden
        self.heads = shape.heads
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.output_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.input_norm(x))
        h = self.output_norm(x)
        down: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + down

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def _rotate(x: Tensor) -> Tensor:
    """Applies rotary positions. Angles are computed each time: at these sizes a cached table is no faster."""
    length, dim = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = (part.repeat(1, 2).to(x.dtype) for part in (angles.cos(), angles.sin()))
    half = dim // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
