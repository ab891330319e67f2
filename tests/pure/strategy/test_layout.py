"""A strategy on a mesh: sizes, splits, order, the laws of its shards; stages, plans and parts of a model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.strategy.mixes import NAMES, mixes, notation
from zeromesh.errors import InputError, MeshError, NotationError
from zeromesh.strategy import Layout, Stage, Strategy
from zeromesh.strategy.parts import Part, belongs, layouts_of, part_name, require_known, with_given
from zeromesh.strategy.plan import Plan


@st.composite
def layouts(draw):
    """Any legal mix on a mesh of 1 to 3 axes of 1 to 4 ranks, some axes split."""
    mix = draw(st.sampled_from(mixes(draw(st.integers(1, 3)), kept=True)))
    mesh, terms = [], []
    for name, stage in zip(NAMES, mix, strict=False):
        if draw(st.booleans()):
            mesh.append((name, draw(st.integers(1, 4))))
            terms.append(f"{name}={stage}")
        else:
            # Two parts with stages that differ only in the wire, so that any mix stays legal.
            mesh.append((name, 6))
            terms += [f"{name}[2]={stage}", f"{name}[3]={stage}@/bf16"]
    return Layout.of(",".join(terms), mesh)


def ranks(layout):
    return [layout.coordinates(rank) for rank in range(layout.world)]


def degrees(layout):
    return [layout.param_axes, layout.grad_axes, layout.significant]


@given(layouts(), st.integers(0, 200))
def test_shards_cover_exactly(layout, numel):
    """Disjoint, complete, in bounds, equally long; each held by as many ranks as there are replicas. The state shard
    lies in both others; coordinates count the innermost axis fastest."""
    padded = layout.padded(numel)
    assert padded % layout.padded(1) == 0 and numel <= padded < numel + layout.padded(1)
    everyone = [tuple(each[axis.name] for axis in reversed(layout.axes)) for each in ranks(layout)]
    assert everyone == list(itertools.product(*(range(axis.size) for axis in reversed(layout.axes))))
    for axes in degrees(layout):
        held = [layout.shard(padded, axes, coordinates) for coordinates in ranks(layout)]
        shards = sorted({(shard.start, shard.stop) for shard in held})
        if padded:
            assert len(shards) == layout.degree(axes)
        assert [start for start, _ in shards] == [0, *(stop for _, stop in shards[:-1])]
        assert shards[-1][1] == padded
        assert len({stop - start for start, stop in shards}) == 1
        copies = layout.world // layout.degree(axes)
        assert all(held.count(slice(*shard)) == (copies if padded else layout.world) for shard in shards)
        for coordinates, outer in zip(ranks(layout), held, strict=True):
            state = layout.shard(padded, layout.significant, coordinates)
            assert outer.start <= state.start <= state.stop <= outer.stop


@given(layouts())
def test_prefixes_and_order(layout):
    """Stage 3, then 2 or 3d, then 1; innermost first within each; P and G are sharded over prefixes."""
    order = layout.significant
    kind = {"3": 0, "3k": 0, "2": 1, "3d": 1, "3dk": 1, "1": 2}
    keys = [(kind[axis.stage.value], layout.axes.index(axis)) for axis in order]
    assert keys == sorted(keys)
    assert {axis.name for axis in order} | {axis.name for axis in layout.replica_axes} == {a.name for a in layout.axes}
    for axes in (layout.param_axes, layout.grad_axes):
        assert axes == order[: len(axes)]
    kept = [axis.stage.kept for axis in layout.param_axes]
    assert kept == sorted(kept), "what is kept is gathered first"


@given(layouts(), st.integers(0, 200))
def test_every_chunk_is_even_and_begins_on_16_bytes(layout, numel):
    """Alignment of a region over any axes, of the narrowest dtype."""
    padded = layout.padded(numel)
    for axes in (*degrees(layout), layout.axes):
        assert padded // layout.degree(axes) * 2 % 16 == 0 and padded % layout.degree(axes) == 0


@pytest.mark.parametrize(
    ("short", "long"),
    [("node=3d", "rack=0,node=3d,pod=0"), ("node[2]=3,node[2]=1", "rack=0,node[2]=3,node[2]=1,pod=0")],
)
def test_an_axis_of_one_rank_needs_no_stage(short, long):
    mesh = (("rack", 1), ("node", 4), ("pod", 1))
    assert Layout.of(short, mesh) == Layout.of(long, mesh)
    with pytest.raises(MeshError, match="gives no stage to mesh axis 'node'"):
        Layout.of("rack=0", mesh)


@pytest.mark.parametrize(
    ("text", "size", "parts"),
    [
        ("node[4]=3,node[2]=1", 8, [("node[4]", 4, 1), ("node[2]", 2, 4)]),
        ("node[4]=3,node[*]=1", 16, [("node[4]", 4, 1), ("node[4]#2", 4, 4)]),
        ("node[2]=3,node[2]=1,node[*]=0", 4, [("node[2]", 2, 1), ("node[2]#2", 2, 2), ("node[1]", 1, 4)]),
        ("node=3", 5, [("node", 5, 1)]),
    ],
)
def test_splits(text, size, parts):
    layout = Layout.of(text, [("node", size)])
    assert [(axis.name, axis.size, axis.stride) for axis in layout.axes] == parts
    assert {axis.mesh_axis for axis in layout.axes} == {"node"} and layout.world == size


MESH = [("node", 8), ("cluster", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nod=3,cluster=1", r"no axis 'nod' \(it has, innermost first: node, cluster\): did you mean node"),
        ("node=3", r"strategy node=3 gives no stage to mesh axis 'cluster'; add cluster=0 to replicate over it"),
        ("cluster=1,node=3", r"innermost first; for this mesh that is node, cluster; got cluster, node"),
        ("node[4]=3,node[4]=1,cluster=0", r"node\[4\]=3,node\[4\]=1 needs node to have 16 ranks; this mesh has 8"),
        ("node[3]=3,node[*]=1,cluster=0", r"needs node to have a multiple of 3 ranks; this mesh has 8"),
        ("node[4]=3,cluster=0", r"node\[4\]=3 covers 4 ranks of node, but this mesh has 8: write node=3 for all"),
        ("node[3]=3,node[2]=3,cluster=0", r"node\[6\]=3 covers 6 ranks of node, but this mesh has 8"),
        ("frontier", "preset frontier has 3 levels"),
    ],
)
def test_a_strategy_that_does_not_fit_the_mesh(text, message):
    with pytest.raises((MeshError, NotationError), match=message):
        Layout.of(text, MESH)
    assert Layout.of("hfsdp", MESH).strategy == Strategy.parse("node=3,cluster=1")
    for rank in (-1, 16):
        with pytest.raises(MeshError, match=rf"rank must be 0 to 15 on this mesh; got {rank}"):
            Layout.of("hsdp", MESH).coordinates(rank)


@given(
    st.sampled_from([notation(mix) for mix in mixes(2, kept=True)]),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([None, "bf16", "fp32"]),
)
def test_a_plan_survives_json(text, micro_batch, micro_batches, recompute, dtype):
    plan = Plan(
        strategy=Strategy.parse(text),
        mesh=(("node", 8), ("cluster", 16)),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=recompute,
        **dict.fromkeys(("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype"), dtype),
        predicted={"step_s": 1.5, "axes": [{"axis": "node"}]},
    )
    assert Plan.from_json(plan.to_json()) == plan
    old = json.loads(plan.to_json())
    del old["master_dtype"]  # which plans had not always
    assert Plan.from_json(json.dumps(old)) == replace(plan, master_dtype=None)


GOOD = Plan(strategy=Strategy.parse("node=3"), mesh=(("node", 4),)).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.json: not JSON: .*; not a zeromesh plan: write one with `zeromesh plan -o`"),
        ("[]", r"mine\.json: not a zeromesh plan"),
        ("{}", r"mine\.json: not a zeromesh plan \('zeromesh_plan'\)"),
        (GOOD.replace('"zeromesh_plan": 1', '"zeromesh_plan": 2'), r"mine\.json: plan format must be 1; got 2"),
        (GOOD.replace('"micro_batch"', '"micro_bach"'), r"mine\.json: not a zeromesh plan .*micro_bach"),
        (GOOD.replace("node=3", "node=4"), r"stage must be one of"),
        (GOOD.replace('"node": 4', '"node": "four"'), r"mine\.json: not a zeromesh plan"),
    ],
)
def test_a_file_that_is_not_a_plan(tmp_path, text, message):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(InputError, match=message):
        Plan.load(tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text(GOOD)
    assert Plan.load(tmp_path / "mine.json").to_json() == GOOD


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"param_dtype": "float8"}, r"param_dtype must be .*fp64, fp32, bf16.*; got 'float8'"),
        ({"reduce_dtype": "int8"}, r"reduce_dtype must be one of .*; got 'int8'"),
        ({"micro_batches": 0}, r"micro_batches of a plan must be a whole number of at least 1; got 0"),
        ({"micro_batch": "2"}, r"micro_batch of a plan must be a whole number of at least 1; got '2'"),
        ({"recompute": "some"}, r"recompute of a plan must be none, selective, full; got 'some'"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(fields, message):
    """Also one that was read from a file: taken as if it said nothing, it would train in other dtypes."""
    plan = Plan(strategy=Strategy.parse("node=3"), mesh=(("node", 4),))
    with pytest.raises(InputError, match=message):
        replace(plan, **fields)
    with pytest.raises(InputError, match=message):
        Plan.from_json(json.dumps(json.loads(plan.to_json()) | fields))


def test_stages_are_all_that_can_be_sharded_over_one_axis():
    """Who has a part of parameters or gradients has that part of the states; only gathered parameters are kept."""
    can_be = {
        (params, grads, states, kept, hosted)
        for params, grads, states, kept, hosted in product((False, True), repeat=5)
        if states >= (params or grads) and params >= kept >= hosted
    }
    stages = [(s.shards_params, s.shards_grads, s.shards_states, s.kept, s.hosted) for s in Stage]
    assert len(stages) == len(set(stages)) and set(stages) == can_be
    # Buffers are cut by the axes that are sharded furthest first.
    for one, other in product(Stage, repeat=2):
        if one.shards_params >= other.shards_params and one.shards_grads >= other.shards_grads and one.shards_states:
            assert one.significance <= other.significance


TWO_LEVELS = (("node", 2), ("cluster", 4))


def test_what_belongs_to_a_part() -> None:
    class Experts:
        pass

    assert part_name(Experts) == "<Experts>" and belongs("<Experts>", "any", "Experts")
    assert belongs("*.experts", "model.layers.0.experts", "Any") and not belongs("*.experts", "experts.0", "Any")
    for part, message in (
        ("*.expert", r"part \*.expert matches no module of the model: .*a\.experts"),
        ("<Expert>", "part <Expert> matches no module of the model: .*<Experts>"),
    ):
        with pytest.raises(NotationError, match=message):
            require_known([part], {"": "Net", "a.experts": "Experts"})


def test_each_part_has_a_layout_on_its_own_mesh() -> None:
    strategy = Strategy.parse("node=3,cluster=1 | *.experts: ranks=3 | head: node=0,cluster=1")
    layouts = layouts_of(strategy, TWO_LEVELS, {"*.experts": [("ranks", 4)]})
    assert list(layouts) == ["", "*.experts", "head"]
    names = [axis.name for layout in layouts.values() for axis in layout.axes]
    assert names == ["node", "cluster", "*.experts:ranks", "head:node", "head:cluster"]
    assert [layout.share for layout in layouts.values()] == [1.0, 0.5, 1.0]


def test_a_part_is_given_or_named() -> None:
    text, axes = "node=3,cluster=1 | a: node=0,cluster=0", dict.fromkeys("ab", ("node", "cluster"))
    both = with_given(Strategy.parse(text), {"a": Part(), "b": Part(strategy="ddp")}, axes)
    assert str(both) == f"{text} | b: node=0,cluster=0"
    with pytest.raises(NotationError, match=r"part a has two strategies, node=0,cluster=0 and node=1,cluster=1"):
        with_given(Strategy.parse(text), {"a": Part(strategy="zero1")}, axes)
    with pytest.raises(NotationError, match=r"part b has no strategy: give zm.Part\(strategy=\.\.\.\), or write it"):
        with_given(Strategy.parse(text), {"b": Part()}, axes)
    # A part that does not fit is named.
    for text, message in (
        ("expert=1", r"part a: the mesh has no axis 'expert' .*; for other axes give zm.Part\(mesh"),
        ("node=1", r"part a: strategy node=1 gives no stage to mesh axis 'cluster'"),
        ("node=1,cluster[3]=1,cluster[*]=0", r"part a: .* needs cluster to have a multiple of 3"),
    ):
        with pytest.raises(MeshError, match=message):
            layouts_of(Strategy.parse(f"node=3,cluster=1 | a: {text}"), TWO_LEVELS, {})
    # One layout is not for parts too.
    strategy = Strategy.parse("node=3,cluster=1 | head: node=0,cluster=0")
    with pytest.raises(
        NotationError, match=r"only zm\.shard takes; give one strategy for the whole model here, without head"
    ):
        Layout.of(strategy, TWO_LEVELS)
    plan = Plan(strategy=strategy, mesh=TWO_LEVELS)
    assert Plan.from_json(plan.to_json()) == plan
