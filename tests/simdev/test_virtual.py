"""The virtual device: tensors and words of ranks that no test machine has; `test_rehearse` has models."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.simdev.ranks import alone
from zeromesh import simdev
from zeromesh.engine.build import make_control


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


@alone(virtual=True)
def test_any_rank_of_a_counting_group_hears_what_it_says():
    simdev.counting_group(5, 64)
    control = make_control(init_device_mesh("simdev", (8, 8), mesh_dim_names=("cluster", "node")))
    assert control.say({"step": 7, "names": ["a"]}) == {"step": 7, "names": ["a"]}
    assert control.gather("here") == ["here"] * 64
