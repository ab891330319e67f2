"""Quantised wires and error feedback on devices that have no Triton: torch's operations code on the device itself."""

from __future__ import annotations

import copy

import torch

import zeromesh as zm
from tests.dist.engine.test_quantised import MICRO_BATCHES, Net, off, train
from tests.dist.parity import mesh_of
from tests.simdev.clean import require_documented
from tests.simdev.ranks import on_devices
from zeromesh import simdev
from zeromesh.engine.api import engine_of

TO_THE_BIT = ["node=3@int8/int4+ef,cluster=3k@int8/int4+ef", "node=2@int8[64]/int4[32]+ef,cluster=0@/int8+ef"]
"""All roundings to nearest, so that nothing is drawn."""

WITHIN_BOUNDS = ["node=3d@int8/int8,cluster=1@/int4", "node=0@/int8,cluster=2@/int4"]
"""Sums are rounded at random, by the device's own draws."""


@on_devices(4)
def test_training_is_that_of_the_host_to_the_bit():
    """Losses of steps in which each message, kept copy and residual takes part, and masters at the end."""
    torch.manual_seed(0)
    base = Net()
    for strategy in TO_THE_BIT:
        on_host = zm.shard(copy.deepcopy(base), mesh_of(2, 2), strategy)
        expected = train(on_host, steps=3)
        with simdev.Checker() as checker:
            model = zm.shard(copy.deepcopy(base), mesh_of(2, 2, device="simdev"), strategy)
            with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
                assert train(model, steps=3) == expected, strategy
            for param, other in zip(model.parameters(), on_host.parameters(), strict=True):
                assert torch.equal(param.local.cpu(), other.local), (strategy, param.full_name)
            report = zm.memory_report(model)
        # Where no parameters are sharded, the words of all steps but the first are not waited for.
        require_documented(checker, strategy, reads=2 + (3 if "=3" in strategy else 1))
        for line in report:
            assert line.predicted_bytes == line.allocated_bytes, strategy
        assert sum(engine_of(model).schedule.memory.workspace.values()) > 0
        for line in traffic.lines(steps=3):  # the first refresh has nothing to do
            assert 0.7 * line.predicted_bytes <= line.sent_bytes <= line.predicted_bytes


@on_devices(4)
def test_gradients_are_within_the_bound_of_their_axes():
    for strategy in WITHIN_BOUNDS:
        with simdev.Checker() as checker:
            worst, zeros = off(strategy, 2, 2, device="simdev")
        assert worst <= 1 < zeros, (strategy, worst)
        require_documented(checker, strategy, reads=2 + 1)
