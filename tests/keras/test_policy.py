"""Which policies can be set, and what Keras and halfstep then say about them."""

import pytest

from tests.keras.policies import keras, nothing_left  # noqa: F401

from halfstep.core import LossScale, Machine, Plan, Policy  # isort: skip
from halfstep.errors import PolicyError, UsageError
from halfstep.keras import global_policy, set_global_policy

DTYPES = {
    "float32": ("float32", "float32"),
    "mixed_float16": ("float32", "float16"),
    "mixed_bfloat16": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "float64": ("float64", "float64"),
}


def layer_dtypes(**options):
    layer = keras.layers.Dense(1, **options)
    return layer.variable_dtype, layer.compute_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_names_that_keras_knows(name):
    set_global_policy(name)
    assert keras.config.dtype_policy().name == name
    assert layer_dtypes() == DTYPES[name]
    policy = global_policy()
    assert (policy.param_dtype, policy.compute_dtype) == DTYPES[name]
    if name in Policy.names():
        assert policy == Policy.named(name)


@pytest.mark.parametrize(
    "value",
    [
        Policy.named("mixed_bfloat16"),
        "param_dtype=float32, compute_dtype=bfloat16, scale=none",
        Policy.named("mixed_bfloat16").to_dict(),
        Plan(Policy.named("mixed_bfloat16"), Machine("cpu", "a processor")),
        keras.DTypePolicy("mixed_bfloat16"),
    ],
)
def test_forms_of_the_same_policy(value):
    set_global_policy(value)
    assert str(global_policy()) == "mixed_bfloat16"
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


@pytest.mark.parametrize("name", ["float32", "float16", "mixed_bfloat16"])
def test_the_dtype_of_a_layer_wins(name):
    set_global_policy("mixed_float16")
    assert layer_dtypes(dtype=name) == DTYPES[name]


def test_a_map_by_paths():
    wide = keras.DTypePolicy("float32")
    by_path = keras.dtype_policies.DTypePolicyMap("mixed_float16", {"net/head.*": wide})
    set_global_policy(by_path)
    assert keras.config.dtype_policy() is by_path
    model = keras.Sequential(name="net")
    for name in ("body", "head"):
        model.add(keras.layers.Dense(2, name=name, dtype=by_path))
    model.build((None, 4))
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]
    assert global_policy().compute_dtype == "float16"


def test_a_map_that_is_wide_by_default_still_scales():
    low = keras.DTypePolicy("mixed_float16")
    set_global_policy(keras.dtype_policies.DTypePolicyMap("float32", {"body": low}))
    assert global_policy().scale == LossScale.dynamic()


def test_the_policy_that_keras_was_told_since():
    set_global_policy("mixed_float16")
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert str(global_policy()) == "mixed_bfloat16"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("fp16", "Did you mean 'mixed_float16'"),
        ("mixed_flaot16", "got 'mixed_flaot16'"),
        ("int32", "floating-point format"),
        (16, "got 16. Write 'mixed_float16'"),
        (None, "got None"),
        ("mixed_float16, rules=none", "safe=False"),
        ("mixed_float16, output_dtype=bfloat16", "output_dtype of float32"),
        ({"body": keras.DTypePolicy("mixed_float16")}, r"keras.dtype_policies.DTypePolicyMap\("),
        ("param_dtype=float16, compute_dtype=bfloat16", "param_dtype='float16'"),
    ],
)
def test_what_is_no_policy(value, words):
    set_global_policy("mixed_bfloat16")
    with pytest.raises(PolicyError, match=words):
        set_global_policy(value)
    assert str(global_policy()) == "mixed_bfloat16"


@pytest.mark.parametrize("safe", ["x", 1, None])
def test_safe_is_true_or_false(safe):
    set_global_policy("mixed_bfloat16")
    with pytest.raises(UsageError, match=rf"got safe={safe!r}\. Write safe=False"):
        set_global_policy("float32", safe=safe)
    assert str(global_policy()) == "mixed_bfloat16"
