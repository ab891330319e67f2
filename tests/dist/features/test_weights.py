"""Micro-batches that count by their weight, beyond what parity shows."""

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.engine.reference import mesh_of
from tests.dist.pool import on_ranks

WIDTH = 4


def linear(strategy):
    torch.manual_seed(0)
    return zm.shard(torch.nn.Linear(WIDTH, 1, bias=False).double(), mesh_of(2, 2), strategy)


def weight_of(model):
    """On the first rank; nothing on the others."""
    state = zm.full_state_dict(model)
    return state["weight"].flatten() if state else None


def expected(inputs, weights):
    """Gradient of the weighted mean of a rank's outputs over all ranks."""
    summed = torch.cat([(weights * inputs).double(), torch.tensor([float(weights)]).double()])
    dist.all_reduce(summed)
    return summed[:-1] / summed[-1]


@pytest.mark.parametrize("strategy", ["node=1,cluster=1", "node=3,cluster=1", "node=0,cluster=0"])
@on_ranks(4)
def test_two_models_in_one_backward_keep_their_weights(strategy):
    """Each has a total of its own, agreed on among the same ranks; in gradients, then in the loss. One that counts
    nothing is NaN."""
    rank = dist.get_rank()
    inputs = torch.arange(1.0, WIDTH + 1).double() * (rank + 1)
    first, second = linear(strategy), linear(strategy)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    weights = torch.tensor(float(rank)), torch.tensor(10.0 - 2 * rank)
    for in_loss in (False, True):
        before = [weight_of(model) for model in (first, second)]
        totals = [zm.sum_over_ranks(first, float(weight)) for weight in weights]
        with (
            zm.accumulate(first, last=True, weight=float(weights[0]), total=totals[0]) as weigh_first,
            zm.accumulate(second, last=True, weight=float(weights[1]), total=totals[1]) as weigh_second,
        ):
            losses = first(inputs).sum() * (1.0 if rank else torch.nan), second(inputs).sum()
            (weigh_first(losses[0]) + weigh_second(losses[1]) if in_loss else sum(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for model, weight, was in zip((first, second), weights, before, strict=True):
            now, wanted = weight_of(model), expected(inputs, weight)
            if now is not None:
                torch.testing.assert_close(was - now, wanted)
