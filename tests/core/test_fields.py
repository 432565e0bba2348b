import pytest

from halfstep.core import LossScale, Policy, Rule, Rules
from halfstep.errors import PolicyError, RuleError, ScaleError


@pytest.mark.parametrize(
    ("read", "data", "error", "message"),
    [
        (
            LossScale.from_dict,
            "none",
            ScaleError,
            "LossScale needs a dict of its fields, got 'none'. Pass what to_dict() made.",
        ),
        (
            Policy.from_dict,
            {"compute": "float16"},
            PolicyError,
            "Policy needs keys among param_dtype, compute_dtype, output_dtype, rules, scale, got"
            " 'compute'. Did you mean 'compute_dtype'?",
        ),
        (
            Rule.from_dict,
            {"target": "softmax"},
            RuleError,
            "Rule needs action, got only target. Add it.",
        ),
        (Rule.from_dict, {}, RuleError, "Rule needs target, got only nothing. Add it."),
        (
            Rules.from_dict,
            {"base": "none", "edits": "softmax=full"},
            RuleError,
            "Rules needs a list of edits, got 'softmax=full'. Write a list of dicts.",
        ),
        (
            Rules.from_dict,
            {"edits": ["softmax=full"]},
            RuleError,
            "Rule needs a dict of its fields, got 'softmax=full'. Pass what to_dict() made.",
        ),
        (
            Policy.of,
            16,
            PolicyError,
            "Policy needs a Policy or its text form, got 16. Write for example 'mixed_float16'.",
        ),
        (
            Rules.of,
            None,
            RuleError,
            "Rules needs a Rules or its text form, got None. Write for example 'halfstep-1'.",
        ),
        (
            LossScale.of,
            1024.0,
            ScaleError,
            "LossScale needs a LossScale or its text form, got 1024.0."
            " Write 'static(1024.0)', or 'dynamic(init_scale=1024.0)'.",
        ),
        (
            LossScale.of,
            None,
            ScaleError,
            "LossScale needs a LossScale or its text form, got None. Write for example 'dynamic'.",
        ),
    ],
)
def test_errors(read, data, error, message):
    with pytest.raises(error) as caught:
        read(data)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", [Policy, Rules, LossScale])
def test_of_takes_the_value_its_text_and_its_dict(kind):
    value = kind()
    assert kind.of(value) is value
    assert kind.of(str(value)) == kind.of(value.to_dict()) == value
