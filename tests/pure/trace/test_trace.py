import json

import pytest

from zeromesh.trace import Event, Trace


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
