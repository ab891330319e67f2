"""Constants that measurements leave open, and the recommendation of least regret."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.cli.app import app
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cost.constants import default_constants, provenance
from zeromesh.model.spec import Recomputation
from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.planner.robust import Dependence, least_regret, open_constants
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Strategy

CLUSTER = small_cluster(4, 4)
(CHANNEL,) = (constant for constant in provenance() if constant.name == "channel_share")
GATHERS, SUMS, SLOW = "node=3,cluster=3", "node=1,cluster=1", "node=0,cluster=0"


class Timed(Evaluator):
    """One layout's step as a function of the channel's share, which is 1 s as shipped; the others' are constant."""

    def estimate(self, candidate: Candidate) -> Estimate:
        beside = 0.1 * (self.constants.channel_share / CHANNEL.value - 1)
        step_s = {GATHERS: 1 + beside, SUMS: 1.01, SLOW: 1.03}[str(candidate.strategy)]
        return Estimate(candidate=candidate, step_s=step_s, memory_bytes=1.0, host_memory_bytes=0.0)


def chosen(*strategies: str, within: float = 0.02) -> tuple[str, Dependence | None]:
    work = Workload(seq_len=256, global_batch_tokens=256 * CLUSTER.world)
    evaluator = Timed(small_model(), CLUSTER, work, "zeromesh", default_constants(), 0.08)
    contenders = [
        evaluator.estimate(
            Candidate(strategy=Strategy.parse(each), micro_batch=1, micro_batches=1, recomputation=Recomputation.NONE)
        )
        for each in strategies
    ]
    best, depends = least_regret(evaluator, contenders, within, 1 + within)
    return str(best.candidate.strategy), depends


def test_the_nearly_fastest_layout_that_loses_least_at_its_worst_end() -> None:
    """GATHERS loses 1.0961 / 1.01 at the upper end; SUMS loses 1.01 / .9208 at the lower one, which is more."""
    low, high = (1 + 0.1 * (end / CHANNEL.value - 1) for end in (CHANNEL.low or 0, CHANNEL.high or 0))
    best, depends = chosen(GATHERS, SUMS)
    assert best == GATHERS and depends is not None and high / 1.01 < 1.01 / low
    assert (depends.constant, depends.end, depends.faster) == ("channel_share", CHANNEL.high, SUMS)
    assert depends.lost == pytest.approx(high / 1.01 - 1) and f"takes {1 - 1.01 / high:.1%} less time" in str(depends)
    best, depends = chosen(SUMS, GATHERS)
    assert best == SUMS and depends is not None  # its regret is larger, by less than 2 %
    assert depends.lost == pytest.approx(1.01 / low - 1) and depends.end == CHANNEL.low
    assert chosen(SUMS, GATHERS, within=0.011)[0] == GATHERS


def test_nothing_slower_than_asked_is_recommended_and_small_regrets_are_none() -> None:
    assert chosen(GATHERS, SLOW)[0] == GATHERS == chosen(GATHERS)[0]
    assert chosen(GATHERS)[1] is None is chosen(GATHERS, SUMS, within=0.1)[1]
    assert chosen(SUMS, SLOW, within=0.03) == (SUMS, None)


def test_constants_are_open_where_a_step_depends_on_them() -> None:
    cluster = find_cluster("a800-8x-hdr")
    names = {constant.name for constant in open_constants(cluster, hosted=False)}
    assert names == {"channel_share", "node_passes", "host_issue_s", "link_share.nvlink", "link_share.infiniband"}
    inside = {constant.name for constant in open_constants(cluster.take(8), hosted=True)}
    assert inside == names - {"link_share.infiniband"} | {"host_memory_bytes_per_s"}
    assert not list(open_constants(find_cluster("gloo-laptop"), hosted=True))


def test_a_plan_names_the_constant_and_no_robust_ignores_it() -> None:
    asked = "plan --model llama-7b --cluster a800-8x-hdr --world 16 --seq-len 4096 --global-batch-tokens 65536"
    asked += " --splits none"
    found = {}
    for option in ("--robust", "--no-robust"):
        result = CliRunner().invoke(app, [*asked.split(), "--json", option])
        assert result.exit_code == 0, result.output
        found[option] = json.loads(result.output)
    depends = found["--robust"]["depends"]
    assert found["--no-robust"]["depends"] is None and depends["constant"] == "channel_share"
    assert depends["layout"] == found["--no-robust"]["best"]["strategy"] != found["--robust"]["best"]["strategy"]
    assert found["--robust"]["best"]["step_s"] <= 1.02 * found["--robust"]["fastest"]["step_s"]
    shown = " ".join(CliRunner().invoke(app, asked.split()).output.split())
    assert "the choice depends on the share of a multiprocessor that a collective's channel" in shown
    assert f"less time than {depends['layout']}, which --no-robust recommends" in shown
