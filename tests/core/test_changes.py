"""Remedies that belong together are one text, and those that do not are told apart."""

import dataclasses

import pytest

from halfstep.core import Change, Policy, Rule, Rules, policy_words, together, written

WIDE = Rule("matmul", "full", "It needs it.", where="wide")
SUMS = Rule("softmax", "full", "It sums.", where="head")
USE = "set_global_policy(policy)"
BASE = policy_words(Policy(rules=Rules.parse('halfstep-1 + aten::exp=keep "Mine."')))
RULED = Change(USE, "policy", BASE, rules=(WIDE,))
SCALED = Change(USE, "policy", BASE, scale="dynamic(init_scale=8.0)")
WIDER = Change(USE, "policy", BASE, instead="mixed_bfloat16")
LOWER = "lower = autocast(dtype=torch.float16{})"
AUTOCAST = Change(LOWER.format(", rules=rules"), "autocast in a.py:3", BASE, rules=(WIDE,))
LINE = Change("h = h.clamp(min=1e-3)")
MASTERS = Change("keep_masters(optimizer)", "parameters")


def policy_of(text):
    *before, use = text.splitlines()
    assert use == USE
    names = {}
    exec("\n".join(line for line in before if "halfstep.torch" not in line), names)
    return names["policy"]


def test_a_scale_and_rules_of_several_remedies_are_one_policy():
    more = dataclasses.replace(RULED, rules=(SUMS, WIDE))
    text, later = together([("a", (RULED,)), ("b", (SCALED,)), ("c", (more,))])
    assert later == ()
    assert text.count(USE) == 1
    policy = policy_of(text)
    assert policy.scale.init_scale == 8.0
    mine, *added = policy.rules.edits
    assert (mine.target, [each.key for each in added]) == ("aten::exp", [WIDE.key, SUMS.key])


@pytest.mark.parametrize("changes", [(RULED,), (SCALED,), (RULED, LINE), (AUTOCAST, MASTERS)])
def test_one_remedy_is_written_as_it_is(changes):
    assert together([("a", changes), ("b", changes)]) == (written(changes), ())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SCALED, dataclasses.replace(SCALED, scale="dynamic(init_scale=4.0)")),
        (RULED, WIDER),
        (WIDER, SCALED),
        (RULED, dataclasses.replace(RULED, rules=(dataclasses.replace(WIDE, action="keep"),))),
        (AUTOCAST, Change("lower = autocast(...)", "autocast*", instead="mixed_bfloat16")),
        (Change("model.float()", "parameters"), MASTERS),
        (Change("scaler = GradScaler(2)", "scaler"), Change("scaler = GradScaler(4)", "scaler")),
    ],
)
def test_what_contradicts_is_left_for_later_as_a_whole(first, second):
    text, later = together([("a", (first,)), ("b", (LINE, second))])
    assert (text, later) == (written([first]), ("b",))


def test_an_autocast_of_the_script_is_whichever_there_is():
    other = Change(LOWER.format(", rules=rules"), "autocast*", BASE, rules=(SUMS,))
    text, later = together([("a", (AUTOCAST,)), ("b", (other,))])
    assert (text.count("lower ="), text.count("with_rule("), later) == (1, 2, ())
    elsewhere = dataclasses.replace(AUTOCAST, of="autocast in a.py:9")
    assert together([("a", (AUTOCAST,)), ("b", (elsewhere,))]).text.count("lower =") == 2


def test_rules_win_over_a_change_that_only_names_another_autocast():
    ours = Change(LOWER.format(""), AUTOCAST.of)
    for pair in ((ours, AUTOCAST), (AUTOCAST, ours)):
        assert "rules=rules" in together([("a", pair[:1]), ("b", pair[1:])]).text


def test_imports_come_first_and_once():
    own = Change("import numpy as np\nx = np.ones(2)")
    text = written([MASTERS, own, Change("from halfstep.torch import keep_masters\ny = 1")])
    assert text.splitlines() == [
        "import numpy as np",
        "from halfstep.torch import keep_masters",
        "keep_masters(optimizer)",
        "x = np.ones(2)",
        "y = 1",
    ]
