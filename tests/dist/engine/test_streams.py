"""Every access of the engine's streams to its buffers is ordered by an event; without a device, on forged streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

import zeromesh as zm
from tests.dist.engine.delays import without_start_of_streams
from tests.dist.engine.reference import Case, backward, evaluate, mesh_of, sharded
from tests.dist.engine.streams import Streams, forged_streams
from tests.dist.engine.test_delays import FAULTS, STRATEGIES
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.observe.report import persistent, working_buffers

CASE = Case(steps=2, micro_batches=2, optimizer="both", weighted=True)


def trained(strategy: str, leave_out: Callable[[], AbstractContextManager[None]] = nullcontext) -> Streams:
    with forged_streams() as streams, leave_out(), sharded(strategy, CASE, mesh_of(2, 2)) as (model, optimizer):
        engine = engine_of(model)
        held = [tensor for unit in engine.units for buffer in unit.buffers for tensor in persistent(buffer).values()]
        scratch = [tensor for s in engine.backend.scratch.values() for tensor in (s.staging, s.workspace)]
        streams.watch([*held, *working_buffers(engine), *scratch])
        for step in range(CASE.steps):
            backward(model, CASE, step)
            evaluate(model, CASE, 0)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        engine.at_rest()
        del engine
    return streams


@pytest.mark.parametrize("strategy", STRATEGIES[1::2])
@on_ranks(4)
def test_every_access_is_ordered(strategy):
    streams = trained(strategy)
    assert len(streams.all) > 2 and streams.checked > 500, streams.checked
    assert not streams.races, sorted(set(streams.races))[:8]


ON_STREAMS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = FAULTS | {
    "the computation, before a lane reads its results": ("node=3,cluster=1", without_start_of_streams)
}


@pytest.mark.parametrize("wait", ON_STREAMS)
@on_ranks(4)
def test_a_wait_left_out_is_found(wait):
    strategy, leave_out = ON_STREAMS[wait]
    assert trained(strategy, leave_out).races
