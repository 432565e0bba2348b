"""Fractions that are read off the exponents, against casts of the values themselves."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep import Exponents, Format
from halfstep.core import LOW_FORMATS, Window
from halfstep.errors import FormatError, UsageError
from tests.core.strategies import EXPONENTS

DTYPES = {name: getattr(ml_dtypes, name, np.float16) for name in LOW_FORMATS}
FORM = pytest.mark.parametrize("form", LOW_FORMATS)
SEEDS, POWERS = st.integers(0, 2**32 - 1), st.integers(-8, 8)


def drawn(seed, form, spread=12):
    """Returns values around both ends of a format, and a few that are not numbers."""
    numbers, entry = np.random.default_rng(seed), Format.named(form)
    ends = np.log2([entry.smallest_subnormal, entry.min_normal, entry.max])
    powers = np.rint(numbers.choice(ends, 200) + numbers.integers(-spread, spread, 200))
    values = np.ldexp(1 + numbers.random(200), powers.astype(int)) * numbers.choice([-1, 1], 200)
    with np.errstate(over="ignore"):
        return np.append(values, [0.0, 0.0, np.nan, np.inf]).astype(np.float32)


def cast(values, form, power):
    """Returns what numbers become in a format; neither halves nor what float32 cannot hold."""
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    with np.errstate(all="ignore"):
        return finite, (finite * 2.0**power).astype(DTYPES[form]).astype(np.float64)


@FORM
@given(seed=SEEDS, power=POWERS)
def test_the_flushed_fraction_is_that_of_a_cast(form, seed, power):
    values = drawn(seed, form)
    finite, low = cast(values, form, power)
    assert Exponents.of(values).flushed(form, power) == pytest.approx(
        (low == 0).sum() / len(finite)
    )


@FORM
@given(seed=SEEDS, power=POWERS)
def test_the_subnormal_fraction_is_that_of_a_comparison(form, seed, power):
    values = drawn(seed, form)
    finite, low = cast(values, form, power)
    small = (np.abs(finite * 2.0**power) < Format.named(form).min_normal) & (low != 0)
    assert Exponents.of(values).subnormal(form, power) == pytest.approx(small.sum() / len(finite))


@FORM
@given(seed=SEEDS, power=POWERS)
def test_overflow_is_that_of_a_cast(form, seed, power):
    values = drawn(seed, form, spread=3)
    finite, low = cast(values, form, power)
    over = (~np.isfinite(low)).sum() / len(finite)
    found = Exponents.of(values)
    assert (found.overflowed(form, power) > 0) == (over > 0)
    assert found.overflowed(form, power) <= over + 1e-12
    assert found.saturated(form, power) >= over


@FORM
@given(seed=SEEDS, tolerance=st.sampled_from([0.0, 0.001, 0.01, 0.3]))
def test_a_window_ends_where_something_is_lost(form, seed, tolerance):
    found = Exponents.of(drawn(seed, form))
    window = found.window(form, tolerance)
    assert found.flushed(form, window.lowest) <= tolerance
    assert window.lowest == -126 or found.flushed(form, window.lowest - 1) > tolerance
    assert found.overflowed(form, window.highest) == 0
    assert window.highest == 126 or found.overflowed(form, window.highest + 1) > 0


@pytest.mark.parametrize(
    ("form", "limit"), [("float16", 65520.0), ("float8_e4m3fn", 464.0), ("float8_e5m2", 61440.0)]
)
def test_the_limit_lies_within_a_power_of_two(form, limit):
    end, below = np.array([limit], np.float32), np.nextafter(np.float32(limit), np.float32(0))
    for value in (end, below, np.nextafter(end, np.float32(np.inf))):
        with np.errstate(over="ignore"):
            overflows = not np.isfinite(value.astype(DTYPES[form]).astype(np.float64)).all()
        assert (Exponents.of(value).overflowed(form) > 0) == overflows


def test_halves_of_the_smallest_number_are_the_exception():
    half = np.float16(2.0**-24) / 2
    assert Exponents.of([2.0**-25]).flushed("float16") == 0.0
    assert half == 0.0


@given(st.lists(st.floats(width=32), max_size=40), st.lists(st.floats(width=32), max_size=40))
def test_two_add_up_to_those_of_all_values(first, second):
    parts = [Exponents.of(first), Exponents.of(second)]
    assert parts[0] + parts[1] == Exponents.of(first + second) == sum(parts, Exponents())
    assert parts[0].total == len(first)


def test_every_float32_has_its_exponent():
    powers = np.arange(-149, 128)
    found = Exponents.of(np.ldexp(np.float32(1), powers))
    assert found.counts == tuple((power, 1) for power in powers.tolist())
    assert (found.lowest, found.highest) == (-149, 127)


def test_nothing_has_no_window_and_loses_nothing():
    for empty in (Exponents(), Exponents.of([0.0, 0.0, np.nan, -np.inf])):
        assert empty.window("float16") is None
        assert empty.flushed("float16") == empty.overflowed("float16", 300) == 0.0
        assert (empty.lowest, empty.highest) == (None, None)
    assert Exponents.of([0.0, 0.0, np.nan, -np.inf]).zero == 0.5
    assert Exponents().zero == 0.0


def test_formats_wider_than_float32_lose_nothing():
    found = Exponents.of(np.float32([1e-45, 3.4e38]))
    assert found.flushed("float64") == found.overflowed("float64") == 0.0
    assert 0 in found.window("float64")


@given(EXPONENTS)
def test_json_has_all_of_it(value):
    assert Exponents.from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"counts": {128: 1}, "largest": 2.0**128}, "exponents from -149 to 127, got 128. Write"),
        ({"counts": {0: -1}, "largest": 1.0}, "counts >= 0, got -1. Count"),
        ({"nans": -2}, "counts >= 0, got -2"),
        ({"counts": {0: 1}}, "got 0.0 where the largest exponent is 0. Pass"),
        ({"largest": float("inf")}, "got inf where the largest exponent is None"),
    ],
)
def test_impossible_counts_are_refused(arguments, text):
    with pytest.raises(UsageError) as caught:
        Exponents(**arguments)
    assert text in str(caught.value)


def test_unknown_formats_are_refused():
    with pytest.raises(FormatError, match="Did you mean 'float16'"):
        Exponents().flushed("flaot16")


def test_windows_have_a_middle_and_a_common_part():
    assert [Window(0, top).middle for top in range(4)] == [0, 1, 1, 2]
    assert Window.common([]) is Window.common([None]) is None
    assert Window.common([Window(0, 5), None, Window(7, 9)]) == Window(7, 5)
    assert str(Window(7, 5)) == "none"
    assert 3 not in Window(7, 5)
