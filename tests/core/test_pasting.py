import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep import Policy, Rule, Rules
from halfstep.core import complete, policy_text, policy_words, quoted, rules_text
from tests.core.strategies import POLICIES

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts)
def test_whatever_is_quoted_is_read_as_it_was(text):
    assert ast.literal_eval(quoted(text)) == text


@given(POLICIES)
def test_a_policy_is_written_as_it_is(policy):
    assert Policy.parse(policy_words(policy)) == policy
    names = {}
    exec(complete(f"policy = {policy_text(policy)}"), names)
    assert names["policy"] == policy


@given(where=texts.filter(lambda text: text == text.strip()), reason=texts.filter(str.strip))
@pytest.mark.parametrize("base", [Rules(), Rules.parse("torch-2.13 + softmax=keep")])
def test_rules_are_written_as_they_are(base, where, reason):
    edits = [Rule("matmul", "full", reason, where), Rule("aten::exp", "keep", reason)]
    names = {}
    exec(complete(rules_text(base, edits)), names)
    expected = base
    for each in edits:
        expected = expected.with_rule(**each.to_dict())
    assert names["rules"] == expected


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("", ""),
        ("epsilon = 0.1  # torch.finfo(dtype) tells", ""),
        ("lower = torch.autocast('cpu')", "import torch\n"),
        ("my_prepare(model); x.prepare(1)", ""),
        (
            "rules = Rules()\nregion = prepare(model, policy=Policy.named('float32'))",
            "from halfstep import Policy, Rules\nfrom halfstep.torch import prepare\n",
        ),
    ],
)
def test_only_what_is_used_is_imported(text, imports):
    assert complete(text) == imports + text
