import json

import pytest

from halfstep.core import FORMATS, Diagnosis, Exponents, Fault, Range, Ranges, Report
from halfstep.report._heat import heat_maps, opened, phase, windows

ONE, TWO = Exponents({-3: 1, 1: 4}, zeros=2, largest=3.0), Exponents({-5: 1}, largest=0.04)


def row(module, role, exponents):
    return Range(module, role, exponents, Exponents(), "float16")


def maps(*rows):
    found = heat_maps(Report(script="a.py", policy="float32", ranges=Ranges(rows), power=3))
    json.dumps(found, allow_nan=False)
    return found


def test_a_map_per_role_forward_first_with_the_modules_in_their_order():
    found = maps(
        row("b", "grad_weight", ONE),
        row("b", "other", ONE),
        row("b", "output", ONE),
        row("a", "output", TWO),
    )
    assert [each["role"] for each in found] == ["output", "grad_weight", "other"]
    assert [each["phase"] for each in found] == ["forward", "backward", "forward"]
    assert [each["module"] for each in found[0]["rows"]] == ["b", "a"]
    assert [each["rows"][0]["scale"] for each in found] == [0, 3, 0]


def test_rows_share_their_exponents():
    (found,) = maps(row("a", "output", ONE), row("b", "output", TWO))
    assert found["exponents"] == list(range(-5, 2))
    assert [each["counts"] for each in found["rows"]] == [[0, 0, 1, 0, 0, 0, 4], [1, *[0] * 6]]
    assert found["rows"][0]["total"] == 7


def test_tensors_of_nothing_but_zeros():
    (found,) = maps(row("a", "output", Exponents(zeros=4)))
    assert found["exponents"] == []
    assert found["rows"][0]["counts"] == []


def test_what_was_not_finite_is_counted_as_it_ran():
    run = Exponents({0: 2}, infs=1, nans=3, largest=1.0)
    (found,) = maps(Range("a", "output", ONE, run))
    assert [found["rows"][0][name] for name in ("infs", "nans", "ran")] == [1, 3, 6]


NOTHING = Exponents(zeros=4)
FAULT = Fault("a", "matmul", "backward", "grad_weight", "inf", "float16", (2,), 9.0)


@pytest.mark.parametrize(
    ("roles", "seen", "faults", "first"),
    [
        (["output", "grad_output"], ["output", "grad_output"], 0, "grad_output"),
        (["output", "grad_output"], ["output"], 0, "output"),
        (["weight", "grad_input"], ["grad_input"], 0, "grad_input"),
        (
            ["output", "grad_output", "grad_weight"],
            ["output", "grad_weight"],
            1,
            "grad_weight",
        ),
        (["output", "grad_output", "grad_weight"], ["output"], 1, "output"),
        (["output"], [], 0, "output"),
    ],
)
def test_it_opens_on_what_there_is_to_see(roles, seen, faults, first):
    rows = [row("a", role, ONE if role in seen else NOTHING) for role in roles]
    told = Diagnosis((FAULT,) * faults)
    report = Report(script="a.py", policy="b", ranges=Ranges(tuple(rows)), diagnosis=told)
    found = heat_maps(report)
    assert found[opened(report, found)["role"]]["role"] == first


def test_names_are_made_visible():
    (found,) = maps(row("\u202ea", "x\x00", ONE))
    assert (found["role"], found["rows"][0]["module"]) == (r"x\x00", r"\u202ea")


@pytest.mark.parametrize(
    ("role", "expected"), [("grad_input", "backward"), ("input", "forward"), ("x", "forward")]
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
