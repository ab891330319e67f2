"""Sums of messages of ranks: in their order, on devices too, and there a launch a term."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.messages import Messages, SumScratch
from zeromesh.comm.transport import Native, Transport
from zeromesh.wires.target import Target

NUMEL, TERMS = 200, 5


class Elsewhere(torch.Tensor):
    """Host memory that says it is on a device, and notes all work there."""

    done: list[str] = []  # noqa: RUF012  # of one test at a time

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # torch declares an attribute
        return False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("add", "add_", "copy_", "mul_"):
            cls.done.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs)


def terms(dtype: torch.dtype) -> list[Tensor]:
    """Terms of sizes so different that another order rounds otherwise."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator).mul_(10.0 ** (index % 3)).to(dtype) for index in range(TERMS)]


def summed(kind: type[Tensor], wire: torch.dtype, out: torch.dtype, accumulate: bool) -> Tensor:
    workspace = torch.zeros(1 << 14, dtype=torch.uint8).as_subclass(kind)
    scratch = SumScratch.cut(workspace, wire, torch.float32, terms=TERMS, longest=1 << 14)
    target = Target(out=torch.ones(NUMEL, dtype=out).as_subclass(kind), scale=0.5, accumulate=accumulate)
    Elsewhere.done.clear()
    target.add_up([term.as_subclass(kind) for term in terms(wire)], slice(0, NUMEL), scratch.total, scratch.widened)
    return target.out.as_subclass(torch.Tensor)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_device_adds_up_to_the_bits_of_the_host(wire, out, accumulate):
    expected = terms(wire)[0].float()
    for term in terms(wire)[1:]:
        expected = expected + term.float()
    expected = (expected * 0.5 + accumulate).to(out)
    assert torch.equal(summed(torch.Tensor, wire, out, accumulate), expected)
    assert torch.equal(summed(Elsewhere, wire, out, accumulate), expected)
    # One for each term, but for the first two together where nothing widens them; then the scale, and the result.
    launches = TERMS - (wire == torch.float32) + 1 + (2 if accumulate and out != torch.float32 else 1)
    assert len(Elsewhere.done) == launches, Elsewhere.done


NCCL, OTHER = Native("cuda", nccl=True), Native("xpu")


@pytest.mark.parametrize(
    ("transport", "dtype", "scale", "expected"),
    [
        (NCCL, "bfloat16", 1.0, "SUM"),
        (NCCL, "bfloat16", 1 / 8, "AVG"),
        (NCCL, "float16", 1 / 8, "AVG"),
        (NCCL, "bfloat16", 1 / 16, "PREMUL_SUM"),  # of a part that half of the ranks feed
        (NCCL, "bfloat16", 1 / 24, None),  # rounded to bf16, it would be .2 % off
        (NCCL, "float32", 1 / 24, "PREMUL_SUM"),
        (OTHER, "bfloat16", 1 / 8, "AVG"),
        (OTHER, "float16", 1 / 8, None),  # it may divide after the sum
        (OTHER, "float32", 1 / 16, None),
        (Native("cpu"), "float32", 1 / 8, None),
        (Messages("cpu"), "float32", 1 / 8, None),
    ],
)
def test_sums_that_a_backend_scales(transport: Transport, dtype: str, scale: float, expected: str | None) -> None:
    operation, left = transport.scaled_sum(8, getattr(torch, dtype), scale)
    assert operation == getattr(dist.ReduceOp, expected or "SUM") and left == (scale if expected is None else 1)
