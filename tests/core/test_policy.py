import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import LossScale, Policy, Rules
from halfstep.errors import HalfstepError, PolicyError, RuleError, ScaleError
from tests.core.strategies import POLICIES


@pytest.mark.parametrize("name", Policy.names())
def test_a_named_policy_prints_its_name(name):
    assert str(Policy.named(name)) == name
    assert Policy.parse(f" {name} ") == Policy.named(name)


def test_named_policies():
    table = {
        name: (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.scale.kind)
        for name, policy in zip(Policy.names(), map(Policy.named, Policy.names()), strict=True)
    }
    assert table == {
        "float32": ("float32", "float32", "float32", "none"),
        "mixed_float16": ("float32", "float16", "float32", "dynamic"),
        "mixed_bfloat16": ("float32", "bfloat16", "float32", "none"),
    }


def test_the_default_is_mixed_float16():
    assert Policy() == Policy.named("mixed_float16")


def test_the_text_of_any_other_policy_states_every_field():
    policy = Policy(rules=Rules.parse("none + softmax=full"), scale=LossScale.static(8.0))
    assert str(policy) == (
        "param_dtype=float32, compute_dtype=float16, output_dtype=float32,"
        " rules=none + softmax=full, scale=static(8.0)"
    )


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("compute_dtype=bfloat16,scale=none", Policy.named("mixed_bfloat16")),
        ("mixed_bfloat16, scale=dynamic", Policy(compute_dtype="bfloat16")),
        (
            'rules=none + softmax=full "a, b=c", scale=dynamic(init_scale=8.0, growth_interval=4)',
            Policy(
                rules=Rules.parse('none + softmax=full "a, b=c"'),
                scale=LossScale(init_scale=8.0, growth_interval=4),
            ),
        ),
    ],
)
def test_texts(text, policy):
    assert Policy.parse(text) == policy
    assert Policy.parse(str(policy)) == policy


@given(st.text() | POLICIES.map(str).map(lambda text: text[: len(text) // 2]))
def test_any_other_text_is_read_or_refused_with_an_error_of_ours(text):
    try:
        Policy.parse(text)
    except HalfstepError as error:
        assert str(error).endswith((".", "?"))  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "mixed_floatt16",
            PolicyError,
            "Policy needs one of float32, mixed_float16, mixed_bfloat16, got 'mixed_floatt16'."
            " Did you mean 'mixed_float16'?",
        ),
        (
            "bf16",
            PolicyError,
            "Policy needs one of float32, mixed_float16, mixed_bfloat16, got 'bf16'."
            " Did you mean 'mixed_bfloat16'?",
        ),
        (
            "O1",
            PolicyError,
            "Policy needs one of float32, mixed_float16, mixed_bfloat16, got 'O1'."
            " Or write pairs such as compute_dtype=bfloat16.",
        ),
        (
            "compute=bfloat16",
            PolicyError,
            "The policy 'compute=bfloat16' needs a key among param_dtype, compute_dtype,"
            " output_dtype, rules, scale, got 'compute'. Did you mean 'compute_dtype'?",
        ),
        (
            "compute_dtype=bf16",
            PolicyError,
            "Policy needs compute_dtype to be one of float64, float32, bfloat16, float16, got"
            " 'bf16'. Did you mean 'bfloat16'?",
        ),
        (
            "param_dtype=float32, param_dtype=float16",
            PolicyError,
            "The policy 'param_dtype=float32, param_dtype=float16' needs each key once, got"
            " 'param_dtype' twice. Remove one of them.",
        ),
        (
            "param_dtype=float32,",
            PolicyError,
            "The policy 'param_dtype=float32,' needs key=value, got ''."
            " Write for example param_dtype=...",
        ),
        ("mixed_float16, scale=static", ScaleError, "A static scale needs a value, got 'static'."),
        ("mixed_float16, rules=halfstep1", RuleError, "Rules needs a rule set among"),
        (16, PolicyError, "Policy needs a text, got 16. Write 'mixed_bfloat16'."),
    ],
)
def test_errors_of_texts(text, error, message):
    with pytest.raises(error) as caught:
        Policy.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("bfloat16", "mixed_bfloat16"),
        ("torch.bfloat16", "mixed_bfloat16"),
        ("FP16", "mixed_float16"),
        ("half", "mixed_float16"),
        ("amp", "mixed_float16"),
        ("fp32", "float32"),
        ("full", "float32"),
    ],
)
def test_the_policy_that_a_short_name_means(text, meant):
    with pytest.raises(PolicyError, match=f"Did you mean '{meant}'"):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"compute_dtype": "float8_e4m3fn"},
            "Policy needs compute_dtype to be one of float64, float32, bfloat16, float16, got"
            " 'float8_e4m3fn'.",
        ),
        (
            {"param_dtype": 32},
            "Policy needs param_dtype to be one of float64, float32, bfloat16, float16, got 32.",
        ),
        (
            {"rules": "none"},
            "Policy needs rules to be a Rules, got 'none'. Write Rules.of('none').",
        ),
        (
            {"scale": 8.0},
            "Policy needs scale to be a LossScale, got 8.0. Write LossScale.of(8.0).",
        ),
    ],
)
def test_errors_of_fields(fields, message):
    with pytest.raises(PolicyError) as caught:
        Policy(**fields)
    assert str(caught.value).startswith(message)


def test_a_dtype_of_a_framework_gets_a_hint():
    torch = pytest.importorskip("torch")
    with pytest.raises(PolicyError, match=r"got torch\.bfloat16\. Did you mean 'bfloat16'\?"):
        Policy(compute_dtype=torch.bfloat16)


def test_with_takes_values_and_texts():
    assert Policy().with_(rules="none") == Policy().with_(rules=Rules("none"))
    assert Policy().with_() == Policy()
    with pytest.raises(PolicyError, match="got 'compute'"):
        Policy().with_(compute="float16")


def test_named_refuses_what_is_no_name():
    with pytest.raises(PolicyError, match="got 16"):
        Policy.named(16)
