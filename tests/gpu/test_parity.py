"""The engine on a device, with its streams and events: four ranks share it and exchange over its own collectives.

The same comparison with plain training as on the host, under the same delays: here they spin on the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from tests.dist.engine.delays import delays, without_order_of_lanes, without_wait
from tests.dist.engine.test_delays import STRATEGIES
from tests.dist.parity import Case, Unequal, check_case, require_same, trained
from tests.dist.pool import Pool, on_ranks
from tests.gpu.conftest import NATIVE, TIMEOUT_S
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.comm import lane

CASE = Case(steps=2, micro_batches=2, optimizer="both", device="cuda")
MIXES = [notation(mix) for mix in (*mixes(2), *(mix for mix in mixes(2, kept=True) if any("k" in s for s in mix)))]
CALL_S = TIMEOUT_S - 20.0


@pytest.mark.parametrize("strategy", MIXES)
@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_every_mix_on_two_axes(strategy):
    with delays(1, device="cuda"):
        check_case(strategy, CASE, 2, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4, timeout_s=CALL_S)
def test_over_copies_on_the_host(strategy):
    with delays(1, device="cuda"):
        check_case(strategy, CASE, 2, 2)


@pytest.mark.parametrize(
    "strategy",
    [
        *("host=1,node=3,cluster=1", "host=2,node=1,cluster=0", "host=3,node=3,cluster=2", "host=3d,node=3,cluster=3h"),
        *("host=3,node=3,cluster=3", "host[50%]=1,node=3,cluster=3", "node=3,cluster=3h"),
    ],
)
@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_shards_in_the_host_s_memory(strategy):
    with delays(2, device="cuda"):
        check_case(strategy, replace(CASE, evaluate=True), 2, 2)
        check_case(strategy, replace(CASE, precision="bf16", optimizer="adamw", clip=0.5), 2, 2)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_late_or_early_the_numbers_are_those_of_plain_training(strategy, seed):
    with delays(seed, device="cuda") as drawn:
        check_case(strategy, replace(CASE, evaluate=True, weighted=True), 2, 2)
    assert drawn.count > 100, drawn


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-wire"])
@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=3,cluster=1", "node=1,cluster=2", "node=3,cluster=3"])
@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_precisions(strategy, precision):
    optimizer, clip = ("sgd", None) if precision == "fp32" else ("adamw", 0.5)
    with delays(3, device="cuda"):
        check_case(strategy, replace(CASE, precision=precision, optimizer=optimizer, clip=clip), 2, 2)


@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_quantised_wires_give_the_same_bits_late_or_early():
    pytest.importorskip("triton")
    case = replace(CASE, precision="fp32")
    wires = "node=3@int8/int4,cluster=0@/int8", "node=3@int8/int8+ef,cluster=1@/int4+ef", "node=3,cluster=3k@int8"
    for strategy in wires:
        expected = trained(strategy, case, 2, 2)
        with delays(4, device="cuda"):
            require_same(strategy, trained(strategy, case, 2, 2), expected)


LATE_S = 0.05
"""More than the host is behind the device."""


@contextmanager
def without_start_of_streams() -> Iterator[None]:
    """On CUDA: lanes do not wait for the computation before they read its results."""

    def put(self, job, ticket):
        with self._stream:
            error = self.run(job, ticket.label)
        ticket._finish(error, self._stream.record_event(), self._stream.device, job)

    with mock.patch.object(lane._Stream, "put", put):
        yield


ON_STREAMS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "a gather, before its parameters are used": ("node=3,cluster=1", partial(without_wait, "ticket")),
    "a reduction, before its slot is filled again": ("node=3,cluster=3", partial(without_wait, "taking")),
    "a reduction, before its sums are read": ("node=3,cluster=1", partial(without_wait, "reducing")),
    "the lane before, on its way to the next": ("node=3,cluster=1", without_order_of_lanes),
    "the computation, before a lane reads its results": ("node=3,cluster=1", without_start_of_streams),
}


@pytest.mark.parametrize("wait", ON_STREAMS)
@on_ranks(4, timeout_s=CALL_S, backend=NATIVE)
def test_a_wait_left_out_shows(wait):
    strategy, leave_out = ON_STREAMS[wait]
    with pytest.raises(Unequal), leave_out(), delays(4, lane_s=LATE_S, point_s=LATE_S / 5, device="cuda"):
        check_case(strategy, CASE, 2, 2)


def sanitized(strategy: str) -> None:
    """On a rank: torch's own search for accesses that no event orders; it raises where it finds any.

    It takes the input of a gather in place, this rank's part, to be written: here nobody reads it outside of gathers,
    since masters in fp32 are other tensors.
    """
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    try:
        check_case(strategy, replace(CASE, precision="bf16", optimizer="adamw"), 2, 2)
    finally:
        _sanitizer.cuda_sanitizer.disable()


def test_torch_finds_no_unordered_accesses():
    pool = Pool()  # of its own: hooks of the sanitizer stay in a process
    try:
        for strategy in ("node=3,cluster=1", "node=0,cluster=0", "node=1,cluster=2", "node=3,cluster=3k"):
            pool.run(4, sanitized, strategy, timeout_s=TIMEOUT_S / 2, backend=NATIVE)
    finally:
        pool.remove()
