import pytest
from typer.testing import CliRunner

from zeromesh.cli.app import app, main
from zeromesh.cluster import parse_cluster, preset


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["clusters", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_clusters_lists_every_preset():
    listed = run()
    assert "a800-8x-hdr" in listed and "frontier-mi250x" in listed


def test_clusters_prints_one_with_its_sources():
    shown = run("a800-8x-hdr")
    assert "312 TFLOP/s" in shown and "200 GB/s" in shown and "6 us" in shown and "arXiv 2311.00257" in shown
    assert parse_cluster(shown).axes == preset("a800-8x-hdr").axes


def test_an_unknown_cluster_ends_with_2_and_the_nearest_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["zeromesh", "clusters", "a800-8x-hrd"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "did you mean a800-8x-hdr" in capsys.readouterr().err
