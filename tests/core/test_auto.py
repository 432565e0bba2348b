"""What is chosen from given measurements."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import FamilyTimes, Policy
from halfstep.core._auto import choose
from halfstep.errors import PolicyError, ReportError

FAMILIES = ("matmul", "convolution", "attention", "normalisation")
SECONDS = st.floats(1e-6, 10.0) | st.sampled_from([0.5, 1.0, 1.04, 1.06, math.inf])
TIMES = st.lists(
    st.builds(FamilyTimes, st.sampled_from(FAMILIES), st.just("large"), *[SECONDS] * 5),
    max_size=4,
    unique_by=lambda each: each.family,
)
MARGIN = 1.05


def times(size="large", **ratios):
    """Returns times by family: what bfloat16 and float16 take where float32 takes a second."""
    return [FamilyTimes(family, size, 1.0, *both) for family, both in ratios.items()]


def is_slower(each, dtype):
    """Returns whether float32 is faster, with casts where it is known what they take."""
    low, full = getattr(each, dtype), getattr(each, f"full_{dtype}")
    least = each.float32 if math.isinf(full) else max(each.float32, full)
    known = math.isfinite(each.float32) and math.isfinite(low)
    return not known or (low / each.float32 > MARGIN and (math.isinf(full) or least <= 0.9 * low))


def in_full(policy):
    return {each.target for each in policy.rules.edits if each.action == "full"}


CHOICES = {
    "bfloat16 has units, float16 does not": (
        times(matmul=(0.5, 30.0), convolution=(0.6, 200.0), attention=(0.9, 8.0)),
        "mixed_bfloat16",
        set(),
    ),
    "attention is slow": (
        times(matmul=(0.5, 30.0), attention=(2.5, 8.0)),
        "mixed_bfloat16",
        {"attention"},
    ),
    "only float16 has units": (
        times(matmul=(3.0, 0.3), convolution=(4.0, 0.4)),
        "mixed_float16",
        set(),
    ),
    "both are alike, so that no scale is needed": (
        times(matmul=(0.5, 0.48)),
        "mixed_bfloat16",
        set(),
    ),
    "float16 is clearly faster": (times(matmul=(0.5, 0.4)), "mixed_float16", set()),
    "nothing is gained": (times(matmul=(0.97, 1.0), convolution=(1.0, 1.2)), "float32", set()),
    "bfloat16 is emulated": (times(matmul=(6.0, 40.0), convolution=(9.0, 90.0)), "float32", set()),
    "only what takes what arrives is faster": (
        times(matmul=(1.2, 1.2), normalisation=(0.5, 0.5)),
        "float32",
        set(),
    ),
    "what is slow is not alone": (
        times(matmul=(1.5, 9.0), convolution=(0.5, 9.0), normalisation=(1.3, 1.0)),
        "mixed_bfloat16",
        {"matmul", "recurrent", "normalisation", "softmax"},
    ),
    "there is no kernel": (
        times(matmul=(0.5, math.inf), attention=(math.inf, math.inf)),
        "mixed_bfloat16",
        {"attention"},
    ),
    "nothing was measured": ([], "float32", set()),
    "there was no time": ([FamilyTimes("matmul", "large")], "float32", set()),
    "there was no time for all": (
        [*times(matmul=(0.5, 9.0)), FamilyTimes("convolution", "large")],
        "float32",
        set(),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    given_times, policy, full = CHOICES[name]
    choice = choose(given_times, "a device")
    assert choice.policy.with_(rules="halfstep-1") == Policy.named(policy)
    assert in_full(choice.policy) == full
    assert choice.why.startswith(f"auto chose {policy}")
    assert "a device" in choice.why
    assert len(choice.why.splitlines()) == 1


@given(TIMES)
def test_nothing_runs_in_a_format_that_was_slower(found):
    policy = choose(found, "a device").policy
    if policy.compute_dtype != "float32":
        slow = {each.family for each in found if is_slower(each, policy.compute_dtype)}
        assert slow == in_full(policy) - {"recurrent", "softmax"}
        assert any(each.ratio(policy.compute_dtype) <= 0.9 for each in found)


@given(TIMES)
def test_without_rules_no_product_may_be_slower(found):
    policy = choose(found, "a device", whole=True).policy
    assert policy in map(Policy.named, Policy.names())
    if policy.compute_dtype != "float32":
        worst = [e.ratio(policy.compute_dtype) for e in found if e.family != "normalisation"]
        assert max(worst) <= MARGIN


@given(TIMES)
def test_all_together_is_not_slower(found):
    policy = choose(found, "a device").policy
    dtype = policy.compute_dtype
    known = [each for each in found if math.isfinite(each.float32)]
    if dtype != "float32":
        assert min(each.best(dtype) / each.float32 for each in known) <= 0.9


def test_where_casts_cost_more_than_they_bring_there_is_no_rule():
    slow = {"family": "normalisation", "size": "large", "float32": 1.0, "bfloat16": 1.2}
    products = times(matmul=(0.5, 9.0))
    without = choose([*products, FamilyTimes(**slow, full_bfloat16=1.5)], "a device")
    assert in_full(without.policy) == set()
    assert "1.20 in normalisation" in without.why
    with_rule = choose([*products, FamilyTimes(**slow, full_bfloat16=1.05)], "a device")
    assert in_full(with_rule.policy) == {"normalisation", "softmax"}


def test_a_product_has_to_make_up_for_what_is_around_it():
    around = FamilyTimes("normalisation", "large", 1.0, 1.8, full_bfloat16=1.9)
    for seconds, dtype in ((0.5, "float32"), (0.1, "bfloat16")):
        found = [FamilyTimes("matmul", "large", 1.0, seconds), around]
        assert choose(found, "a device").policy.compute_dtype == dtype


@given(TIMES)
def test_what_is_chosen_can_be_written_down(found):
    policy = choose(found, "a device").policy
    assert Policy.parse(str(policy)) == policy
    assert choose(found, "a device").policy == policy


def test_a_reason_has_the_measured_ratio():
    found = choose(times(matmul=(0.5, 9.0), attention=(2.5, math.inf)), "AMD EPYC")
    (edit,) = found.policy.rules.edits
    assert edit.reason == "Measured on AMD EPYC: 2.50 times as long in bfloat16 as in float32."
    assert "float16 takes 9.00 in matmul and could not be measured in attention." in found.why


def test_each_size_has_its_own_choice():
    found = [*times("large", matmul=(0.5, 9.0)), *times("small", matmul=(2.0, 9.0))]
    chosen = [choose(found, "a device", size).policy.compute_dtype for size in ("large", "small")]
    assert chosen == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("linear", "large"),
        ("matmul", "huge"),
        ("matmul", "large", 0.0),
        ("matmul", "small", math.nan),
    ],
)
def test_times_that_cannot_be(wrong):
    with pytest.raises(ReportError, match="FamilyTimes needs a family among matmul, convolution"):
        FamilyTimes(*wrong)


@pytest.mark.parametrize("text", ["auto", " auto ", "auto, scale=none"])
def test_a_policy_that_is_not_known_yet_is_no_value(text):
    with pytest.raises(PolicyError, match="needs dtypes that are known, got 'auto'"):
        Policy.parse(text)


def test_a_misspelt_name_is_suggested():
    with pytest.raises(PolicyError, match="Did you mean 'auto'"):
        Policy.parse("atuo")
