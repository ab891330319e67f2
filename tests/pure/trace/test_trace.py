import json

import pytest

from zeromesh.trace import Event, Trace, compare


def event(name: str, start: float, end: float, **fields) -> Event:
    fields = {"kind": "communicate", "resource": "gather/node", "axis": "node", "sent_bytes": 8.0} | fields
    return Event(name=name, start_s=start, end_s=end, **fields)


TRACE = Trace(
    label="node=3 on two",
    events=(
        event(
            "forward", 0.0, 1.0, kind="compute", resource="compute", axis=None, sent_bytes=0.0, unit="", micro_batch=0
        ),
        event("unshard all_gather", 0.5, 0.75, unit="layers.0"),
        event("reduce all_reduce", 1.0, 3.0, resource="reduce/cluster", axis="cluster", unit="layers.0"),
    ),
    memory=((0.0, 10.0), (1.0, 30.0)),
)


def test_sums_by_field():
    assert TRACE.step_s == 3.0 and Trace(label="", events=()).step_s == 0.0
    assert TRACE.seconds(kind="communicate") == 2.25
    assert TRACE.seconds(unit="layers.0", axis="cluster") == 2.0
    assert TRACE.sent_bytes() == 16.0
    assert TRACE.sent_bytes(axis="node") == 8.0
    # The Chrome form has a row per resource and microseconds.
    events = json.loads(TRACE.to_json())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted(rows.values()) == ["compute", "gather/node", "reduce/cluster"]
    assert [rows[s["tid"]] for s in slices] == ["compute", "gather/node", "reduce/cluster"]
    assert slices[1]["ts"] == pytest.approx(5e5) and slices[1]["dur"] == pytest.approx(2.5e5)
    assert slices[0]["name"] == "forward root" and slices[1]["name"] == "unshard all_gather layers.0"
    counters = [e for e in events if e["ph"] == "C"]
    assert [c["args"]["bytes"] for c in counters] == [10.0, 30.0]
    assert all({"ph", "pid"} <= set(e) for e in events)


def test_two_traces_side_by_side():
    slices = tuple(
        event("forward", at, at + 0.25, kind="compute", resource="compute", axis=None, sent_bytes=0.0, unit="")
        for at in (0.0, 0.5)
    )
    measured = Trace(label="measured", events=(*slices, event("unshard all_gather", 0.25, 0.75, unit="layers.0")))
    lines = {(line.kind, line.name): line for line in compare(TRACE, measured)}
    forward, gather = lines["compute", "forward"], lines["communicate", "unshard all_gather"]
    assert (forward.predicted_s, forward.measured_s) == (1.0, 0.5)
    assert (forward.predicted_count, forward.measured_count) == (1, 1)  # two slices of one forward
    assert (gather.predicted_s, gather.measured_s, gather.measured_bytes) == (0.25, 0.5, 8.0)
    assert compare(TRACE, measured)[0].name == "reduce all_reduce"  # 2 s that were not measured at all
