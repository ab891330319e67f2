import pytest

from zeromesh.errors import ConfigError, MeasurementError, MeshError
from zeromesh.measure.launch import default_mesh, mesh_text, on_all_ranks, parse_mesh, require_several


def test_a_mesh_is_written_outermost_first():
    assert parse_mesh("cluster=2, node=4") == {"cluster": 2, "node": 4}
    assert mesh_text(parse_mesh("a=2,b=3,c=4")) == "a=2,b=3,c=4"


@pytest.mark.parametrize("text", ["", "4", "node", "node=0", "node=-1", "node=2,node=2", "a b=2", "node=2x"])
def test_what_is_no_mesh(text):
    with pytest.raises(MeshError, match="sizes by axis name"):
        parse_mesh(text)


def test_levels_of_what_has_been_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert default_mesh(4) == {"node": 4}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_mesh(4) == {"cluster": 2, "node": 4}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_mesh(4) == {"node": 8}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(MeshError, match="--mesh"):
        default_mesh(4)
    with pytest.raises(MeshError, match="has 4 ranks; 8 are there"):
        on_all_ranks("zeromesh.measure.probe:measure", {}, {"node": 4})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR must say where rank 0 listens"):
        on_all_ranks("zeromesh.measure.probe:measure", {}, {"node": 8})
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(MeshError, match="does not say LOCAL_WORLD_SIZE"):
        default_mesh(4)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="has WORLD_SIZE but not RANK"):
        default_mesh(4)


def test_one_rank_has_no_links():
    with pytest.raises(MeasurementError, match="at least 2 ranks"):
        require_several({"node": 1})
