"""What is given for parts of a model, as layouts."""

from __future__ import annotations

import pytest

from zeromesh.errors import MeshError, NotationError
from zeromesh.strategy import Layout, Part, Plan, Strategy, layouts_of, part_name
from zeromesh.strategy.parts import belongs, require_known, with_given

MESH = (("node", 2), ("cluster", 4))


def test_what_belongs_to_a_part() -> None:
    class Experts:
        pass

    assert part_name(Experts) == "<Experts>" and belongs("<Experts>", "any", "Experts")
    assert belongs("*.experts", "model.layers.0.experts", "Any") and not belongs("*.experts", "experts.0", "Any")
    with pytest.raises(
        NotationError, match=r"no module of the model is \*.expert, which is to be a part: .*a\.experts"
    ):
        require_known(["*.expert"], {"": "Net", "a.experts": "Experts"})
    with pytest.raises(NotationError, match=r"no module of the model is <Expert>.*<Experts>"):
        require_known(["<Expert>"], {"": "Net", "a.experts": "Experts"})


def test_each_part_has_a_layout_on_its_own_mesh() -> None:
    strategy = Strategy.parse("node=3,cluster=1 | *.experts: ranks=3 | head: node=0,cluster=1")
    layouts = layouts_of(strategy, MESH, {"*.experts": [("ranks", 4)]})
    assert list(layouts) == ["", "*.experts", "head"]
    names = [axis.name for layout in layouts.values() for axis in layout.axes]
    assert names == ["node", "cluster", "*.experts:ranks", "head:node", "head:cluster"]
    assert [layout.share for layout in layouts.values()] == [1.0, 0.5, 1.0]


def test_given_beside_the_notation() -> None:
    text, axes = "node=3,cluster=1 | a: node=0,cluster=0", dict.fromkeys("ab", ("node", "cluster"))
    both = with_given(Strategy.parse(text), {"a": Part(), "b": Part(strategy="ddp")}, axes)
    assert str(both) == f"{text} | b: node=0,cluster=0"
    with pytest.raises(NotationError, match=r"part a is given two strategies, node=0,cluster=0 and node=1,cluster=1"):
        with_given(Strategy.parse(text), {"a": Part(strategy="zero1")}, axes)
    with pytest.raises(NotationError, match=r"part b has no strategy: give zm.Part\(strategy=\.\.\.\), or write it"):
        with_given(Strategy.parse(text), {"b": Part()}, axes)


def test_a_part_that_does_not_fit_is_named() -> None:
    for text, message in (
        (
            "node=3,cluster=1 | a: expert=1",
            r"part a: the mesh has no axis 'expert' .*; for other axes give zm.Part\(mesh",
        ),
        ("node=3,cluster=1 | a: node=1", r"part a: strategy node=1 gives no stage to mesh axis 'cluster'"),
        ("node=3,cluster=1 | a: node=1,cluster[3]=1,cluster[*]=0", r"part a: .* needs cluster to have a multiple of 3"),
    ):
        with pytest.raises(MeshError, match=message):
            layouts_of(Strategy.parse(text), MESH, {})


def test_one_layout_is_not_for_parts_too() -> None:
    strategy = Strategy.parse("node=3,cluster=1 | head: node=0,cluster=0")
    with pytest.raises(
        NotationError, match=r"which zm\.shard takes; here one must stand for all of it: leave head out"
    ):
        Layout.of(strategy, MESH)
    plan = Plan(strategy=strategy, mesh=MESH)
    assert Plan.from_json(plan.to_json()) == plan
