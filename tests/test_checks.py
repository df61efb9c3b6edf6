"""What every function says to a value that it can't take."""

import math

import numpy as np
import pytest

from course_lib import checks


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2)])
def test_a_whole_number_of_python_or_numpy_becomes_an_int(value):
    assert checks.whole("n", value) == 2 and type(checks.whole("n", value)) is int


@pytest.mark.parametrize("value", [True, 2.0, "2", None, np.float64(2)])
def test_what_is_no_whole_number_is_named(value):
    with pytest.raises(TypeError, match="n must be a whole number, got"):
        checks.whole("n", value)


def test_a_number_too_small_is_named_with_the_least():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        checks.whole("n", 0)
    assert checks.whole("n", 0, least=0) == 0


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(-1)])
def test_a_number_stays_as_it_came(value):
    assert checks.number("x", value) is value


def test_a_number_is_finite_and_no_text_or_truth():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="x must be finite, got"):
            checks.number("x", value)
    for value in (True, "1", None):
        with pytest.raises(TypeError, match="x must be a number, got"):
            checks.number("x", value)


def test_one_of_names_what_is_allowed():
    checks.one_of("stage", 2, range(4))
    for value in (4, True, "2"):  # True equals 1 and isn't it
        with pytest.raises(ValueError, match=r"stage must be one of 0, 1, 2, 3, got"):
            checks.one_of("stage", value, range(4))
