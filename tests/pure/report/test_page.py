"""The page: its HTML against a golden file, and its rendering in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.planner import Planned, Workload, plan
from zeromesh.report import plan_page
from zeromesh.report.page import (
    Bar,
    Curve,
    CurveChart,
    Fact,
    FrontChart,
    MemoryChart,
    Page,
    Point,
    Remark,
    Row,
    Section,
    Segment,
    Span,
    Table,
    Tick,
    Timeline,
)

GOLDEN = Path(__file__).with_name("golden.html")


def small_page() -> Page:
    """One of everything, with text that has to be escaped."""
    curves = (
        Curve(name="training", colour="compute", line=((0, 10), (100, 90)), band=((0, 5), (100, 95))),
        Curve(name="held out", colour="communicate", line=((100, 80),)),
    )
    chart = CurveChart(
        key="loss",
        title="Loss",
        curves=curves,
        spans=(Span(kind="spot", left=0, width=100, label="step 1: training 2"),),
        x_ticks=(Tick(at=0.0, label="1"),),
        y_ticks=(Tick(at=50.0, label="1.5"),),
        x_name="step",
        caption="a band",
    )
    segments = (
        Segment(kind="params", left=0.0, width=25.0, label="params: 2 GB", value_bytes=2e9),
        Segment(kind="grads", left=25.0, width=12.5, label="grads: 1 GB", value_bytes=1e9),
    )
    memory = MemoryChart(
        caption="beneath it",
        kinds=("params", "grads"),
        bars=(Bar(label="node=3,cluster=0", total_bytes=3e9, total="3 GB", segments=segments),),
        limit=92.0,
        limit_label="7.36 GB usable of 8 GB",
        limit_bytes=7.36e9,
    )
    points = (
        Point(x=20.0, y=10.0, label="small", step_s=2.0, memory_bytes=1e9),
        Point(x=60.0, y=90.0, label="fast", step_s=1.5, memory_bytes=3e9, best=True),
    )
    ticks = (Tick(at=0.0, label="0 B"),), (Tick(at=50.0, label="1.75 s"),)
    row = Row(name="compute", busy="90%", spans=(Span(kind="compute", left=0, width=90, label="forward"),))
    candidates = Table(heads=("strategy", "step"), rows=(("node=3,cluster=0", "1.5 s"),))
    traffic = Table(heads=("axis", "sent"), rows=(("node", "1 GB"),))
    return Page(
        title="model <a> & b",
        subtitle="4 node x 2 cluster",
        facts=(Fact(label="step time", value="1.5 s", key="step_s"),),
        charts=(chart,),
        memory=memory,
        front=FrontChart(points=points, x_ticks=ticks[0], y_ticks=ticks[1], limit=92.0),
        timeline=Timeline(rows=(row,), ticks=(Tick(at=0.0, label="0 s"),), caption="1.5 s"),
        sections=(
            Section(key="candidates", title="Candidates", table=candidates),
            Section(key="traffic", title="Traffic of the best", table=traffic),
        ),
        why=(Remark(name="ZeRO-1", strategy="node=1,cluster=1", outcome="excluded", text="does not fit"),),
        notes=("a note",),
    )


def test_html_equals_the_golden_file(planned: Planned) -> None:
    """`UPDATE_GOLDEN=1 pytest` writes it anew; look at the difference before committing."""
    html = small_page().to_html()
    main = html[html.index("<main>") : html.index("</main>")] + "</main>\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(main)
    assert main == GOLDEN.read_text()
    assert "<title>model &lt;a&gt; &amp; b</title>" in html and "<a>" not in html
    assert not re.search(r"https?://|<script|<link|@import|url\(", plan_page(planned))  # it needs no network


@pytest.fixture(scope="module")
def planned() -> Planned:
    cluster = small_cluster(4, 4, memory_bytes=2.2e9, outer_bytes_per_s=2e9)
    return plan(small_model(), cluster, Workload(seq_len=256, global_batch_tokens=256 * 16 * 4), trace=True)


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium or chrome on this machine")
    return found


def run_browser(browser: str, page: Path, profile: Path, *arguments: str) -> str:
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-extensions --no-first-run"
    command = [browser, *options.split(), "--hide-scrollbars", f"--user-data-dir={profile}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_browser_shows_the_plan(browser: str, planned: Planned, tmp_path: Path) -> None:
    """Values are read from the page as the browser has parsed it."""
    page = tmp_path / "plan.html"
    page.write_text(plan_page(planned))
    dom = run_browser(browser, page, tmp_path / "profile", "--dump-dom")
    best = planned.best.simulation
    assert f'data-key="strategy"><b>{best.strategy}</b>' in dom
    totals = [float(value) for value in re.findall(r'data-total-bytes="([\d.e+]+)"', dom)]
    assert totals == [choice.simulation.memory.total for choice in planned.candidates]
    steps = [float(value) for value in re.findall(r'data-step-s="([\d.e+-]+)"', dom)]
    assert steps == [point.step_s for point in planned.front]
    assert 'data-resource="compute"' in dom
    for reason in planned.why:
        assert reason.strategy in dom
    rows = re.findall(r"<tr>", dom)
    assert len(rows) == 2 + len(planned.candidates) + len(best.axes)
