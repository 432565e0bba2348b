import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import Rule, Rules, _grammar
from halfstep.errors import RuleError
from tests.core.strategies import RULES

EXAMPLE = " Write for example 'halfstep-1 + softmax[device=cpu]=full \"reason\"'."


@given(RULES)
def test_reading_undoes_writing(rules):
    text = _grammar.write(rules.base, rules.edits)
    assert Rules(*_grammar.read(text)) == rules
    assert str(Rules.parse(text)) == text


@given(st.text())
def test_any_other_text_is_read_or_refused_with_an_error_of_its_own(text):
    with contextlib.suppress(RuleError):
        Rules.parse(text)


@given(RULES, st.data())
def test_a_damaged_text_is_read_or_refused_with_an_error_of_its_own(rules, data):
    text = str(rules)
    place = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.sampled_from([*'+=[]" ,\\', "where", ""]))
    with contextlib.suppress(RuleError):
        Rules.parse(text[:place] + damage + text[place + 1 :])


@pytest.mark.parametrize(
    ("text", "edits"),
    [
        ("none", ()),
        ("none+softmax=full", (Rule("softmax", "full", _grammar.UNSTATED_REASON),)),
        ('none + softmax = full "It sums."', (Rule("softmax", "full", "It sums."),)),
        (
            'none + aten::exp[ device = cpu  where = "layers.[0-3].*" ] = keep "a + b, [c]"',
            (Rule("aten::exp", "keep", "a + b, [c]", where="layers.[0-3].*", device="cpu"),),
        ),
        (
            "none + softmax[]=full + aten::exp.out=keep",
            (
                Rule("softmax", "full", _grammar.UNSTATED_REASON),
                Rule("aten::exp.out", "keep", _grammar.UNSTATED_REASON),
            ),
        ),
    ],
)
def test_texts(text, edits):
    assert _grammar.read(text) == ("none", edits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Rules needs the name of a rule set, got the end in ''." + EXAMPLE),
        (
            "none softmax=full",
            "Rules needs '+' before the next edit, got 'softmax' in 'none softmax=full'." + EXAMPLE,
        ),
        (
            "none + softmax full",
            "Rules needs '=' after 'softmax', got 'full' in 'none + softmax full'." + EXAMPLE,
        ),
        ("none +", "Rules needs a family or an operation, got the end in 'none +'." + EXAMPLE),
        (
            "none + softmax=",
            "Rules needs an action, got the end in 'none + softmax='." + EXAMPLE,
        ),
        (
            "none + softmax[devcie=cpu]=full",
            "Rules needs a limit among where, device, dtype, got 'devcie' in"
            " 'none + softmax[devcie=cpu]=full'. Did you mean 'device'?",
        ),
        (
            "none + softmax[reason=x]=full",
            "Rules needs a limit among where, device, dtype, got 'reason' in"
            " 'none + softmax[reason=x]=full'." + EXAMPLE,
        ),
        (
            "none + softmax[device=cpu device=cuda]=full",
            "Rules needs each limit once, got 'device' in"
            " 'none + softmax[device=cpu device=cuda]=full'. Remove the second one.",
        ),
        (
            "none + softmax[device=cpu",
            "Rules needs a limit, got the end in 'none + softmax[device=cpu'." + EXAMPLE,
        ),
        (
            "none + softmax[where=]=full",
            "Rules needs a value for 'where', got ']' in 'none + softmax[where=]=full'." + EXAMPLE,
        ),
        (
            'none + softmax=full "open',
            "Rules needs a reason as a JSON string, got '\"' in 'none + softmax=full \"open'."
            " Check its quotes and backslashes.",
        ),
        (
            r'none + softmax=full "\q"',
            r"""Rules needs a reason as a JSON string, got '"\\q"' in"""
            r""" 'none + softmax=full "\\q"'."""
            " Check its quotes and backslashes.",
        ),
        (
            "none + sofmax=full",
            "Rule needs a family or an operation, got target='sofmax'. Did you mean 'softmax'?",
        ),
        (
            "none + softmax=ful",
            "Rule needs an action among lower, full, widest, keep, refuse, got action='ful'."
            " Did you mean 'full'?",
        ),
        (
            "none + softmax=full + softmax=keep",
            "Rules needs one edit per target and limits, got 'softmax=keep' after 'softmax=full'."
            " Remove one of them.",
        ),
        (
            "halfstep1",
            f"Rules needs a rule set among {', '.join(Rules.names())}, got 'halfstep1'."
            " Did you mean 'halfstep-1'?",
        ),
    ],
)
def test_errors(text, message):
    with pytest.raises(RuleError) as caught:
        Rules.parse(text)
    assert str(caught.value) == message


def test_something_else_than_a_text_is_refused():
    with pytest.raises(RuleError, match="Rules needs a text, got 16"):
        Rules.parse(16)
