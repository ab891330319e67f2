"""Values beside fake tensors: known ones are right, and others are not guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.model.module_values import KnownValues


class Beside(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.values.run(func, args, kwargs or {})


def test_values_that_are_known() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(7, 5)
        with Beside() as beside:
            mask = torch.arange(7) > 3
            assert mask.sum().item() == 3 and mask.nonzero().shape == (3, 1)
            assert weight[mask].shape == (3, 5)  # of known places, values that are not
            part = mask[:5]
            mask.fill_(True)
            assert part.all().item()  # a view sees it
            with pytest.raises(DataDependentOutputException):
                weight.argmin().item()
            assert not beside.values.assumed
            mask.copy_(weight[:, 0] > 0)
            assert not part.all().item()  # written to, with unknown values: a yes or no is a no, and noted
            assert len(beside.values.assumed) == 1

    # Choices spread evenly and chances are means.
    def rows(chosen: Tensor) -> list[Any]:
        return list(chosen.tolist())

    with FakeTensorMode(allow_non_fake_inputs=True):
        scores = torch.empty(3, 4)
        with Beside():
            assert rows(scores.topk(2, dim=-1)[1]) == [[0, 1], [2, 3], [0, 1]]
            assert rows(scores.topk(1, dim=0)[1]) == [[0, 1, 2, 0]]
            assert rows(scores.argmax(-1)) == [0, 1, 2]
            assert torch.nn.functional.one_hot(scores.topk(2)[1], 4).sum((0, 1)).tolist() == [2, 2, 1, 1]
            assert torch.rand([]).item() == 0.5
