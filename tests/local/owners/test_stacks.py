"""Tensors of one shape in one step: the numbers of one after the other, and who is in a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.dist.owners.optimizers import LAMB, SOAP, Orthogonal
from zeromesh.errors import OptimizerError
from zeromesh.owners.stacks import Stacking, require_stackable, step_on_stacks
from zeromesh.owners.trial import require_tensorwise

SHAPES = [*[(8, 24)] * 5, (24, 8), (6, 6), (24, 8), (24, 8), (2, 8, 24)]
"""Enough of one shape that some are in one stack, whichever is left out."""
STEPS = 3


def params_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def stepped(
    kind: Any, shapes: list[tuple[int, ...]], stacking: Stacking, dtype: torch.dtype, **options: Any
) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """After three steps, of which each leaves one tensor out, in a group of its own for the last two."""
    params = params_of(shapes, dtype)
    optimizer = kind([{"params": [p.detach()[0] if p.dim() == 3 else p for p in params]}], **options)
    optimizer.param_groups[0]["params"] = params[:-2]
    optimizer.add_param_group({"params": [params[-2].new_zeros(1, 1)], "lr": 0.01})
    optimizer.param_groups[1]["params"] = params[-2:]
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator, dtype=dtype)
            param.grad = None if index == step else grad
        with torch.no_grad():
            step_on_stacks(optimizer, stacking)
    return params, optimizer


def exact(grad: Tensor) -> Tensor:
    """Muon's first update of a matrix, less its weight decay, in fp64."""
    x = grad.double().T if grad.shape[0] > grad.shape[1] else grad.double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_muon_in_a_stack_is_as_exact_as_alone() -> None:
    """Its iteration is in bf16. Kernels for stacks may round in another order, so the test is that neither is
    nearer to fp64; products taken apart, as torch.vmap does it alone, are twice as far."""
    grads = torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(2))
    found = []
    for alike in (False, True):
        params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer = optim.Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        step_on_stacks(optimizer, Stacking(alike=alike))
        found.append(torch.stack([-param.detach() for param in params]))
    expected = torch.stack([exact(grad) for grad in grads])
    alone, stacked = relative(found[0], expected), relative(found[1], expected)
    assert 0 < alone < 0.03
    assert stacked < 1.2 * alone
    assert relative(found[1], found[0]) < 2 * alone


@pytest.mark.parametrize(
    ("kind", "dtype", "bound"),
    [(optim.Muon, torch.float32, 0.03), (Orthogonal, torch.float64, 1e-13), (LAMB, torch.float64, 1e-13)],
)
def test_steps_are_those_of_one_after_the_other(kind: Any, dtype: torch.dtype, bound: float) -> None:
    """Also where one tensor has had no gradient, so that stacks change; and a batch counts as its items."""
    shapes = SHAPES[:-1] if kind is LAMB else SHAPES
    alone = [shape for shape in shapes if len(shape) == 2] + [(8, 24)] * (2 * (kind is not LAMB))
    ours, optimizer = stepped(kind, shapes, Stacking(alike=True, dims=2), dtype)
    plain = params_of(shapes, dtype)
    items = [item for p in plain for item in (p.detach().unbind() if p.dim() == 3 else [p.detach()])]
    split = len(shapes) - 2
    groups = [
        {"params": [nn.Parameter(x.clone()) for x in items[:split]]},
        {"params": [nn.Parameter(x.clone()) for x in items[split:]], "lr": 0.01},
    ]
    assert [tuple(x.shape) for x in items] == alone
    theirs = kind(groups)
    wholes = [p for group in theirs.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        grads: list[Tensor | None] = []
        for index, shape in enumerate(shapes):
            grad = torch.randn(shape, generator=generator, dtype=dtype)
            each = [*grad.unbind()] if len(shape) == 3 else [grad]
            grads += [None] * len(each) if index == step else each
        for whole, own in zip(wholes, grads, strict=True):
            whole.grad = own
        theirs.step()
    found = [item for p in ours for item in (p.detach().unbind() if p.dim() == 3 else [p.detach()])]
    for one, whole, before in zip(found, wholes, items, strict=True):
        assert relative(one - before, whole.detach() - before) < bound
    assert [g.get("step") for g in optimizer.param_groups] == [g.get("step") for g in theirs.param_groups]
    for param in ours:
        for value in optimizer.state[param].values():
            assert value.shape == param.shape


def test_stacks_are_of_one_shape_and_history() -> None:
    """Numbers of tensors stepped on at once, told by a class that counts its calls."""
    seen: list[int] = []

    class Counting(Orthogonal):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["steps"] = state.get("steps", 0) + 1
            seen.append(state["steps"])
            super().update(param, grad, state, group)

    params = params_of([(3, 4)] * 3 + [(4, 3)], torch.float64)
    optimizer = Counting(params)
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = None if (step, index) == (0, 2) else torch.ones_like(param)
        step_on_stacks(optimizer, Stacking(alike=True))
    # Two and one; two, the late one and one; and so on: never in one stack with those that are a step ahead.
    assert [seen.count(steps) for steps in (1, 2, 3)] == [2 + 1, 2 + 1, 2] and len(seen) == 8
    assert [optimizer.state[param]["steps"] for param in params] == [3, 3, 2, 3]


def test_what_cannot_be_stacked_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"SOAP cannot step on a stack of tensors of 2 dimensions"):
        require_stackable(SOAP, [torch.ones(4, 5)], {})
    with pytest.raises(OptimizerError, match="at least 1; got 0"):
        Stacking(dims=0)


# ---- Facts about an optimizer's class that a trial finds


class Adapting(optim.SGD):
    """Keeps a distance over all tensors, and has it in its rate when that has grown enough, as D-Adaptation does."""

    def __init__(self, params: Any, *, held: str) -> None:
        super().__init__(params, lr=1e-3)
        self.held = held
        self.distance = 0.0
        self.param_groups[0]["distance"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        more = sum(float(p.grad.sign().abs().sum()) for group in self.param_groups for p in group["params"])
        if self.held == "self":
            self.distance += more
        else:
            self.param_groups[0]["distance"] += more
        if self.distance > 1e9:
            self.param_groups[0]["lr"] *= 2
        return found


@pytest.mark.parametrize("held", ["self", "group"])
def test_what_is_kept_for_all_tensors_is_found_before_it_shows(held: str) -> None:
    words = r"each tensor by itself; Adapting makes .* gradients too, kept as distance, and each rank"
    with pytest.raises(OptimizerError, match=words):
        require_tensorwise(Adapting, [torch.ones(3, 4)], {"held": held})


@pytest.mark.parametrize("kind", [LAMB, optim.Muon, optim.Adafactor, optim.ASGD, optim.NAdam, optim.Rprop])
def test_counts_of_steps_are_nobodys_gradients(kind: Any) -> None:
    require_tensorwise(kind, [torch.ones(3, 4)], {})
