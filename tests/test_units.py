import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import units

FACTORS = {
    units.binary: {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    units.decimal: {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    units.flops: {
        "FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15,
        "EFLOP": 1e18,
    },
    units.seconds: {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9},
}  # fmt: skip


@pytest.mark.parametrize("as_text", FACTORS)
@given(value=st.floats(1e-6, 1e12))
def test_the_text_read_back_is_the_value(as_text, value):
    number, unit = as_text(value).split()
    digit = 0.005 * FACTORS[as_text][unit]  # half of the last decimal
    assert abs(float(number) * FACTORS[as_text][unit] - value) <= digit * 1.001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.binary(1023), "1023 B"),
        (units.binary(2**20 - 1), "1.00 MiB"),  # not 1024.00 KiB
        (units.binary(-3 * 2**30), "-3.00 GiB"),
        (units.binary(0), "0 B"),
        (units.decimal(80e9, 0), "80 GB"),
        (units.decimal(999_999), "1.00 MB"),
        (units.flops(2 * 32 * 1024 * 4096), "268.44 MFLOP"),
        (units.seconds(0), "0.00 s"),
        (units.seconds(90), "90.00 s"),
        (units.seconds(0.9999999), "1.00 s"),
        (units.seconds(0.00099999999), "1.00 ms"),
        (units.binary(np.int64(2**30)), "1.00 GiB"),
    ],
)
def test_edges_of_the_units(text, expected):
    assert text == expected


@pytest.mark.parametrize("as_text", FACTORS)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("12", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_finite_number_is_refused(as_text, value, error):
    with pytest.raises(error):
        as_text(value)


@pytest.mark.parametrize("as_text", FACTORS)
@pytest.mark.parametrize(
    ("digits", "error"),
    [(-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_digits_are_a_whole_number(as_text, digits, error):
    assert as_text(1.25, np.int64(1)) == as_text(1.25, 1)
    with pytest.raises(error, match="digits must be"):
        as_text(1, digits)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("25", 25, ""),
        (" 25 % ", 25, "%"),
        ("25%", 25, "%"),
        ("2,048", 2048, ""),
        ("2 048", 2048, ""),
        ("1,234,567.5 GB", 1234567.5, "GB"),
        ("3,5", 3.5, ""),
        ("0,125", 0.125, ""),
        ("1,2345", 1.2345, ""),
        ("3.5GiB", 3.5, "GiB"),
        (".5", 0.5, ""),
        (",5", 0.5, ""),
        ("5.", 5, ""),
        ("1e9", 1e9, ""),
        ("2.5E-3 s", 0.0025, "s"),
        ("−2", -2, ""),
        ("+2e−1", 0.2, ""),
        ("12 eggs", 12, "eggs"),
        ("12e", 12, "e"),
    ],
)
def test_a_number_is_read_as_readers_type_it(text, number, unit):
    assert units.typed(text) == (number, unit)


@pytest.mark.parametrize("text", ["", "a lot", "about 3", "nan", "inf", "1.000.000", "1,5,2", "%"])
def test_what_does_not_begin_with_a_number_is_refused(text):
    with pytest.raises(ValueError, match="a number is needed"):
        units.typed(text)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["r", ",", ".17g"]))
def test_a_printed_number_is_read_back(value, how):
    text = repr(value) if how == "r" else f"{value:{how}}"
    assert units.typed(text) == (value, "")
