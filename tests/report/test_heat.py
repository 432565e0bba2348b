import json

import pytest

from halfstep.core import FORMATS, Exponents, Magnitudes, Report
from halfstep.report._heat import heat_maps, phase, windows

ONE, TWO = Exponents({-3: 1, 1: 4}, zeros=2, largest=3.0), Exponents({-5: 1}, largest=0.04)


def maps(*ranges):
    found = heat_maps(Report(script="a.py", policy="float32", ranges=ranges))
    json.dumps(found, allow_nan=False)
    return found


def test_a_map_per_role_forward_first_with_the_modules_in_their_order():
    found = maps(
        Magnitudes("b", "grad_weight", "float16", ONE, 8.0),
        Magnitudes("b", "other", "float16", ONE),
        Magnitudes("b", "output", "float16", ONE),
        Magnitudes("a", "output", "float16", TWO),
    )
    assert [each["role"] for each in found] == ["output", "grad_weight", "other"]
    assert [each["phase"] for each in found] == ["forward", "backward", "forward"]
    assert [row["module"] for row in found[0]["rows"]] == ["b", "a"]
    assert found[1]["rows"][0]["scale"] == 3


def test_rows_share_their_exponents():
    (found,) = maps(
        Magnitudes("a", "output", "float16", ONE), Magnitudes("b", "output", "float16", TWO)
    )
    assert found["exponents"] == list(range(-5, 2))
    assert [row["counts"] for row in found["rows"]] == [[0, 0, 1, 0, 0, 0, 4], [1, *[0] * 6]]
    assert found["rows"][0]["total"] == 7


def test_tensors_of_nothing_but_zeros():
    (found,) = maps(Magnitudes("a", "output", "float16", Exponents(zeros=4)))
    assert found["exponents"] == []
    assert found["rows"][0]["counts"] == []


def test_names_are_made_visible():
    (found,) = maps(Magnitudes("\u202ea", "x\x00", "float16", ONE))
    assert (found["role"], found["rows"][0]["module"]) == (r"x\x00", r"\u202ea")


@pytest.mark.parametrize(
    ("role", "expected"), [("grad_other", "backward"), ("input", "forward"), ("x", "forward")]
)
def test_passes(role, expected):
    assert phase(role) == expected


def test_the_windows_are_those_of_the_formats():
    assert list(windows()) == [each.name for each in FORMATS]
    for each in FORMATS:
        found = windows()[each.name]
        assert 2.0 ** found["subnormal"] == each.min_normal
        assert 2.0 ** (found["largest"] - 1) == pytest.approx(each.max / 2, rel=1e-12)
        assert found["zero"] < found["subnormal"] < found["largest"]
