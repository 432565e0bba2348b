import pytest

from halfstep.core import ACTIONS, FAMILIES, Rule
from halfstep.errors import RuleError


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("target", [*FAMILIES, "aten::mm", "aten::softmax.int", "jax::dot_general"])
def test_every_family_operation_and_action_is_accepted(target, action):
    assert Rule(target, action, "A reason.").key == (target, "", "", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"target": "sofmax"},
            "Rule needs a family or an operation, got target='sofmax'. Did you mean 'softmax'?",
        ),
        (
            {"target": "mm"},
            "Rule needs a family or an operation, got target='mm'. Families are "
            f"{', '.join(FAMILIES)}; an operation has a namespace: 'aten::mm' in PyTorch, "
            "'lax::dot_general' and the like in JAX.",
        ),
        (
            {"target": ""},
            "Rule needs a family or an operation, got target=''."
            " Write for example 'softmax' or 'aten::softmax.int'.",
        ),
        (
            {"target": "aten::softmax.int.out"},
            "Rule needs a family or an operation, got target='aten::softmax.int.out'."
            " Write for example 'softmax' or 'aten::softmax.int'.",
        ),
        (
            {"action": "lowr"},
            "Rule needs an action among lower, full, widest, keep, refuse, got action='lowr'."
            " Did you mean 'lower'?",
        ),
        (
            {"action": "fp32"},
            "Rule needs an action among lower, full, widest, keep, refuse, got action='fp32'."
            " Write for example 'full'.",
        ),
        (
            {"reason": "  "},
            "Rule needs a reason, got reason='  '. Say in a sentence why the rule is there.",
        ),
        (
            {"where": " decoder"},
            "Rule needs a module path pattern without blanks around it, got where=' decoder'."
            " Write for example 'decoder.*'.",
        ),
        (
            {"device": "cuda:0"},
            "Rule needs a device type without a number, got device='cuda:0'. Write 'cuda'.",
        ),
        (
            {"device": "CPU"},
            "Rule needs a device type without a number, got device='CPU'. Write 'cpu'.",
        ),
        (
            {"dtype": "fp16"},
            "Rule needs a compute dtype among float64, float32, bfloat16, float16, got"
            " dtype='fp16'. Did you mean 'float16'?",
        ),
        (
            {"dtype": 16},
            "Rule needs dtype to be a text, got 16. Write a string.",
        ),
    ],
)
def test_errors(fields, message):
    good = {"target": "softmax", "action": "full", "reason": "It sums."}
    with pytest.raises(RuleError) as caught:
        Rule(**good | fields)
    assert str(caught.value) == message


def test_a_rule_cannot_be_changed():
    with pytest.raises(AttributeError):
        Rule("softmax", "full", "It sums.").action = "keep"
