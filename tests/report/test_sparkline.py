import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.report import finite_limits, sparkline


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([0.0, math.inf, math.nan, 7.0], "▁!!█"),
        ([math.nan], "!"),
    ],
)
def test_bars(values, text):
    assert sparkline(values) == text


def test_neighbours_are_averaged_to_fit():
    assert sparkline([0.0, 2.0, 3.0, 5.0], width=2) == "▁█"


def test_a_shared_scale_draws_what_lies_beyond_at_the_edge():
    assert sparkline([-5.0, 0.0, 7.0, 99.0], limits=(0.0, 7.0)) == "▁▁██"


def test_ascii_only():
    assert sparkline([0.0, 7.0], ascii_only=True) == "_#"
    assert sparkline([0.0, 3.0, 7.0], ascii_only=True).isascii()


@given(st.lists(st.floats()), st.integers(1, 40))
def test_any_curve_fits(values, width):
    assert len(sparkline(values, width=width)) == min(width, len(values))


def test_limits_ignore_what_is_not_finite():
    assert finite_limits([math.nan, math.inf]) == (0.0, 0.0)
