"""What the comparison of AMSP's layouts depends on is computed, not written down."""

from zeromesh.validate import sensitivity
from zeromesh.validate.tables.amsp import amsp_layout_rows


def test_the_first_variant_is_what_the_table_predicts_and_one_variant_meets_all_three():
    found = list(sensitivity.variants())
    rows = list(amsp_layout_rows())
    assert found[0].ratios == tuple(row.predicted for row in rows)
    assert [row.measured for row in rows] == list(sensitivity.measured().values())
    assert [variant.name for variant in found if variant.meets] == ["gathers exposed, broadcast hidden"]
    low, high = zip(*((row.low, row.high) for row in rows), strict=True)
    for variant in found[:5]:  # what the engine overlaps is what the table's range spans
        assert all(a <= ratio <= b for a, ratio, b in zip(low, variant.ratios, high, strict=True)), variant


def test_a_share_of_the_gathers_that_is_exposed_lies_between_none_and_all():
    share = sensitivity.exposed_share()
    assert share is not None and 0.5 < share < 1.0
