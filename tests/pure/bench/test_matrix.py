import pytest

from bench.matrix import STRATEGIES, TOPOLOGIES, Cell, Topology, make_cells
from lab import LabError
from zeromesh.errors import InputError, MeshError
from zeromesh.measure.steps import Batch

BATCHES = [Batch(micro_batches=count, dtype=dtype) for count in (1, 4) for dtype in ("fp32", "bf16")]


def test_the_whole_matrix():
    cells = make_cells((), (), BATCHES)
    assert len(cells) == sum(len(STRATEGIES[len(Topology(text=text).axes)]) for text in TOPOLOGIES) * len(BATCHES)
    assert len(set(cells)) == len(cells)


def test_a_cell_survives_its_file():
    for cell in make_cells(["2@1gbit,2"], (), BATCHES):
        assert Cell.from_json(cell.to_json()) == cell


def test_strategies_of_other_levels_are_left_out():
    cells = make_cells(["node=2", "cluster=2,node=2"], ["node=3,cluster=1", "node=3"], BATCHES[:1])
    assert [(c.topology, c.strategy) for c in cells] == [("node=2", "node=3"), ("cluster=2,node=2", "node=3,cluster=1")]
    presets = make_cells(["node=2", "cluster=2,node=2"], ["zero3"], BATCHES[:1])
    assert [cell.strategy for cell in presets] == ["node=3", "node=3,cluster=3"]


def test_a_cell_that_is_named_twice_is_one():
    cells = make_cells(["2@1gbit,2"] * 2, ["zero3", "node=3,cluster=3"], BATCHES[:1] * 2)
    assert [cell.strategy for cell in cells] == ["node=3,cluster=3"]


def test_meshes_without_common_strategies_need_some():
    with pytest.raises(InputError, match="no strategy has the levels of a topology"):
        make_cells(["a=2,b=2,c=2,d=2"], (), BATCHES)
    assert make_cells(["a=2,b=2,c=2,d=2"], ["zero3"], BATCHES)


def test_levels_of_topologies():
    assert Topology(text="2@200mbit,2@1gbit,2").axes == (("package", 2), ("node", 2), ("cluster", 2))
    assert Topology(text="cluster=2,node=4").axes == (("node", 4), ("cluster", 2))
    assert Topology(text="2@200mbit,4").mesh == {"cluster": 2, "node": 4}
    assert Topology(text="2@200mbit,1").mesh == {"node": 2}
    for text in TOPOLOGIES:
        axes = Topology(text=text).axes
        for strategy in STRATEGIES[len(axes)]:
            assert [term.partition("=")[0] for term in strategy.split(",")] == [name for name, _ in axes]


@pytest.mark.parametrize(
    ("topologies", "error"), [(["2@fast,2"], LabError), (["2,2"], MeshError), (["1@1gbit,1"], MeshError)]
)
def test_topologies_that_are_none(topologies, error):
    with pytest.raises(error):
        make_cells(topologies, (), BATCHES)


@pytest.mark.parametrize("fields", [{"dtype": "fp16"}, {"micro_batches": 0}, {"tokens": -1}])
def test_batches_that_are_none(fields):
    with pytest.raises(InputError, match="must be"):
        Batch(**fields)
