"""Which sample is used at which step, by which rank, in which micro-batch. Depends on the seed and the step alone.

Each epoch visits all sequences once, in an order of its own; position `step * global_sequences + i` of that endless
series is sequence `i` of the step's global batch. The order is a Feistel network with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002): any position is found in constant time and memory, so a resumed run
needs no state, and no library's random stream is part of a checkpoint's meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

FEISTEL_ROUNDS = 6  # Luby and Rackoff's proof needs four with perfect round functions; two more cost nothing here


def permute(index: int, size: int, key: tuple[int, ...]) -> int:
    """The place of `index` in the permutation of range(size) that `key` names.

    >>> sorted(permute(i, 5, (0, 1)) for i in range(5))
    [0, 1, 2, 3, 4]
    """
    half_bits = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(FEISTEL_ROUNDS):
            words = (*key, round_number, right)
            digest = hashlib.blake2b(b"".join(word.to_bytes(8, "little") for word in words), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Deals the `num_samples` sequences of a corpus to steps of `global_sequences`, micro-batches of at most `micro`,
    and `world` ranks, in the order that `seed` names."""

    num_samples: int
    global_sequences: int
    micro: int
    world: int
    seed: int

    def rank_batches(self, step: int, rank: int) -> Iterator[list[int]]:
        """The rank's samples of a step, one list a micro-batch, as many on each rank; empty beyond the end of the
        global batch, whose sequences are dealt to the ranks `micro` at a time."""
        for dealt in range(0, self.global_sequences, self.world * self.micro):
            first = dealt + rank * self.micro
            last = min(first + self.micro, self.global_sequences)
            yield [self._sample(step * self.global_sequences + i) for i in range(first, last)]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self.num_samples)
        return permute(index, self.num_samples, (self.seed, epoch))
