"""What is read from the ranges of a step, and how it is told."""

import dataclasses
import json

import pytest

from halfstep import Exponents
from halfstep.core import Moment, Range, Ranges, Reading, Sample, Window


def exponents(*powers):
    """Returns one value at each power of two."""
    return Exponents.of([2.0**power for power in powers])


def gradient(module, *powers, families=("matmul",), role="grad_output"):
    found = exponents(*powers)
    return Range(module, role, found, found, "float16", families)


def test_the_scale_is_in_the_middle_of_what_all_share():
    found = Ranges((gradient("a", -40, -20), gradient("b", -30, -10)), entering=1.0)
    assert [found.window(module=name) for name in "ab"] == [Window(15, 35), Window(5, 25)]
    assert found.window() == Window(15, 25)
    assert (found.power, found.scale, found.outside) == (20, 2.0**20, ())
    assert found.lost() == 0.5
    assert found.lost(module="b", power=5) == 0.0


def test_roles_of_a_module_count_together_but_not_those_forward():
    rows = (gradient("a", -40), gradient("a", -20, role="grad_weight"))
    forward = gradient("a", 10, role="output")
    found = Ranges((*rows, forward))
    assert found.gradients("a") == exponents(-40, -20)
    assert found.window(module="a") == Window(15, 35)


def test_without_a_common_scale_the_most_modules_fit():
    rows = [gradient(name, -45) for name in "abc"] + [gradient("wide", 4)]
    found = Ranges(tuple(rows), entering=1.0)
    assert not found.window()
    assert found.outside == ("wide",)
    assert found.power in found.window(module="a")
    assert 'with_rule("matmul", "full", ' in str(found)
    assert 'where="wide")' in str(found)


def test_a_module_that_no_scale_fits_is_outside_and_does_not_choose():
    found = Ranges((gradient("a", -30), gradient("wide", -60, 4, families=("matmul", "pointwise"))))
    assert found.power in found.window(module="a")
    assert found.outside == ("wide",)
    (change, _) = found.changes
    assert [edit.target for edit in change.rules] == ["matmul", "pointwise"]


def test_where_most_do_not_fit_it_is_bfloat16():
    found = Ranges(tuple(gradient(name, -60, 4) for name in "abcd"))
    assert str(found).splitlines()[-1] == "  lower = autocast(dtype=torch.bfloat16)"
    prepared = dataclasses.replace(found, policy="mixed_float16")
    assert prepared.remedy.splitlines()[1:] == [
        'policy = "mixed_bfloat16"',
        "region = prepare(model, optimizer, policy=policy)",
    ]


def test_values_that_overflow_forward_are_outside_at_any_scale():
    found = Ranges((gradient("a", 16, role="output"), gradient("a", -20), gradient("b", -20)))
    assert found.outside == ("a",)


@pytest.mark.parametrize(
    ("powers", "power"), [((-10, -4), 0), ((-24,), 19), ((-3, 8), -7), ((-140, 100), 17)]
)
def test_far_from_both_ends_no_scale_is_needed(powers, power):
    form = "bfloat16" if powers[0] < -100 else "float16"
    found = Ranges((gradient("a", *powers),), form=form)
    assert found.power == power
    assert ("GradScaler" in str(found)) == bool(power)


def test_what_to_write_can_be_pasted():
    rows = (gradient("a", -30), gradient("b", -30), gradient("wide", -60, 4))
    found, names = Ranges(rows, entering=3.0), {}
    *rules, lower, scaler = found.remedy.splitlines()
    assert scaler == f"scaler = GradScaler(init_scale=2.0**{found.power})"
    assert lower == "lower = autocast(dtype=torch.float16, rules=rules)"
    used = 'mixed_float16, rules=halfstep-1 + softmax=keep "Mine."'
    *rules, prepare = dataclasses.replace(found, policy=used).remedy.splitlines()
    assert prepare == "region = prepare(model, optimizer, policy=policy)"
    exec("\n".join(line for line in rules if "halfstep.torch" not in line), names)
    assert names["policy"].scale.init_scale == found.region_scale == 2.0 ** (found.power + 2)
    own, *more = names["policy"].rules.edits
    assert (own.target, [each.where for each in more]) == ("softmax", ["wide"])


def test_long_tables_are_cut():
    found = Ranges(tuple(gradient(f"m{index}", -20) for index in range(45)))
    assert "and 5 more modules" in str(found)


@pytest.mark.parametrize(
    "found", [Ranges(), Ranges((Range("a", "grad_output", *[Exponents()] * 2),))]
)
def test_nothing_but_zeros_needs_nothing(found):
    assert (found.power, found.scale, found.region_scale, found.window()) == (None,) * 4
    assert str(found) == "no gradient is anything but zero"
    assert found.outside == ()


@pytest.mark.parametrize(
    ("zeros", "expected"), [((0, 0), 0.0), ((0, 3), 0.75), ((4, 7), 0.75), ((3, 0), 0.0)]
)
def test_lost_is_what_became_zero(zeros, expected):
    both = [Exponents.of([1.0] * (4 + zeros[0] - some) + [0.0] * some) for some in zeros]
    if zeros[0] > zeros[1]:
        both[1] = Exponents.of([1.0] * 7)
    assert Range("a", "grad_output", *both).lost == pytest.approx(expected)


def test_moments_vanish_in_float32_already_or_in_the_format():
    squares = Exponents.of([0.0, 2.0**-30, 2.0**-10, 2.0**-12])
    assert Moment("weight", "float32", 1e-8, squares).vanishing == 0.25
    assert Moment("weight", "float16", 1e-8, squares).vanishing == 0.5
    found = Ranges(
        (gradient("a", -20),),
        moments=(Moment("weight", "float16", 1e-8, squares),),
        updates=(("weight", 0.5), ("bias", 0.0)),
    )
    assert "    50.0%  weight in float16, and eps=1e-08 is zero there" in str(found)
    assert "    50.0%  weight\n" in str(found)
    assert "bias" not in str(found)


def test_all_of_it_is_plain_data():
    moment = Moment("weight", "float16", 1e-8, exponents(-30))
    found = Ranges((gradient("a", -20),), updates=(("w", 0.5),), moments=(moment,))
    data = found.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["rows"][0]["windows"]["float16"] == {"lowest": -5, "highest": 35}
    assert data["updates"] == {"w": 0.5}
    (module,) = data["modules"]
    assert (module["module"], module["window"]) == ("a", {"lowest": -5, "highest": 35})
    assert [power for power, lost, _ in module["curve"] if lost] == [*range(-24, -5)]
    assert [power for power, _, over in module["curve"] if over] == [*range(36, 49)]


def test_a_sample_tells_formats_apart():
    rows = [("a", "output", form, exponents(-20, 15)) for form in ("float16", "float32")]
    sample = Sample(7, "fault", tuple(Reading(*row) for row in rows))
    assert sample.find("a", "output").headroom == 0
    assert sample.find("b", "output") is None
    lines = str(sample).splitlines()
    assert lines[0] == "call 7, after a skipped step"
    row = "a output {} 2^-20 to 2^16 0.00% {} {} 0 0"
    assert " ".join(lines[2].split()) == row.format("float16", "50.00%", "50.00%")
    assert " ".join(lines[3].split()) == row.format("float32", "0.00%", "0.00%")
    assert json.loads(json.dumps(sample.to_dict())) == sample.to_dict()
