"""The virtual device: real engine code at the size of models and worlds that no test machine has."""

from __future__ import annotations

import pytest
import torch

from tests.simdev.ranks import alone
from zeromesh import simdev


@alone(virtual=True)
def test_large_tensors_are_shapes_and_small_ones_have_values():
    large = torch.empty(1 << 40, dtype=torch.bfloat16, device="simdev")
    assert simdev.memory_stats().allocated_bytes == 2 << 40
    assert (large + 1).shape == large.shape and large.sum().item() == 0
    words = torch.tensor([3, 5]).to("simdev")
    assert (words * 2 + 1).tolist() == [7, 11]
    assert words[words > 3].tolist() == [5]
    assert (words + large[:2]).tolist() == [0, 0]  # a value that nobody knows
    words.add_(large[:2].long())
    assert words.tolist() == [0, 0]
    words.fill_(4)
    assert words.tolist() == [4, 4]
    with pytest.raises(NotImplementedError, match=r"nonzero cannot run on the virtual device: .* virtual=False"):
        large.nonzero()
