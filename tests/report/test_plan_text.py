from io import StringIO

import pytest
from rich.console import Console

from halfstep.core import Candidate, Machine, Plan, Policy, Rules
from halfstep.report import PlanText
from halfstep.report._plan_text import policy_name, verdict

HERE = Machine("cpu", "[b]AMD[/b]")
RULES = Rules().with_rule("attention", "full", reason="It [i]is[/i] slow.", where="block*")
LOW = Policy.named("mixed_bfloat16").with_(rules=RULES)


def shown(plan):
    console = Console(file=StringIO(), width=100)
    console.print(PlanText(plan, "plan.toml"))
    return console.file.getvalue()


def plan_of(low, wide, policy=LOW):
    candidates = (Candidate(str(policy), low, 0.001, 50), Candidate("float32", wide, 0.001, 100))
    return Plan(policy, HERE, candidates)


def test_the_table_the_rules_and_the_verdict():
    text = shown(plan_of(0.01, 0.02))
    assert "* mixed_bfloat16" in text
    assert "10.00 ms" in text
    assert "2.00x" in text
    assert "attention in block*: full. It [i]is[/i] slow." in text
    assert text.splitlines()[-1] == "halfstep: wrote plan.toml"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            plan_of(0.01, 0.02),
            "mixed_bfloat16, 1 rule: 2.00x as fast as float32 on [b]AMD[/b], 50 %",
        ),
        (plan_of(0.01, 0.0101), "mixed_bfloat16, 1 rule: as fast as float32 on"),
        (Plan(LOW, HERE), "mixed_bfloat16, 1 rule: not timed against float32."),
        (Plan(Policy.named("float32"), HERE), "No gain here: nothing is faster than float32 on"),
    ],
)
def test_the_verdict(plan, says):
    assert verdict(plan).startswith(says)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mixed_float16", "mixed_float16"),
        ("mixed_bfloat16, rules=torch-2.13", "mixed_bfloat16, torch-2.13"),
        (
            "mixed_float16, rules=halfstep-1 + softmax=full + aten::exp=keep",
            "mixed_float16, 2 rules",
        ),
        ("mixed_float16, scale=none", "float16"),
    ],
)
def test_names_of_policies(text, name):
    assert policy_name(Policy.parse(text)) == name
