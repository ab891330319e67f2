"""The page: its HTML against a golden file, and its rendering in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.model.presets import preset
from zeromesh.model.spec import Recomputation
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.plan import Planned, plan
from zeromesh.planner.workload import Workload
from zeromesh.report.build import plan_page, search_note, simulation_page, traffic_table
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
    Span,
    Table,
    Tick,
    Timeline,
)
from zeromesh.strategy import Strategy

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
        caption="a band",
    )
    segments = (
        Span(kind="params", left=0.0, width=25.0, label="params: 2 GB", value_bytes=2e9),
        Span(kind="grads", left=25.0, width=12.5, label="grads: 1 GB", value_bytes=1e9),
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


def test_the_page_has_the_values_of_the_plan(planned: Planned) -> None:
    html, best = plan_page(planned), planned.best.simulation
    assert f'data-key="strategy"><b>{best.strategy}</b>' in html and 'data-resource="compute"' in html
    totals = [float(value) for value in re.findall(r'data-total-bytes="([\d.e+]+)"', html)]
    assert totals == [choice.simulation.memory.total for choice in planned.candidates]
    steps = [float(value) for value in re.findall(r'data-step-s="([\d.e+-]+)"', html)]
    assert steps == [point.step_s for point in planned.found.front]
    assert all(reason.strategy in html for reason in planned.why)
    assert html.count("<tr>") == 2 + len(planned.candidates) + len(best.axes)


def test_nothing_is_wider_than_a_phone(browser: str, planned: Planned, tmp_path: Path) -> None:
    """Tables scroll by themselves. The page has no script, so one around it measures."""
    deep = find_cluster("frontier-mi250x").take(64)
    work = Workload(seq_len=4096, global_batch_tokens=64 * 4096)
    strategy = Strategy.parse("package=3,node[2]=3,node[2]=2,cluster[4]=2,cluster[*]=0")
    pages = plan_page(planned), simulation_page(simulate_choices(preset("llama-7b"), deep, work, strategy), deep)
    for number, html in enumerate(pages):
        around = tmp_path / f"{number}.html"
        measure = "document.title = document.querySelector('iframe').contentDocument.documentElement.scrollWidth"
        frame = f'<iframe srcdoc="{escape(html)}" style="width: 360px; border: 0"></iframe>'
        around.write_text(f"<title></title>{frame}<script>onload = () => {{ {measure} }}</script>")
        dom = run_browser(browser, around, tmp_path / "profile", "--dump-dom")
        assert "<title>360</title>" in dom


def test_terms_are_explained_and_points_labelled_where_they_stand(planned: Planned) -> None:
    html = plan_page(planned)
    for term in ("MFU", "exposed", "activations", "stage", "strategy"):
        assert re.search(rf'<abbr tabindex="0" title="[^"]+">{term}</abbr>', html), term
    assert html.count("<li>") == len(planned.found.front) and f"<b>{len(planned.found.front)}</b></span>" in html


def test_captions_gaps_and_traffic(planned: Planned) -> None:
    """A plan's trace is cut to four of them, a simulation's holds all."""
    workload = Workload(seq_len=256, global_batch_tokens=256 * 16 * 8, micro_batch=1)
    cluster, strategy = small_cluster(4, 4), Strategy.parse("node=3,cluster=1")
    choices = simulate_choices(small_model(), cluster, workload, strategy, top=2, trace=True)
    assert "micro-batches, the others are alike" not in simulation_page(choices, cluster)
    cut = plan(small_model(), cluster, workload, trace=True)
    assert "; 4 of 8 micro-batches, the others are alike" in plan_page(cut)
    # The gap is of the best's step.
    for bound, proof in (
        (0.9, "A layout that was not simulated can be at most 10.0% faster than the fastest."),
        (1.0, "No layout is faster than the fastest: this is proven."),
    ):
        found = replace(planned.found, bound_s=bound * planned.found.best.step_s)
        assert search_note(replace(planned, found=found)).endswith(proof)
    # Traffic names waits over several axes.
    cluster = find_cluster("a800-8x-hdr").take(16)
    workload = Workload(seq_len=4096, global_batch_tokens=4096 * 16, micro_batch=1, recomputation=Recomputation.FULL)
    strategy = Strategy.parse("node=3,cluster=3")
    (choice,) = simulate_choices(preset("llama-7b"), cluster, workload, strategy, engine="fsdp")
    *axes, joint = traffic_table(choice).rows
    assert [row[0] for row in axes] == ["node", "cluster"]
    assert joint[0] == "node+cluster" and joint[-1] != "0 s"
