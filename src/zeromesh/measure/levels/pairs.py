"""How far ranks are from each other, measured: one pair at a time while all others wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import torch
import torch.distributed as dist

from zeromesh.launch.ranks import Ranks
from zeromesh.measure.levels.partition import Distances

MOST = 16
"""Ranks whose pairs are measured: 120 pairs take some seconds."""

LONG_BYTES = 1 << 20
"""Eight times what a shaped link lets pass at once after a pause, and little for one of 200 Mbit/s: 42 ms."""

MOST_TRIES = 8
TRYING_S = 0.15
"""For long messages between one pair, about; a slow link gets two."""

PINGS = 12


def measure_pairs(ranks: Ranks, members: Sequence[int]) -> tuple[Distances, Distances]:
    """Seconds of a long message, and of a few bytes, between each two of `members`; collective over all ranks.

    The least of several, since whatever else happens makes a message later and never earlier.
    """
    pairs = list(combinations(members, 2))
    long = torch.zeros(LONG_BYTES // 4, device=ranks.device)
    word = torch.zeros(1, device=ranks.device)
    seconds = torch.full((2, len(pairs)), torch.inf, dtype=torch.float64)
    for index, (one, other) in enumerate(pairs):
        dist.barrier()
        if ranks.rank in (one, other):
            peer, first = one + other - ranks.rank, ranks.rank == one
            _there_and_back(word, word, peer, first, ranks)  # connections are made at first use
            tries = [_there_and_back(long, word, peer, first, ranks)]
            count = torch.tensor([min(MOST_TRIES, TRYING_S / tries[0])])  # the first's, so that both try as often
            count = count.to(ranks.device)
            dist.send(count, peer) if first else dist.recv(count, peer)
            tries += [_there_and_back(long, word, peer, first, ranks) for _ in range(max(1, int(count)))]
            pings = [_there_and_back(word, word, peer, first, ranks) for _ in range(PINGS)]
            seconds[:, index] = torch.tensor([min(tries), min(pings)])
    dist.all_reduce(seconds, dist.ReduceOp.MIN)
    rates, latencies = (dict(zip(pairs, row, strict=True)) for row in seconds.tolist())
    return rates, latencies


def _there_and_back(message: torch.Tensor, answer: torch.Tensor, peer: int, first: bool, ranks: Ranks) -> float:
    start = time.perf_counter()
    if first:
        dist.send(message, peer)
        dist.recv(answer, peer)
    else:
        dist.recv(message, peer)
        dist.send(answer, peer)
    ranks.settle()
    return time.perf_counter() - start
