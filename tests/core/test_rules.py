import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import FAMILIES, Rule, Rules
from halfstep.errors import RuleError
from tests.core.strategies import RULES, RULES_ROWS

REASON = "For the test."

# From weakest to strongest: each row beats all rows above it.
LADDER = [
    Rule("softmax", "keep", REASON),
    Rule("aten::softmax", "full", REASON),
    Rule("aten::softmax.int", "lower", REASON),
    Rule("softmax", "full", REASON, dtype="float16"),
    Rule("aten::softmax", "widest", REASON, device="cpu"),
    Rule("softmax", "lower", REASON, device="cpu", dtype="float16"),
    Rule("aten::softmax.int", "refuse", REASON, device="cpu", dtype="float16"),
    Rule("softmax", "keep", REASON, where="head.*"),
    Rule("aten::softmax.int", "lower", REASON, where="head.*"),
    Rule("softmax", "full", REASON, where="head.*", device="cpu"),
    Rule("aten::softmax.int", "widest", REASON, where="head.*", device="cpu", dtype="float16"),
]


def find(*rules, path="head.out", device="cpu", dtype="float16"):
    return Rules("none", rules).find(
        "aten::softmax.int", "softmax", path=path, device=device, dtype=dtype
    )


@pytest.mark.parametrize(("weaker", "stronger"), list(itertools.combinations(LADDER, 2)))
def test_the_more_specific_rule_wins_in_either_order(weaker, stronger):
    assert find(weaker, stronger) is find(stronger, weaker) is stronger


@given(st.permutations(LADDER), st.integers(1, len(LADDER)))
def test_the_order_of_edits_does_not_matter(rules, count):
    assert find(*rules[:count]) is max(rules[:count], key=LADDER.index)


def test_an_edit_of_a_family_beats_every_row_of_the_set():
    rules = Rules("torch-2.13").with_rule("softmax", "keep", reason=REASON)
    assert rules.find("aten::softmax.int", "softmax").action == "keep"
    assert Rules("torch-2.13").find("aten::softmax.int", "softmax").action == "full"


@pytest.mark.parametrize(
    ("rule", "where"),
    [
        (Rule("softmax", "full", REASON, where="tail.*"), {}),
        (Rule("softmax", "full", REASON, where="head"), {}),
        (Rule("softmax", "full", REASON, where="Head.*"), {}),
        (Rule("softmax", "full", REASON, device="cuda"), {}),
        (Rule("softmax", "full", REASON, device="cpu"), {"device": ""}),
        (Rule("softmax", "full", REASON, dtype="bfloat16"), {}),
        (Rule("reduction", "full", REASON), {}),
        (Rule("aten::soft", "full", REASON), {}),
        (Rule("aten::softmax.dimname", "full", REASON), {}),
    ],
)
def test_rules_about_something_else_do_not_apply(rule, where):
    assert find(rule, **where) is None


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*", ""), ("head*", "head"), ("*.out", "head.out"), ("layers.[0-3].*", "layers.2.attention")],
)
def test_patterns(pattern, path):
    assert find(Rule("softmax", "full", REASON, where=pattern), path=path)


def test_a_rule_for_all_overloads_is_found_by_the_bare_name_too():
    rules = Rules.parse("none + aten::softmax=full")
    assert rules.find("aten::softmax").action == rules.find("aten::softmax.int").action == "full"
    assert Rules.parse("none + aten::softmax.int=full").find("aten::softmax") is None


def test_overlapping_rules_that_disagree_are_refused():
    rules = Rules.parse("none + softmax[where=head.*]=full + softmax[where=*.out]=keep")
    with pytest.raises(RuleError) as caught:
        rules.find("aten::softmax.int", "softmax", path="head.out")
    assert str(caught.value) == (
        "Rules needs one action for 'aten::softmax.int' at 'head.out', got"
        " 'softmax[where=head.*]=full' and 'softmax[where=*.out]=keep', which overlap."
        " Remove one of them, or limit one of them further."
    )
    assert rules.find("aten::softmax.int", "softmax", path="head.in").action == "full"


def test_device_against_dtype_is_an_overlap_too():
    with pytest.raises(RuleError, match="which overlap"):
        find(
            Rule("softmax", "full", REASON, device="cpu"),
            Rule("softmax", "keep", REASON, dtype="float16"),
        )


def test_overlapping_rules_that_agree_are_fine():
    rules = Rules.parse("none + softmax[where=head.*]=full + softmax[where=*.out]=full")
    assert rules.find("aten::softmax", "softmax", path="head.out").where == "*.out"


def test_the_default_keeps_softmax_and_runs_half_convolutions_on_cpu_in_full():
    find_one = Rules().find
    assert find_one("aten::softmax.int", "softmax").action == "keep"
    conv = ("aten::conv2d", "convolution")
    assert find_one(*conv, device="cuda", dtype="float16").action == "lower"
    assert find_one(*conv, device="cpu", dtype="bfloat16").action == "lower"
    assert find_one(*conv, device="cpu", dtype="float16").action == "full"


@given(RULES, st.sampled_from(FAMILIES))
def test_find_answers_with_a_row_or_an_overlap(rules, family):
    try:
        found = rules.find("aten::a.b", family, path="head.out", device="cpu", dtype="float16")
    except RuleError as error:
        assert "overlap" in str(error)  # noqa: PT017
    else:
        assert found is None or found in rules.rows


@given(RULES, RULES_ROWS)
def test_with_rule_adds_or_replaces_and_without_removes(rules, row):
    limits = {"where": row.where, "device": row.device, "dtype": row.dtype}
    edited = rules.with_rule(row.target, row.action, reason=row.reason, **limits)
    assert [edit for edit in edited.edits if edit.key == row.key] == [row]
    left = tuple(edit for edit in rules.edits if edit.key != row.key)
    assert edited.without(row.target, **limits) == Rules(rules.base, left)


def test_replacing_an_edit_keeps_its_place():
    rules = Rules.parse("none + softmax=full + loss=full").with_rule(
        "softmax", "keep", reason=REASON
    )
    assert [edit.target for edit in rules.edits] == ["softmax", "loss"]


def test_edits_leave_the_original_alone():
    before = Rules()
    before.with_rule("softmax", "full", reason=REASON)
    assert before == Rules()
    assert before.edits == ()


def test_a_list_of_edits_becomes_a_tuple():
    assert Rules("none", [LADDER[0]]) == Rules("none", (LADDER[0],))


def test_rows_end_with_the_edits():
    rules = Rules("none", tuple(LADDER))
    assert rules.rows == tuple(LADDER)
    assert Rules().rows + rules.rows == Rules("halfstep-1", tuple(LADDER)).rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Rules("none", (LADDER[0], LADDER[0])),
            "Rules needs one edit per target and limits, got 'softmax=keep \"For the test.\"' after"
            " 'softmax=keep \"For the test.\"'. Remove one of them.",
        ),
        (
            lambda: Rules("none", ("softmax=full",)),
            "Rules needs edits that are a Rule, got 'softmax=full'. Write Rule(...).",
        ),
        (
            lambda: Rules().without("softmax"),
            "Rules needs an edit of 'softmax' with exactly these limits to remove, got no edits."
            " A row of the set 'halfstep-1' is overruled by with_rule(...).",
        ),
        (
            lambda: Rules.parse("none + softmax=full").without("softmax", device="cpu"),
            "Rules needs an edit of 'softmax' with exactly these limits to remove, got"
            " softmax=full. A row of the set 'none' is overruled by with_rule(...).",
        ),
        (
            lambda: Rules().find("softmax"),
            "Rules needs an operation with its namespace, got 'softmax'."
            " Write for example 'aten::softmax'.",
        ),
        (
            lambda: Rules().find("aten::softmax", "sofmax"),
            f"Rules needs a family among {', '.join(FAMILIES)}, got 'sofmax'."
            " Did you mean 'softmax'?",
        ),
        (
            lambda: Rules().with_rule("sofmax", "full", reason=REASON),
            "Rule needs a family or an operation, got target='sofmax'. Did you mean 'softmax'?",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuleError) as caught:
        call()
    assert str(caught.value) == message
