"""Optimizers that need whole tensors, as their papers have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


class _Each(Optimizer):
    """Updates each tensor by itself."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class LAMB(_Each):
    """You et al., arXiv 1904.00962, algorithm 2: Adam's update, scaled by the tensor's norm over the update's. Counts
    its steps by group, as NVIDIA's does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        first, second = (
            state["exp_avg"] / (1 - 0.9 ** group["step"]),
            state["exp_avg_sq"] / (1 - 0.999 ** group["step"]),
        )
        update = first / (second.sqrt() + 1e-6) + 0.01 * param
        size, norm = param.norm(), update.norm()
        trust = torch.where((size > 0) & (norm > 0), size / norm.clamp(min=1e-12), 1.0)
        param.sub_(group["lr"] * trust * update)


class Codes(Tensor):
    """Values as torchao's 8-bit optimizers keep them: whole numbers, and a scale for each row of the last dimension."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Codes:
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        target, (args, kwargs) = args[0], tree_map_only(cls, lambda each: each.codes * each.scale, (args, kwargs or {}))
        if func is torch.ops.aten.copy_.default and type(target) is cls:
            target.scale.copy_(args[1].abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127)
            target.codes.copy_((args[1] / target.scale).round())
            return target
        return func(*args, **kwargs)


class EightBits(_Each):
    """A moving average in 8 bits, and a learning rate that is a tensor and has to stay one, as torchao's classes."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"], dtype=torch.float64)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            codes = torch.zeros(param.shape, dtype=torch.int8, device=param.device)
            scale = torch.ones((*param.shape[:-1], 1), dtype=param.dtype, device=param.device)
            state["average"] = Codes(codes, scale) if codes.ndim > 1 else torch.zeros_like(param)
        average = state["average"].lerp(grad, 0.1)
        state["average"].copy_(average)
        param.sub_(group["lr"] * average)
        assert isinstance(group["lr"], Tensor)


class SOAP(_Each):
    """Vyas et al., arXiv 2409.11321, algorithm 3, of matrices, with a new basis in every step; of others Adam's."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = param.dim() == 2
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            if matrix:
                state["left"] = torch.zeros(len(grad), len(grad), dtype=grad.dtype)
                state["right"] = torch.zeros(grad.shape[1], grad.shape[1], dtype=grad.dtype)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        first = state["exp_avg"]
        if matrix:
            # A little on the diagonal, all different, or equal eigenvalues leave the basis to chance.
            state["left"].mul_(0.9).add_(grad @ grad.T).diagonal().add_(torch.arange(len(grad)) * 1e-3)
            state["right"].mul_(0.9).add_(grad.T @ grad).diagonal().add_(torch.arange(grad.shape[1]) * 1e-3)
            left, right = torch.linalg.eigh(state["left"])[1], torch.linalg.eigh(state["right"])[1]
            grad, first = left.T @ grad @ right, left.T @ first @ right
        state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = first / (state["exp_avg_sq"].sqrt() + 1e-6)
        param.sub_(group["lr"] * (left @ update @ right.T if matrix else update))


class Orthogonal(_Each):
    """Muon's iteration (https://kellerjordan.github.io/posts/muon) in the gradient's own dtype, without its weight
    decay; of a batch of matrices each by itself, of other tensors descent."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(grad)) + grad
        update = state["momentum"]
        if param.dim() > 1:
            matrices = update if param.dim() == 3 else [update]
            update = torch.stack([_orthogonal(matrix) for matrix in matrices]).view(param.shape)
        param.sub_(group["lr"] * update)


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
