"""Operations, axes, order and bytes observed on the wire are those of the schedule."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.dist.parity import Case, backward, local_part, mesh_of, sharded, take_step
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.schedule.step import step_transfers
from zeromesh.schedule.transfer import Transfer
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.presets import PRESETS

QUANTISED = ("zero++", "frontier")
LOSSLESS = sorted({str(Strategy.parse(name, ("node", "cluster"))) for name in PRESETS if name not in QUANTISED})
"""The layouts of all presets with lossless wires, each once: zero3, fsdp and paro:GGG are one, and so on."""


def observe(strategy: str, case: Case, *shape: int) -> tuple[list[tuple[str, str, int]], list[Transfer], Layout]:
    """A rank's calls in a step in steady state, as (operation, axis, bytes), and those of the schedule."""
    with sharded(strategy, case, mesh_of(*shape)) as (model, optimizer):
        backward(model, replace(case, micro_batches=1), 0)  # shows the order of the units
        with zm.traffic_report(model, micro_batches=case.micro_batches) as traffic:
            optimizer.step()
            optimizer.zero_grad()
            backward(model, case, 1)
        sent = [(call.operation, call.axis, call.sent_bytes) for call in traffic.calls]
        schedule = engine_of(model).schedule
        expected = step_transfers(schedule, micro_batches=case.micro_batches)
    return sent, [step for _, step in expected if step.numel], schedule.layout


def test_the_presets_are_all_there():
    assert len(LOSSLESS) == 18


@on_ranks(6)
def test_calls_order_and_bytes_on_an_odd_mesh():
    for strategy in ("node=0,cluster=2", "node=3,cluster=0;prefetch=3", "node=2,cluster=3k"):
        require_scheduled(*observe(strategy, Case(world=6), 3, 2))


@on_ranks(4)
def test_copies_to_and_from_the_host():
    """The formulas, for N elements of each rank's padded buffers: fp32 gradients, parameters of `width` bytes."""
    for micro_batches, precision, width, hosted in ((1, "fp32", 4, HOSTED[1::2]), (3, "bf16-wire", 2, HOSTED)):
        case = Case(precision=precision, micro_batches=micro_batches)
        for host, mix, of_grads, of_states in hosted:
            with sharded(f"host={host},{mix}", case, mesh_of(2, 2)) as (model, optimizer):
                buffers = [placed for unit in engine_of(model).schedule.placed for placed in unit]
                total = sum(placed.padded for placed in buffers if placed.buffer.trainable)
                backward(model, replace(case, micro_batches=1), 0)
                with zm.traffic_report(model, micro_batches=micro_batches) as traffic:
                    optimizer.step()
                    optimizer.zero_grad()
                    backward(model, case, 1)
                lines = {line.direction: line for line in traffic.lines() if line.axis == "host"}
            assert all(line.sent_bytes == line.predicted_bytes for line in lines.values()), (host, mix)
            grads, states = total // of_grads, total // of_states
            further = mix != "node=3,cluster=3"  # the sum of micro-batches is reduced once more
            down, up = 4 * states, width * states
            if host == "2":
                down = 4 * (grads * (micro_batches - further) + states * further)
                up += 4 * grads * (micro_batches - 1)  # the sum so far
            assert (lines["down"].sent_bytes, lines["up"].sent_bytes) == (down, up), (host, mix)


@on_ranks(2)
def test_a_sum_that_its_slot_does_not_hold_comes_up_beside_it():
    """Sums in fp64 of gradients that are sent in bf16, of units so small that the slots' rounding hides it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).double()
    model, batch = copy.deepcopy(plain), torch.ones(2, 2, dtype=torch.double)
    zm.shard(model, mesh_of(2), "host=2,node=3", units=[nn.Linear], reduce_dtype=torch.bfloat16)
    for last in (False, False, True):
        with zm.accumulate(model, last=last):
            model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.local, local_part(param, other.grad), rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_copies_for_a_step_on_the_device():
    """AdamW's 12 bytes an element each way; gradients up and parameters down where these lie on the host."""
    case = Case(precision="bf16-wire", micro_batches=1, world=2)
    for host, mix, up, down in (
        ("1", "node=1", 12, 12),
        ("2", "node=3", 12 + 4, 12 + 4),
        ("3d", "node=3d", 12, 12 + 2),
    ):
        with sharded(f"host={host},{mix};step=device", case, mesh_of(2)) as (model, optimizer):
            buffers = [placed for unit in engine_of(model).schedule.placed for placed in unit]
            states = sum(placed.padded for placed in buffers if placed.buffer.trainable) // 2
            gathered = sum(placed.padded for placed in buffers) // 2 * 2 * 2 * (host == "3d")  # forward and backward
            take_step(model, optimizer, case, 0)  # which makes the states
            backward(model, case, 1)
            with zm.traffic_report(model, micro_batches=1) as traffic:
                optimizer.step()
                optimizer.zero_grad()
                backward(model, case, 2)
            lines = {line.direction: line for line in traffic.lines() if line.axis == "host"}
        assert all(line.sent_bytes == line.predicted_bytes for line in lines.values()), (host, mix)
        assert lines["down"].sent_bytes == down * states, host
        if host != "3d":  # whose parameters also come up for each gather, units that stay gathered once
            assert lines["up"].sent_bytes == up * states, host
        else:
            assert up * states < lines["up"].sent_bytes <= up * states + gathered


HOSTED = (
    ("1", "node=3,cluster=1", 2, 4),
    ("1", "node=3,cluster=3", 4, 4),
    ("2", "node=3,cluster=3", 4, 4),
    ("2", "node=2,cluster=1", 2, 4),
    ("2", "node=1,cluster=0", 1, 2),
)
"""The host's stage, those of the axes, and into how many shards these cut gradients and states."""


def require_scheduled(sent: list[tuple[str, str, int]], expected: list[Transfer], layout: Layout) -> None:
    for axis, gathers in product(layout.axes, (True, False)):  # the order between lanes is free
        observed = [call for call in sent if call[2] and call[1] == axis.name and (call[0] == "all_gather") == gathers]
        wanted = [s for s in expected if s.axis is axis and (s.operation == "all_gather") == gathers]
        assert [call[0] for call in observed] == [step.operation for step in wanted]
        assert [call[2] for call in observed] == [step.sent_bytes for step in wanted]
    assert {axis for _, axis, sent_bytes in sent if sent_bytes} <= {axis.name for axis in layout.axes} | {
        "host up",
        "host down",
    }


def micro_batches(model: nn.Module, num: int) -> None:
    for micro in range(num):
        with zm.accumulate(model, last=micro == num - 1):
            model(torch.ones(3, 64) * dist.get_rank()).sum().backward()


@on_ranks(4)
def test_frozen_blocks_before_all_that_trains_are_gathered_for_no_backward():
    """Nor ahead of one: half of six are frozen."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    model[:3].requires_grad_(False)
    model = zm.shard(model, mesh_of(2, 2), "node=3,cluster=1", units=["Linear"], bucket_bytes=0)
    micro_batches(model, 2)
    zm.zero_grad(model)
    with zm.traffic_report(model, micro_batches=2) as traffic:
        micro_batches(model, 2)
    gathers = [call for call in traffic.calls if call.axis == "node" and call.operation == "all_gather"]
    assert len(gathers) == 2 * (6 + 1)  # again: the fourth; the last two are still there
    node = traffic.lines()[0]
    assert node.sent_bytes == node.predicted_bytes


@on_ranks(4)
def test_a_step_that_ends_the_report_counts_with_all_its_refreshes():
    torch.manual_seed(0)
    model = zm.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), mesh_of(2, 2), "node=3,cluster=1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 8)).sum().backward()
    for _ in range(2):  # the first begins with nothing to bring up to date, the second after another step
        with zm.traffic_report(model, micro_batches=1) as traffic:
            optimizer.step()
        refreshed = sum(call.sent_bytes for call in traffic.calls)
        schedule = engine_of(model).schedule
        assert (
            refreshed
            == sum(
                step.sent_bytes
                for placed in schedule.placed
                for each in placed
                for step in each.routes["refresh"].steps
            )
            > 0
        )
