"""The result of a rehearsal: where memory ends, where ranks part, and how it is shown."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from zeromesh.rehearsal.compare import failures_of
from zeromesh.rehearsal.result import Call, HostRead, Launches, Memory, Peak, Place, Rehearsal
from zeromesh.rehearsal.show import print_rehearsal, rehearsal_page
from zeromesh.trace import MemoryLine, TrafficLine


def peak(phase, unit, allocated, reserved):
    return Peak(place=Place(phase=phase, unit=unit), allocated_bytes=allocated, reserved_bytes=reserved)


SHARD, FORWARD, BACKWARD = peak("shard", None, 40, 50), peak("forward", "h.0", 70, 80), peak("backward", "h.1", 90, 110)
FOUND = Rehearsal(
    model="Net",
    strategy="node=3",
    mesh=(("node", 8),),
    world=8,
    rank=0,
    micro_batches=2,
    cluster="here",
    memory=Memory(
        kinds=(MemoryLine(kind="params", predicted_bytes=30, allocated_bytes=30),),
        rest_bytes=35,
        peaks=(SHARD, FORWARD, BACKWARD),
        growth=(SHARD, FORWARD, BACKWARD),
        overhead_bytes=5,
        limit_bytes=200,
    ),
    axes=(TrafficLine(axis="node", size=8, stage="3", predicted_bytes=9, sent_bytes=9, collectives=3),),
    launches=(
        Launches(unit="h.0", lane="reduce", count=2),
        Launches(unit="h.1", lane="reduce", count=3),
        Launches(unit="", lane="reduce", count=9),
    ),
    blocks=("h.0", "h.1"),
    host_reads=(HostRead(what="aten::item", where="train.py:7", count=2),),
    calls=(Call(axis="node", operation="all_gather", sent_bytes=7),),
    host_s=0.01,
    step_s=0.5,
    exposed_s=0.1,
)


def limited(limit_bytes):
    return replace(FOUND, memory=replace(FOUND.memory, limit_bytes=limit_bytes))


def test_memory_at_its_peak_and_where_it_ends() -> None:
    assert (FOUND.memory.peak, FOUND.memory.peak_reserved_bytes) == (BACKWARD, 110)
    assert FOUND.memory.activations_bytes == 90 - 35
    assert limited(115).memory.fails_at is None  # 110 reserved and 5 beside
    assert limited(114).memory.fails_at == BACKWARD
    assert limited(84).memory.fails_at == FORWARD  # the first one, though the later one needs more
    assert limited(None).memory.fails_at is None
    # Launches are the most of any block.
    assert FOUND.launches_per_unit() == {"reduce": 3}  # the root is no block


def test_ranks_part_where_one_issues_another_collective_or_none() -> None:
    other = replace(FOUND, rank=5)
    assert failures_of([FOUND, other]) == ()
    (said,) = failures_of([FOUND, replace(other, calls=())])
    assert "as number 1 of a step all_gather over node that sends 7 bytes on rank 0, none on rank 5" in said
    (said,) = failures_of([FOUND, replace(other, calls=(replace(FOUND.calls[0], sent_bytes=8),))])
    assert "sends 8 bytes on rank 5" in said
    # Each failure has its rank where there are several.
    broken = replace(limited(84), rank=5, failures=("in h.0: no",), races=("a race",))
    said = failures_of([FOUND, broken])
    assert said[0] == "rank 5: in h.0: no"
    assert said[1].startswith("rank 5: node=3 does not fit: it needs 115 B of a device of here, and 84 B are usable")
    assert said[2] == "rank 5: race: a race"


def test_terminal_and_page_say_the_same() -> None:
    out = io.StringIO()
    failures = failures_of([limited(84)])
    print_rehearsal([limited(84)], failures, Console(file=out, width=400))
    page = rehearsal_page([limited(84)], failures)
    for text in ("rank 0 of 8", "train.py:7", "the backward of h.1", "it runs out in the forward of h.0"):
        assert text in out.getvalue() and text in page
    assert "would fail: node=3 does not fit" in out.getvalue()
    assert 'data-key="step_s"' in page and 'class="limit"' in page
    # A page without a cluster has no limit.
    page = rehearsal_page([replace(limited(None), cluster="", step_s=None, exposed_s=None)], ())
    assert 'class="limit"' not in page and "--cluster NAME" in page and "nothing was found that would fail" in page


def test_the_card_and_the_bar_of_the_peak_say_one_number() -> None:
    page = rehearsal_page([replace(FOUND, micro_batches=1)], ())
    (card,) = re.findall(r'data-key="peak"><b>([^<]+)</b>', page)
    assert card == "95 B" and re.findall(r'class="total">([^<]+)<', page)[-1] == card  # 90 and 5 beside
    assert "1 micro-batch a step" in page
