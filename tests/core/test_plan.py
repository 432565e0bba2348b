import math
import tomllib
import warnings

import pytest
from hypothesis import given

from halfstep.core import (
    Candidate,
    Machine,
    Measured,
    Plan,
    Policy,
    Rules,
    StalePlanWarning,
    plan_of,
    tell_if_stale,
)
from halfstep.core._positions import Position, position
from halfstep.errors import MissingFileError, PlanError
from tests.core.strategies import PLANS

RULES = Rules().with_rule("softmax", "full", reason='It says "why".', where="head*")
MACHINE = Machine("cpu", "a processor", 2, ("halfstep 0.1.0", "torch 2.13.0"))
PLAN = Plan(
    Policy.named("mixed_bfloat16").with_(rules=RULES),
    MACHINE,
    (Candidate("mixed_bfloat16", 0.01, 0.001, 50), Candidate("float32", 0.015, 0.001, 100)),
    (Measured("aten::mm", "head", "8x4 4x2", 3, "lower", 1e-4, math.inf, math.inf),),
    "2026-11-30",
)
TEXT = PLAN.to_toml()

# What is written, what it becomes, and where and how the error says so.
MISTAKES = {
    "an unknown table": ("[[rules]]", "[[ruels]]", 12, 3, "Did you mean 'rules'"),
    "an unknown key": ("compute_dtype", "compute_dtpe", 7, 1, "Did you mean 'compute_dtype'"),
    "an unknown format": ('"bfloat16"', '"bfloat18"', 7, 1, "Did you mean 'bfloat16'"),
    "an unknown rule set": ('"halfstep-1"', '"halfstep-9"', 9, 1, "Did you mean 'halfstep-1'"),
    "an unknown scale": ('scale = "none"', 'scale = "nine"', 10, 1, "LossScale needs"),
    "an unknown family": ('"softmax"', '"sofmax"', 13, 1, "Did you mean 'softmax'"),
    "an unknown action": ('"full"', '"fulll"', 14, 1, "Did you mean 'full'"),
    "a key of rules": ("where =", "were =", 16, 1, "Did you mean 'where'"),
    "a missing action": ('action = "full"\n', "", 13, 1, "needs action"),
    "a number as text": ("threads = 2", 'threads = "2"', 21, 1, "a whole number"),
    "a measurement": ("count = 3", "cuont = 3", 43, 1, "Did you mean 'count'"),
    "a candidate": ("seconds = 0.015", 'seconds = "x"', 35, 1, "a number"),
    "a date": ('"2026-11-30"', "2026-11-30", 3, 1, "made to be a text"),
    "no policy": ("[policy]", "[policies]", 5, 2, "Did you mean 'policy'"),
    "a rule that is none": ("[[rules]]", "[rules]", 12, 2, "tables [[rules]]"),
}


def test_its_text_has_a_line_for_each_thing():
    lines = TEXT.splitlines()
    assert lines[4:7] == ["[policy]", 'param_dtype = "float32"', 'compute_dtype = "bfloat16"']
    assert lines[11:14] == ["[[rules]]", 'target = "softmax"', 'action = "full"']
    assert tomllib.loads(TEXT)["measured"][0]["low_seconds"] == math.inf


@given(PLANS)
def test_what_is_written_is_read(plan):
    assert Plan.parse(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"policy": "float32"}, "Plan needs machine"),
        (3, "Plan needs a dict"),
        (PLAN.to_dict() | {"canidates": []}, "Did you mean 'candidates'"),
        (PLAN.to_dict() | {"measured": 3}, "tables"),
        (PLAN.to_dict() | {"machine": {"device": "cpu"}}, "machine needs name"),
    ],
)
def test_plain_data_that_is_no_plan(data, says):
    with pytest.raises(PlanError, match=says):
        Plan.from_dict(data)


def test_a_file_is_a_policy(tmp_path):
    path = tmp_path / "mine.toml"
    PLAN.save(path)
    assert Plan.load(path) == PLAN == plan_of(str(path))
    assert Policy.of(str(path)) == Policy.of(path) == Policy.of(PLAN) == PLAN.policy
    assert plan_of(PLAN) is PLAN
    assert plan_of(PLAN.policy) is None


def test_a_few_lines_by_hand_are_enough():
    plan = Plan.parse('[policy]\ncompute_dtype = "bfloat16"\nscale = "none"')
    assert plan.policy == Policy.named("mixed_bfloat16")
    assert (plan.candidates, plan.speedup, plan.saved) == ((), None, None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_line_and_column(mistake):
    before, after, line, column, says = MISTAKES[mistake]
    assert before in TEXT
    with pytest.raises(PlanError) as raised:
        Plan.parse(TEXT.replace(before, after, 1), "mine.toml")
    assert str(raised.value).startswith(f"mine.toml, line {line}, column {column}: ")
    assert says in str(raised.value)


def test_two_rules_of_one_target_are_told_where_the_second_is():
    second = '\n[[rules]]\ntarget = "softmax"\naction = "keep"\nreason = "x"\nwhere = "head*"\n'
    with pytest.raises(PlanError, match=r"line \d+, column 1: Rules needs one edit per target"):
        Plan.parse(TEXT + second)


def test_what_is_no_toml_is_told_with_its_line():
    with pytest.raises(PlanError, match=r"mine needs to be TOML.*line 2"):
        Plan.parse("[policy]\nx = = 1", "mine")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MissingFileError, match=r"needs a file that exists.*halfstep plan"):
        Policy.parse(str(tmp_path / "none.toml"))


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="no text"):
        Plan.load(path)


def test_a_file_of_an_editor_that_marks_its_encoding(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT, "utf-8-sig")
    assert Plan.load(path) == PLAN


def test_what_is_no_file(tmp_path):
    with pytest.raises(PlanError, match=r"a file that can be read, got .*: Is a directory"):
        Plan.load(tmp_path)


def test_what_is_nested_without_end():
    with pytest.raises(PlanError, match="mine needs to be TOML of a plan, got one nested too deep"):
        Plan.parse("made = " + "[" * 100_000, "mine")


def test_a_policy_of_which_nothing_is_said():
    with pytest.raises(PlanError, match=r"line 1, column 2: A plan needs keys in \[policy\], got"):
        Plan.parse("[policy]\n")


def test_a_plan_of_many_rules_keeps_all_of_them():
    row = '[[rules]]\ntarget = "softmax"\naction = "full"\nreason = "x"\nwhere = "layer{}"\n'
    text = '[policy]\nscale = "none"\n' + "".join(row.format(number) for number in range(2000))
    assert len(Plan.parse(text).policy.rules.edits) == 2000


def test_speed_and_memory_are_over_those_of_float32():
    assert PLAN.speedup == 1.5
    assert PLAN.saved == 0.5


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (Machine("cuda", "a processor", 2), "device cuda, not cpu"),
        (Machine("cpu", "another", 2), "name another, not a processor"),
        (Machine("cpu", "a processor", 8), "threads 8, not 2"),
        (Machine("cpu", "a processor", 2, ("torch 2.14.0",)), "torch 2.14.0, not 2.13.0"),
    ],
)
def test_a_plan_from_elsewhere_says_so(now, says):
    with pytest.warns(StalePlanWarning, match=says):
        tell_if_stale(PLAN, now)


def test_a_plan_that_does_not_say_where_it_is_from_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_if_stale(Plan(PLAN.policy, Machine("", "")), MACHINE)


def test_a_plan_from_here_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_if_stale(PLAN, MACHINE)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (("a",), (1, 2)),
        (("a", "b"), (2, 1)),
        (("a", "text"), (3, 1)),
        (("rows", 0, "b"), (7, 1)),
        (("rows", 1, "b"), (9, 3)),
        (("rows", 1, "c", "b"), (10, 9)),
        (("rows", 1, "c", "d", "b"), (10, 18)),
        (("rows", 2, "b"), None),
        (("a", 3), (1, 2)),
        ((), None),
    ],
)
def test_positions(key, place):
    text = (
        '[a]\nb = 1 # b\ntext = """\nb = 2\n"""\n[[rows]]\n"b" = 1\n[[rows]]\n  b = 1\n'
        "  c = { b = 1, d.b = 2 }\n"
    )
    assert position(text, key) == (place and Position(*place))
