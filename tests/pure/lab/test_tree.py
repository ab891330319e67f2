import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import LabError, LinkLevel, Tree, format_rate, parse_rate

RATES = st.one_of(
    st.none(),
    st.integers(min_value=1, max_value=10**13).map(lambda bits: bits / 8),
    st.floats(min_value=1.0, max_value=1e12),
)
LEVELS = st.builds(LinkLevel, size=st.integers(1, 4), rate_bytes_per_s=RATES)
TREES = st.builds(Tree, levels=st.lists(LEVELS, max_size=4), ranks_per_leaf=st.integers(1, 4))


def test_the_documented_tree():
    tree = Tree.parse("2@200mbit,2@1gbit,2")
    assert tree.levels == (LinkLevel(size=2, rate_bytes_per_s=200e6 / 8), LinkLevel(size=2, rate_bytes_per_s=1e9 / 8))
    assert (tree.ranks_per_leaf, tree.num_leaves, tree.world_size) == (2, 4, 8)
    assert tree.switches == ((), (0,), (1,))
    assert [(link.name, link.level) for link in tree.links] == [
        ("0", 0), ("1", 0), ("0.0", 1), ("0.1", 1), ("1.0", 1), ("1.1", 1),
    ]  # fmt: skip
    assert [(place.rank, place.local_rank, place.leaf, place.path) for place in tree.places[3:6]] == [
        (3, 1, 1, (0, 1)),
        (4, 0, 2, (1, 0)),
        (5, 1, 2, (1, 0)),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2@200mbit,1", "2@200mbit"),
        ("2@1gbit,2", "2@1000mbit,2"),
        ("2@1Gbit,2", " 2 @ 1 Gbit/s , 2"),
        ("2@125 MB/s,2", "2@1gbit,2"),
        ("2@2.5gbit,2", "2@2500mbit,2"),
    ],
)
def test_two_spellings_of_one_tree_are_equal(one, other):
    assert Tree.parse(one) == Tree.parse(other)


@given(TREES)
def test_every_rank_has_one_place_and_every_leaf_one_link_up(tree):
    assert Tree.parse(str(tree)) == tree
    assert [place.rank for place in tree.places] == list(range(tree.world_size))
    assert len({(place.path, place.local_rank) for place in tree.places}) == tree.world_size
    ends = [link.path for link in tree.links]
    assert len(set(ends)) == len(ends)
    assert {*ends, ()} == {*tree.switches, *tree.leaves}


@given(RATES)
def test_a_rate_prints_exactly(rate):
    level = LinkLevel(size=1, rate_bytes_per_s=rate)
    assert parse_rate(format_rate(level.rate_bytes_per_s)) == level.rate_bytes_per_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not a whole number; expected a tree, outermost level first"),
        ("two", r"'two' is not a whole number"),
        ("2,2", r"level '2' has no rate; only the last number, ranks per leaf, has none"),
        ("2@200mbit,0", r"a leaf has at least 1 rank, got 0"),
        ("0@200mbit,1", r"tree '0@200mbit,1': level '0@200mbit': .*at least 1 member, got 0"),
        ("-2@200mbit", r"'-2' is not a whole number"),
        ("2@fast,2", r"level '2@fast': expected a rate, such as 200mbit, .* got 'fast'"),
        ("2@200mb,2", r"level '2@200mb': expected a rate, .* got '200mb'"),
        ("2@0mbit,2", r"a rate is a finite number of at least 1 bit/s, got 0 bit/s"),
        ("2@-1 Gbit/s,2", r"at least 1 bit/s, got -1e\+09 bit/s"),
        ("2@1gbit@2,2", r"expected a rate, .* got '1gbit@2'"),
        ("2@1gbit,,2", r"level '' has no rate"),
        ("64@1gbit,64@1gbit,1", r"4096 leaves; one machine emulates at most 1024"),
    ],
)
def test_what_is_not_a_tree_is_refused(text, message):
    with pytest.raises(LabError, match=message):
        Tree.parse(text)
    with pytest.raises(LabError, match="finite"):
        LinkLevel(size=2, rate_bytes_per_s=float("inf"))
