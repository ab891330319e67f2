"""Published tables against predictions. Bounds are the project's goals, or the value reached, where one is missed."""

from functools import cache

import pytest
from typer.testing import CliRunner

from validation.__main__ import app
from validation.assumptions import Assumption, assumed, assumptions
from validation.errors import ERRORS
from validation.page import remarks
from validation.row import Row, published
from validation.score import GOALS, score
from validation.tables import SOURCES
from validation.tables.amsp import _ENGINES, AMSP_LAYOUT, amsp_step
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.report.uncertainty import error_of_steps, published_errors, uncertainty_lines

SOURCE_OF = {
    **dict.fromkeys(("AMSP Table V", "AMSP Fig. 12"), "amsp"),
    "AMSP layouts, one engine": "amsp-layouts",
    "AMSP MFU": "amsp-mfu",
    **dict.fromkeys(("LLM Foundry, one node", "LLM Foundry, several nodes"), "llm-foundry"),
    **dict.fromkeys(("torchtitan", "torchtitan memory"), "torchtitan"),
    "ZeRO++ over ZeRO-3": "zeropp",
    "PaRO": "paro",
    "Frontier": "frontier",
    "InternEvo memory": "internevo",
    "Galvatron memory": "galvatron",
    "torchtitan, cp over none": "torchtitan-cp",
    "Collectives of tp and ep": "cut-collectives",
    "InternEvo memory, tp and pp": "internevo-cut",
    "Galvatron memory, tp and pp": "galvatron-cut",
    **dict.fromkeys(("Megatron Bridge", "Megatron Bridge, tp and pp"), "bridge"),
    "Collectives of 8 H100": "symmetric",
}


@cache
def source_rows(name: str) -> list[Row]:
    """Each row once; for two tables also the alternatives that a paper leaves open, which span a row's range."""
    with pytest.MonkeyPatch.context() as patch:
        if name not in ("amsp-layouts", "galvatron"):
            patch.setattr(Assumption, "choices", property(lambda self: (self.value,)))
        return list(SOURCES[name]())


class Tables:
    """Rows by table, each source predicted when it is first asked for."""

    def __getitem__(self, table: str) -> list[Row]:
        return [row for row in source_rows(SOURCE_OF[table]) if row.table == table]

    def __iter__(self):
        return iter(SOURCE_OF)

    def values(self):
        return [self[table] for table in SOURCE_OF]


@pytest.fixture
def tables() -> Tables:
    return Tables()


MET = [
    "AMSP Fig. 12",
    "LLM Foundry, several nodes",
    "torchtitan",
    "torchtitan memory",
    "InternEvo memory",
    "Galvatron memory",
]


@pytest.mark.parametrize("table", [*MET, "ZeRO++ over ZeRO-3"])
def test_goals_that_are_met_stay_met(tables, table):
    result = score(table, tables[table])
    assert result.meets_goal, result
    assert result.rank is None or result.rank > (0.6 if table.startswith("ZeRO++") else 0.95)


#: The median and the 90th percentile of each table that misses its goal.
REACHED = {
    "AMSP Table V": (0.051, 0.089),
    "AMSP MFU": (0.069, 0.116),
    "LLM Foundry, one node": (0.038, 0.126),
    "PaRO": (0.163, 1.26),
    "Frontier": (0.175, 0.285),
    "AMSP layouts, one engine": (0.219, 0.258),
    "torchtitan, cp over none": (0.307, 0.364),
    "Collectives of tp and ep": (0.139, 0.360),
    "InternEvo memory, tp and pp": (0.026, 0.139),
    "Galvatron memory, tp and pp": (0.038, 0.157),
    "Megatron Bridge": (0.106, 0.179),
    "Megatron Bridge, tp and pp": (0.258, 0.334),
    "Collectives of 8 H100": (1.348, 2.989),
}


@pytest.mark.parametrize("table", REACHED)
def test_goals_that_are_missed_are_missed_by_no_more(tables, table):
    """One that is met moves to the test above."""
    result = score(table, tables[table])
    median, p90 = REACHED[table]
    assert not result.meets_goal
    assert result.median <= median and result.p90 <= p90, result
    if table == "AMSP Table V":
        assert result.winners[0] == result.winners[1] > 0


def test_galvatrons_activations_are_within_a_percent_and_states_within_three(tables):
    rows = [r for r in tables["Galvatron memory"] if r.in_scope]
    saved = [r for r in rows if r.label.startswith("activations")]
    exact = [r for r in saved if "peak" not in r.label]
    assert len(saved) == 18 and len(exact) == 10
    assert all(abs(row.error) < 0.01 for row in exact)
    states = [r for r in rows if r.label.startswith("model state")]
    assert len(states) == 8
    assert all(abs(row.error) < 0.03 for row in states)


def test_orders_and_ranges_come_out(tables):
    tied = "7B, partial 1/16 trainable, 32 GPUs: NIG over NGG"
    for row in tables["PaRO"]:
        if row.label == tied:  # its remark
            assert row.predicted == pytest.approx(1, abs=0.01)
        elif row.in_scope:
            assert row.predicted > 1, row.label
    # With gathers exposed the ablation of layouts comes out: its remark says so, and the end of its range.
    rows = tables["AMSP layouts, one engine"]
    assert [row.high / row.measured for row in rows] == pytest.approx([0.922, 0.923, 0.977], abs=0.01)


def test_every_published_row_appears_once(tables):
    assert len(tables["AMSP Table V"]) + len(tables["AMSP Fig. 12"]) == len(published("amsp_a800"))
    foundry = tables["LLM Foundry, one node"] + tables["LLM Foundry, several nodes"]
    assert len(foundry) == len(published("llm_foundry_mpt_a100"))
    assert len(tables["torchtitan"]) == len(published("torchtitan_published"))
    assert len(tables["PaRO"]) == len(published("paro_a100"))
    internevo = tables["InternEvo memory"] + tables["InternEvo memory, tp and pp"]
    assert len(internevo) == len(published("internevo_memory_a800"))


def test_only_the_rows_of_the_fit_are_marked_fitted_and_what_is_out_of_scope_says_why(tables):
    every = [row for rows in tables.values() for row in rows]
    fitted = [row for row in every if row.fitted]
    assert {row.table for row in fitted} == {"LLM Foundry, one node", "Collectives of tp and ep"}
    models = {row.label.split(",")[0] for row in fitted if row.table.startswith("LLM")}
    assert models == {"1b", "7b", "30b"}
    out = [row for row in every if not row.in_scope]
    assert len(out) > 20
    assert all(len(row.excluded) > 5 for row in out)
    assert set(GOALS) <= set(tables) == set(remarks())


def test_assumptions_are_complete():
    assert all(a.why and a.value for a in assumptions())
    assert len({(a.table, a.name) for a in assumptions()}) == len(assumptions())
    assert assumed("zeropp", "18B").choices[0] == assumed("zeropp", "18B").value
    # An unknown table names the nearest.
    result = CliRunner().invoke(app, ["internvo"])
    assert result.exit_code != 0
    assert "did you mean internevo" in str(result.exception)
    # Plans say how far their kind of prediction was off.
    time, ratio, memory, *_ = published_errors()
    assert [*uncertainty_lines(WHOLE)] == [str(time), str(ratio), str(memory)]
    assert str(time).startswith("predicted step times of other engines: ") and time.rows > 100
    # Steps of other degrees have the error of the nearest published steps.
    assert error_of_steps(WHOLE) == time
    nearest = error_of_steps(Parallel(tp=2))
    assert nearest is not None and nearest.degrees == ("tp", "pp") and error_of_steps(Parallel(ep=2)) is None
    lines = list(uncertainty_lines(Parallel(ep=2, cp=2)))
    assert lines[0] == "ep: no published step is at hand, so the error of these seconds is not known"
    assert [line.partition(":")[0] for line in lines[1:]] == ["cp", "ep"]


def test_the_command_writes_the_page_and_the_errors(monkeypatch, tmp_path):
    """The errors that plans print are up to date: else run make validate."""
    page_file, errors_file = tmp_path / "page.md", tmp_path / "errors.json"
    monkeypatch.setattr("validation.__main__.PAGE", page_file)
    monkeypatch.setattr("validation.errors.ERRORS", errors_file)
    monkeypatch.setattr("validation.claims.claims", lambda: iter(()))
    sources = {name: lambda name=name: source_rows(name) for name in dict.fromkeys(SOURCE_OF.values())}
    monkeypatch.setattr("validation.tables.SOURCES", sources)
    assert CliRunner().invoke(app, []).exit_code == 0
    assert "### InternEvo memory" in page_file.read_text()
    assert errors_file.read_text() == ERRORS.read_text()
    result = CliRunner().invoke(app, ["internevo"])
    assert result.exit_code == 0, result.output
    assert "GPUs, fsdp" in result.output and "met" in result.output


@pytest.mark.parametrize("size", ["13B"])
def test_the_overlap_of_a_strategy_is_the_papers_ablation(size):
    """The page has it from mechanics of AMSP's engine; `;overlap=`, which users have, must say the same: it waits for
    each unit's reduction at the boundary, where the paper's executor waits for all at the end."""
    variants = {"all": "all overlap", "gather": "all-gather/reduce-scatter overlap only", "none": "no overlap"}
    for overlap, variant in variants.items():
        switched = amsp_step(size, 64, f"{AMSP_LAYOUT[size]};overlap={overlap}", "amsp", 4)
        expected = amsp_step(size, 64, AMSP_LAYOUT[size], _ENGINES[variant], 4)
        assert switched.step_s == pytest.approx(expected.step_s, rel=0.04), overlap
