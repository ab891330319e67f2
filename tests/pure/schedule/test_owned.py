"""Buckets of whole tensors in a schedule, and the order in which they are stepped on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from zeromesh.schedule import Bucket, BucketSteps, FlatBuffer, Role, Schedule, Shipment, Unit
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.strategy import Layout

LAYOUT = Layout.of("node=3,cluster=1", [("node", 2), ("cluster", 2)])
NODE, CLUSTER = LAYOUT.axes
ROLES = {"": Role.RESIDENT, "a": Role.BLOCK, "b": Role.BLOCK}


def schedule() -> Schedule:
    buffer = FlatBuffer(numel=64, param_dtype="bf16", master_dtype="fp32")
    return Schedule.of(LAYOUT, [Unit(name=name, role=role, buffers=(buffer,)) for name, role in ROLES.items()])


def bucket(numel: int) -> Bucket:
    return Bucket(
        there=(Shipment(axis=CLUSTER, numel=2 * numel, wire="fp32"), Shipment(axis=NODE, numel=numel, wire="fp64")),
        back=(Shipment(axis=NODE, numel=numel, wire="fp32"),),
    )


@dataclass
class Logged:
    """What was asked for, in order; a ticket is the call that it is for."""

    log: list[str] = field(default_factory=list)
    fails: bool = False

    def collect(self, bucket: int) -> str:
        self.log.append(f"collect {bucket}")
        return f"collected {bucket}"

    def update(self, bucket: int) -> str:
        if self.fails:
            raise ValueError("a step that fails")
        self.log.append(f"update {bucket}")
        return f"back {bucket}"

    def wait(self, ticket: str) -> None:
        self.log.append(f"wait {ticket}")


def positions(log: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    place = {entry: index for index, entry in enumerate(log)}
    for number in range(sum(entry.startswith("update") for entry in log)):
        yield number, place


@pytest.mark.parametrize("buckets", range(7))
def test_each_bucket_is_there_before_its_step_and_back_at_the_end(buckets: int) -> None:
    backend = Logged()
    BucketSteps[int, str]().step(backend, range(buckets))
    assert len(set(backend.log)) == len(backend.log) == 5 * buckets - buckets
    for number, place in positions(backend.log):
        order = [place[f"{verb} {number}"] for verb in ("collect", "wait collected", "update", "wait back")]
        assert order == sorted(order)
        if number + 2 < buckets:
            # The next two are on their way while this one is stepped; before a third comes, the one before is back.
            assert place[f"collect {number + 1}"] < place[f"update {number}"] < place[f"collect {number + 2}"]
        if number + 3 < buckets:
            assert place[f"wait back {number}"] < place[f"collect {number + 3}"]


def test_what_a_step_that_raised_has_left_is_waited_for() -> None:
    steps, backend = BucketSteps[int, str](), Logged(fails=True)
    with pytest.raises(ValueError, match="a step that fails"):
        steps.step(backend, range(3))
    assert backend.log == ["collect 0", "collect 1", "wait collected 0"]
    steps.settle(backend)
    assert backend.log[3:] == ["wait collected 1"]


def test_a_step_after_one_that_raised_waits_for_its_own_buckets() -> None:
    steps, backend = BucketSteps[int, str](), Logged(fails=True)
    with pytest.raises(ValueError, match="a step that fails"):
        steps.step(backend, range(3))
    backend.log, backend.fails = [], False
    steps.step(backend, range(3))
    assert backend.log[0] == "wait collected 1"  # of the step before
    for number, place in positions(backend.log[1:]):
        assert place[f"collect {number}"] < place[f"wait collected {number}"] < place[f"update {number}"]


def test_optimizers_keep_their_numbers() -> None:
    owned = schedule().with_owned([bucket(1), bucket(2)]).with_owned([bucket(3)])
    assert owned.reordered([0, 2, 1]).buckets == owned.buckets == ((bucket(1), bucket(2)), (bucket(3),))
    assert owned.without_owned(0).buckets == ((), (bucket(3),))


def test_bytes_of_all_optimizers_are_counted() -> None:
    plain = sent_bytes_per_axis(schedule(), micro_batches=2)
    owned = schedule().with_owned([bucket(1), bucket(2)]).with_owned([bucket(10)])
    found = sent_bytes_per_axis(owned, micro_batches=2)
    assert {name: found[name] - plain[name] for name in plain} == {"cluster": 13 * 8, "node": 13 * 12}
