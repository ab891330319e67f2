"""Parse, normal form, print; legal mixes; one message for each thing that can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.strategy.mixes import KEPT, STAGES, illegal, mixes, notation
from zeromesh.errors import NotationError
from zeromesh.strategy import Layout, Stage, Strategy, Wire
from zeromesh.strategy.presets import PRESETS
from zeromesh.strategy.strategy import MAX_PREFETCH, AxisStage

parse = Strategy.parse

DTYPES = ["fp32", "bf16", "fp16", "int8", "int4", "int8[64]", "int4[1024]"]


def texts(draw, stage: str) -> str:
    """A wire that this stage may have."""
    grad = draw(st.sampled_from(["", *DTYPES]))
    param = "" if stage == "0" else draw(st.sampled_from(["", *DTYPES]))
    feedback = draw(st.sampled_from(["", "+ef"])) if grad.startswith("int") else ""
    return f"@{param}/{grad}{feedback}" if param or grad else ""


OPTIONS = {
    "collective": st.sampled_from(["auto", "flat", "hierarchical", "ho_ring"]),
    "overlap": st.sampled_from(["all", "gather", "none"]),
    "prefetch": st.integers(0, MAX_PREFETCH),
}


@st.composite
def spelled(draw):
    """A legal strategy, with splits, wires, options and white space."""
    stages = draw(st.sampled_from(mixes(draw(st.integers(1, 3)), kept=True)))
    terms = []
    for index, stage in enumerate(stages):
        name, wire = f"axis_{index}", texts(draw, stage)
        parts = draw(st.sampled_from([("",), ("[2]",), ("[2]", "[3]"), ("[2]", "[1]", "[*]"), ("[*]",)]))
        space = draw(st.sampled_from(["", " "]))
        terms += [f"{space}{name}{part}{space}={stage}{wire}" for part in parts]
    options = draw(st.fixed_dictionaries({}, optional=OPTIONS))
    return ",".join(terms) + "".join(f"; {key} = {value}" for key, value in options.items())


@st.composite
def with_parts(draw):
    """The same with parts, whose strategies have no options of the whole step."""
    own = st.builds(lambda text: text.partition(";")[0], spelled())
    names = st.lists(st.sampled_from(["*.experts", "<Embed>", "model.layers.[0-3].*", "vision", "head"]), unique=True)
    return draw(spelled()) + "".join(f"| {name} :{draw(own)}" for name in draw(names))


@given(spelled() | with_parts())
def test_print_is_the_inverse_of_parse(text):
    strategy = parse(text)
    assert parse(str(strategy)) == strategy
    assert str(parse(str(strategy))) == str(strategy)
    assert hash(parse(str(strategy))) == hash(strategy)
    names = ("axes", "collective", "overlap", "prefetch", "parts")
    assert Strategy(**{name: getattr(strategy, name) for name in names}) == strategy
    assert parse(strategy) is strategy


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("node[4]=3,node[2]=3", "node=3"),
        ("node[4]=3,node[*]=3", "node=3"),
        ("node[*]=3", "node=3"),
        ("node[8]=3", "node=3"),
        ("node[2]=3,node[2]=3,node[2]=1", "node[4]=3,node[2]=1"),
        ("node[4]=3,node[1]=0,node[2]=1", "node[4]=3,node[2]=1"),
        ("node[2]=3@int8,node[2]=3", "node[2]=3@int8/,node[2]=3"),
        ("node[2]=3,node[2]=1,node[*]=1", "node[2]=3,node[*]=1"),
        (" node = 3 , cluster = 1 ", "node=3,cluster=1"),
        ("node=3@int8", "node=3@int8/"),
        ("node=3@int8[128]/int4[ 128 ]+ef", "node=3@int8/int4+ef"),
        ("node=3@int8[064]/int4[32]+ef", "node=3@int8[64]/int4[32]+ef"),
        ("node=3;prefetch=1;overlap=all;collective=auto", "node=3"),
        ("node=3;prefetch=02;overlap=gather", "node=3;overlap=gather;prefetch=2"),
        ("node=3;prefetch=3;collective=flat", "node=3;collective=flat;prefetch=3"),
        ("host=1,node=3;step=device;prefetch=2", "host=1,node=3;prefetch=2;step=device"),
        ("host=0,node=3;step=device", "node=3"),
    ],
)
def test_two_spellings_of_one_layout_are_equal(text, printed):
    assert parse(text) == parse(printed)
    assert str(parse(text)) == printed


def test_values():
    strategy = parse("node[4]=3@int8/,cluster=1;prefetch=2")
    assert strategy.axes == (
        AxisStage(name="node", stage=Stage.THREE, wire=Wire(param="int8")),
        AxisStage(name="cluster", stage=Stage.ONE),
    )
    assert strategy.names == ("node", "cluster") and strategy.quantised
    assert (strategy.prefetch, strategy.overlap, strategy.collective) == (2, "all", "auto")
    # Parts of a model.
    strategy = parse("node=3,cluster=1;prefetch=2 | <Head>: node=0, cluster=0|*.experts:expert=1")
    assert str(strategy) == "node=3,cluster=1;prefetch=2 | *.experts: expert=1 | <Head>: node=0,cluster=0"
    assert strategy == parse(
        "node=3,cluster=1;prefetch=2 | *.experts: expert=1 | <Head>: node[2]=0,node[4]=0,cluster=0"
    )
    assert strategy.with_parts({}) == parse("node=3,cluster=1;prefetch=2")
    assert dict(strategy.parts)["*.experts"] == parse("expert=1")
    assert str(parse("hsdp | head: paro:IIG", ("node", "cluster"))) == "node=3,cluster=0 | head: node=3,cluster=1"


def test_the_host_has_a_stage_that_cuts_nothing():
    strategy = parse("host=1, node=3,cluster=3h")
    assert str(strategy) == "host=1,node=3,cluster=3h" and parse(str(strategy)) == strategy
    assert strategy.names == ("node", "cluster") and strategy.host is Stage.ONE
    assert parse("host=0,node=3") == parse("node=3") == parse("host[0%]=2,node=3")
    assert parse("host [35%] = 1, node=3").percent == 35 and str(parse("host[35%]=1,node=3")) == "host[35%]=1,node=3"
    assert parse("host[100%]=3d,node=3") == parse("host=3d,node=3") != parse("host[99%]=3d,node=3")
    with_part = parse("host=1,node=1 | *.experts: host=2,node=3")
    assert dict(with_part.parts)["*.experts"].host is Stage.TWO and parse(str(with_part)) == with_part
    layout, plain = (Layout.of(text, [("node", 4)]) for text in ("host=3,node=3", "node=3"))
    assert layout.axes == plain.axes and layout.shard(64, layout.param_axes, {"node": 1}) == slice(16, 32)


@pytest.mark.parametrize(("axes", "plain"), [(1, 5), (2, 23), (3, 101)])
def test_the_legal_mixes_are_accepted_and_no_others(axes, plain):
    assert len(mixes(axes)) == plain
    for mix in mixes(axes, kept=True):
        assert str(parse(notation(mix))) == notation(mix)
    for mix in illegal(axes):
        with pytest.raises(NotationError, match=r"cannot be combined|so its kept copy would contain"):
            parse(notation(mix))


@pytest.mark.parametrize(
    ("stage", "shards", "deferred", "kept"),
    [
        ("0", "", False, False),
        ("1", "s", False, False),
        ("2", "gs", False, False),
        ("3", "pgs", False, False),
        ("3k", "pgs", False, True),
        ("3d", "ps", True, False),
        ("3dk", "ps", True, True),
        ("3h", "pgs", False, True),
        ("3dh", "ps", True, True),
    ],
)
def test_what_a_stage_shards(stage, shards, deferred, kept):
    parsed = Stage.parse(stage)
    sharded = zip("pgs", (parsed.shards_params, parsed.shards_grads, parsed.shards_states), strict=True)
    assert "".join(letter for letter, is_sharded in sharded if is_sharded) == shards
    assert (parsed.deferred, parsed.kept) == (deferred, kept)
    assert parsed.value.replace("h", "k") in STAGES + KEPT


TABLE = """
ddp node=0,cluster=0    zero1 node=1,cluster=1  zero2 node=2,cluster=2   zero3 node=3,cluster=3
fsdp node=3,cluster=3   mics node=3,cluster=0   hsdp node=3,cluster=0    hfsdp node=3,cluster=1
hpz node=3,cluster=3k   zero++ node=3@int8/int4,cluster=3k@int8/int4
paro:NNN node=0,cluster=0   paro:NNI node=1,cluster=0   paro:NII node=2,cluster=0   paro:INI node=3d,cluster=0
paro:III node=3,cluster=0   paro:NNG node=1,cluster=1   paro:NIG node=2,cluster=1   paro:NGG node=2,cluster=2
paro:ING node=3d,cluster=1  paro:IIG node=3,cluster=1   paro:IGG node=3,cluster=2   paro:GNG node=3d,cluster=3d
paro:GIG node=3,cluster=3d  paro:GGG node=3,cluster=3
fcdp node=3,cluster=3h  zero-offload host=2,node=2,cluster=2  cpu-offload host=3,node=3,cluster=3
"""


def test_every_preset_on_two_levels():
    words = TABLE.split()
    table = dict(zip(words[::2], words[1::2], strict=True))
    assert set(table) | {"frontier"} == set(PRESETS)
    assert sum(name.startswith("paro:") for name in PRESETS) == 14
    for name, text in table.items():
        assert parse(name, ("node", "cluster")) == parse(text), name
        assert str(parse(name, ("node", "cluster"))) == text


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        ("frontier", ("package", "node", "cluster"), "package=3@int8/,node=2@/int4,cluster=1"),
        ("zero3", ("a",), "a=3"),
        ("hsdp", ("die", "node", "cluster"), "die=3,node=3,cluster=0"),
        ("PARO:iig;prefetch=2", ("node", "cluster"), "node=3,cluster=1;prefetch=2"),
        ("ZeRO++", ("node", "cluster"), "node=3@int8/int4,cluster=3k@int8/int4"),
    ],
)
def test_presets_elsewhere(text, axes, expected):
    assert parse(text, axes) == parse(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must name a stage for every mesh axis, as in node=3,cluster=1; got nothing"),
        ("node=3,", r"expected axis=stage, as in node=3, .* got ''"),
        ("node=3 | node=1", r"expected a part of the model and its strategy after \|.*; got 'node=1'"),
        ("node=3 | a b: node=1", r"a part is a pattern of module names.*; got 'a b'"),
        ("node=3 | head: node=1 | head: node=0", r"part head is given twice"),
        ("node=3 | head: node=1;prefetch=2", r"prefetch applies to the whole step, but part head sets its own"),
        ("node=3 | head:", r"a strategy must name a stage"),
        ("host=3k,node=3", r"write host=2, or host=3$"),
        ("host=3dh,node=3", r"write host=1, or host=3d$"),
        ("node=3,host=1", "write the host first, as in host=1,node=3"),
        ("host[2]=1,node=3", r"the host takes only a stage, .*as in host=1 or host\[50%\]=1; got host\[2\]=1"),
        ("host[12.5%]=1,node=3", r"a share of the tensors in whole percent, .*; got host\[12.5%\]=1"),
        ("host[101%]=1,node=3", "the host's share must be 0 to 100 %"),
        ("node=3k,cluster=3h", "node=3k keeps its copy on the device and cluster=3h on the host"),
        ("3=node", r"expected axis=stage, .* got '3=node'"),
        ("node=4", r"stage must be one of .*; got '4'"),
        ("node=d3", r"stage must be one of .*; got 'd3': did you mean"),
        ("node[0]=3", r"the size of node\[0\] must be at least 1"),
        ("node=3@", r"a wire must name at least one dtype, as in @int8 or @/int4; got '@'"),
        ("node=3@int7", r"a wire must be one of fp32, bf16, fp16, int8, int4, .*; got 'int7': did you mean"),
        ("node=3@bf16[32]", r"int4\[BLOCK\]; got 'bf16\[32\]': did you mean bf16"),
        ("node=3@int8[12]", r"a multiple of 8 elements, 8 to 1024, as in int8\[32\]; got int8\[12\]"),
        ("node=3@/int4[2048]+ef", r"8 to 1024.*; got int4\[2048\]"),
        ("node=0@int8", r"stage 0 sends no parameters over node, .* for gradients write @/int8"),
        ("node=3,node=1", r"axis node is given 2 stages: write its parts with sizes, as in node\[4\]=3"),
        ("node=3,cluster=1,node=1", r"axis node appears in two places; write the parts of an axis next to"),
        ("node[*]=3,node[2]=1", r"node\[\*\] is the rest of node, so it must be the outermost"),
        ("node=2,cluster=3d", r"node=2 and cluster=3d cannot be combined: .* use cluster=3, or node=1 or 3d"),
        ("node=3dk,cluster=2", r"cluster=2 and node=3dk cannot be combined"),
        (
            "node=3k,cluster=3",
            r"node=3k is gathered after cluster=3, .* write cluster=3k as well, or drop the k of node$",
        ),
        ("node=3k,cluster=3d", r"node=3k is gathered after cluster=3d, .* write cluster=3dk"),
        ("node=3h,cluster=3d", r"write cluster=3dh as well, or drop the h of node$"),
        ("host=1,node=3;step=gpu", r"step must be one of host, device; got 'gpu'"),
        ("node=3;prefetch", r"expected an option as in ;prefetch=2; got 'prefetch'"),
        ("node=3;prefech=2", r"got 'prefech=2': did you mean prefetch"),
        ("node=3;prefetch=1;prefetch=2", r"option prefetch is given twice"),
        ("node=3;prefetch=-1", r"prefetch must be a whole number of units, as in ;prefetch=2; got '-1'"),
        ("node=3;prefetch=65", r"prefetch must be 0 to 64 units; got 65"),
        ("node=3;overlap=some", r"overlap must be one of all, gather, none; got 'some'"),
        ("node=3@int8+ef", r"\+ef needs quantised gradients.*this wire are not quantised"),
        ("node=3@int8/bf16+ef", r"\+ef needs quantised gradients.*this wire are bf16"),
        ("node=3@/int4+fe", r"only \+ef may follow a wire's dtypes, as in @/int4\+ef; got '\+fe'"),
        ("node=3;collective=ring", r"collective must be one of auto, flat, hierarchical, ho_ring; got 'ring'"),
    ],
)
def test_a_wrong_notation_says_what_was_expected(text, message):
    with pytest.raises(NotationError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "axes", "message"),
    [
        ("hdsp", ("node", "cluster"), r"a strategy is axis=stage terms, .* or a preset; got 'hdsp': did you mean hsdp"),
        ("hsdp", None, r"preset hsdp needs the names of the mesh's axes; give them, or write axis=stage terms"),
        ("hsdp", ("node",), r"preset hsdp has 2 levels, the mesh has 1: node"),
        ("frontier", ("node", "cluster"), r"preset frontier has 3 levels, the mesh has 2: node, cluster"),
        ("paro:XYZ", ("node", "cluster"), r"got 'paro:XYZ'"),
    ],
)
def test_a_wrong_preset_says_what_was_expected(text, axes, message):
    with pytest.raises(NotationError, match=message):
        parse(text, axes)
    with pytest.raises(NotationError, match="got nothing"):
        Strategy(axes=())
