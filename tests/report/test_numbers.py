import math

import pytest

from halfstep.report import bytes_text, number, ratio_text, seconds_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (16384.0, "16384"),
        (0.000123456, "0.0001235"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (3.4e38, "3.4e+38"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (166.4 * 2**20, "166 MiB"),
        (1010 * 2**20, "1010 MiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [(1.0, None, ""), (None, 1.0, ""), (1.0, 0.0, ""), (1, 4, "0.25x")],
)
def test_ratio(value, reference, text):
    assert ratio_text(value, reference) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (3600, "60:00")])
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text
