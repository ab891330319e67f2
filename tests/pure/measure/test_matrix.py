import pytest

from zeromesh.errors import InputError, LabError, MeshError
from zeromesh.measure.matrix import STRATEGIES, TOPOLOGIES, Cell, Topology, make_cells
from zeromesh.measure.steps import Batch

BATCHES = [Batch(micro_batches=count, dtype=dtype) for count in (1, 4) for dtype in ("fp32", "bf16")]


def test_the_whole_matrix():
    cells = make_cells((), (), BATCHES)
    assert len(cells) == sum(len(STRATEGIES[len(Topology(text=text).axes)]) for text in TOPOLOGIES) * len(BATCHES)
    assert len({cell.key for cell in cells}) == len({cell.name for cell in cells}) == len(cells)


def test_a_cell_survives_its_file():
    for cell in make_cells(["2@1gbit,2"], (), BATCHES):
        assert Cell.from_json(cell.to_json()) == cell


def test_strategies_of_other_levels_are_left_out():
    cells = make_cells(["node=2", "cluster=2,node=2"], ["node=3,cluster=1", "node=3"], BATCHES[:1])
    assert [(c.topology, c.strategy) for c in cells] == [
        ("node=2", "node=3"),
        ("cluster=2,node=2", "node=3,cluster=1"),
    ]
    presets = make_cells(["node=2", "cluster=2,node=2"], ["zero3"], BATCHES[:1])
    assert [cell.strategy for cell in presets] == ["node=3", "node=3,cluster=3"]


@pytest.mark.parametrize("overlap", ["none", "gather", "all"])
def test_overlap_is_part_of_every_strategy(overlap):
    for cell in make_cells(["cluster=2,node=2"], (), BATCHES[:1], overlap=overlap):
        assert ("overlap" in cell.strategy) == (overlap != "all")


def test_only():
    assert {c.batch.dtype for c in make_cells((), (), BATCHES, only="x4 bf16")} == {"bf16"}
    with pytest.raises(InputError, match=r"nothing is left to run\. Cells are called as these: 2@200mbit,2 node=0"):
        make_cells((), (), BATCHES, only="x3")


def test_levels_of_topologies():
    assert Topology(text="2@200mbit,2@1gbit,2").axes == (("package", 2), ("node", 2), ("cluster", 2))
    assert Topology(text="cluster=2,node=4").axes == (("node", 4), ("cluster", 2))
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
