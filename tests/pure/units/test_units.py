import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh import units
from zeromesh.errors import InputError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GB", 80e9),
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, "1.5 GiB", 1.5 * 2**30),
        (units.parse_bytes, "4_194_304 B", 4194304),
        (units.parse_bytes_per_s, "200 GB/s", 200e9),
        (units.parse_bytes_per_s, "100 Mbit/s", 12.5e6),
        (units.parse_bytes_per_s, "400 Gbps", 50e9),
        (units.parse_seconds, "6 us", 6e-6),
        (units.parse_seconds, "6µs", 6e-6),
        (units.parse_seconds, "-1 ms", -1e-3),
        (units.parse_flop_per_s, "312 TFLOP/s", 312e12),
        (units.parse_flop_per_s, "1e3 GFLOPS", 1e12),
    ],
)
def test_parse(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_bytes, "80", "the unit is missing"),
        (units.parse_bytes, 80, "write the unit, as a string"),
        (units.parse_bytes, "80 Gb", "unknown unit 'Gb', known: B, EB, GB"),
        (units.parse_bytes_per_s, "200 Gb/s", "write Gbit/s for bits or GB/s for bytes"),
        (units.parse_seconds, "fast", 'such as "6 us"'),
        (units.parse_seconds, "6 GB", "unknown unit"),
        (units.parse_flop_per_s, "312 TFLOP", "did you mean TFLOP"),
        (units.parse_bytes, "nan GB", "expected bytes with a unit"),
    ],
)
def test_a_wrong_quantity_says_what_was_expected(parse, text, message):
    with pytest.raises(InputError, match=message):
        parse(text)


PAIRS = [
    (units.format_bytes, units.parse_bytes),
    (units.format_bytes_per_s, units.parse_bytes_per_s),
    (units.format_seconds, units.parse_seconds),
    (units.format_flop_per_s, units.parse_flop_per_s),
]


@given(st.sampled_from(PAIRS), st.floats(min_value=1e-6, max_value=1e20))
def test_what_is_printed_reads_back_to_the_digits_shown(pair, value):
    show, parse = pair
    assert parse(show(value, digits=6)) == pytest.approx(value, rel=1e-5)
