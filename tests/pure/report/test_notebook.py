"""Values as a notebook shows them: a short text, and the tables and pictures of the pages."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape

import pytest

import zeromesh as zm
from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.planner.plan import Planned, plan
from zeromesh.report import notebook
from zeromesh.trace import Lines, MemoryLine, TrafficLine

WORK = zm.Workload(seq_len=256, global_batch_tokens=256 * 16 * 4)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan(small_model(), small_cluster(4, 4), WORK, trace=True)


def shown(value: object) -> str:
    """The page in the frame."""
    html = value._repr_html_()
    (page,) = re.findall(r'^<iframe srcdoc="([^"]*)"[^>]*></iframe>$', html, re.DOTALL)
    return unescape(page)


def test_the_text_of_public_values_is_short(planned: Planned) -> None:
    cluster, choice = planned.cluster, planned.best
    values = [planned, planned.plan, planned.model, planned.found, planned.trace, cluster, cluster.device]
    values += [cluster.levels[0], choice, choice.candidate, choice.simulation, WORK, choice.candidate.strategy]
    values += [zm.Sharding(strategy="node=3", mesh={"node": 8})]
    for value in values:
        assert repr(value).startswith(f"{type(value).__name__}(") and len(repr(value)) < 500
    assert repr(WORK) == "Workload(seq_len=256, global_batch_tokens=16384)"
    assert repr(zm.Strategy.parse("node=3,cluster=1")) == "Strategy('node=3,cluster=1')"
    assert " a step, " in repr(choice)


def test_plans_choices_and_traces_show_their_pages(planned: Planned) -> None:
    best = str(planned.best.candidate.strategy)
    page = shown(planned)
    assert best in page and 'id="front"' in page and 'id="why"' in page and 'id="timeline"' in page
    assert best in shown(planned.best) and 'id="memory"' in shown(planned.best)
    page = shown(planned.plan)
    assert best in page and 'id="memory"' in page and "sent per device and step" in page
    assert 'data-resource="compute"' in shown(planned.trace)
    bare = zm.Plan(strategy=zm.Strategy.parse("node=3"), mesh=(("node", 8),))
    assert "node=3" in shown(bare) and 'id="memory"' not in shown(bare)


def test_reports_are_tables() -> None:
    lines = Lines([MemoryLine(kind="params", predicted_bytes=1000, allocated_bytes=1024)])
    assert repr(lines).splitlines()[1].split() == ["params", "1,000", "1,024", "device"]
    assert len({len(line) for line in repr(lines).splitlines()}) == 1
    traffic = Lines([TrafficLine(axis="<node>", size=2, stage="3", predicted_bytes=5, sent_bytes=5, collectives=1)])
    assert "direction" not in repr(traffic)  # the host's alone
    assert "<td>&lt;node&gt;</td>" in traffic._repr_html_() and repr(Lines()) == ""


def test_names_of_the_package_bring_the_pages_where_ipython_runs() -> None:
    stands_in = "import sys, types; sys.modules['IPython'] = types.ModuleType('IPython')"
    code = f"{stands_in}; import zeromesh as zm; print(hasattr(zm.Plan, '_repr_html_'))"
    with_ipython = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    without = code.replace("sys.modules['IPython']", "_")
    plain = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=True)
    assert (with_ipython.stdout, plain.stdout) == ("True\n", "False\n")
    assert notebook.framed('<a b="c">').startswith('<iframe srcdoc="&lt;a b=&quot;c&quot;&gt;"')
