"""`compile` scales the loss wherever a layer computes in float16, and nowhere else."""

import pytest

import halfstep.keras
from halfstep.keras import set_global_policy
from tests.keras.policies import (  # noqa: F401
    array,
    classifier,
    keras,
    noise,
    nothing_left,
)

layers, optimizers = keras.layers, keras.optimizers
LossScaleOptimizer = optimizers.LossScaleOptimizer


def one_low_layer():
    low = layers.Dense(4, dtype="mixed_float16")
    return keras.Sequential([keras.Input((16,)), low, layers.Dense(10)])


def compiled(model, optimizer="sgd", **options):
    model.compile(optimizer, "mse", **options)
    return model.optimizer


@pytest.mark.parametrize(
    ("policy", "build", "scaled"),
    [
        ("mixed_float16", classifier, True),
        ("float16", classifier, True),
        ("mixed_bfloat16", classifier, False),
        ("mixed_bfloat16", one_low_layer, True),
        ("mixed_float16, scale=none", classifier, False),
    ],
)
def test_who_is_scaled(policy, build, scaled):
    set_global_policy(policy)
    assert isinstance(compiled(build()), LossScaleOptimizer) is scaled


def test_a_map_that_is_wide_by_default():
    low = keras.DTypePolicy("mixed_float16")
    by_path = keras.dtype_policies.DTypePolicyMap("float32", {"body": low})
    set_global_policy(by_path)
    assert isinstance(compiled(classifier()), LossScaleOptimizer)


def test_it_is_ours_with_the_scale_of_the_policy():
    set_global_policy("mixed_float16, scale=static(8.0)")
    optimizer = compiled(classifier())
    assert isinstance(optimizer, ours())
    optimizer.build([])
    assert array(optimizer.dynamic_scale) == 8.0
    set_global_policy("mixed_float16")
    optimizer = compiled(classifier())
    optimizer.build([])
    assert array(optimizer.dynamic_scale) == 2**15


def ours():

    return halfstep.keras.LossScaleOptimizer


def test_whoever_scales_by_hand_or_declines_is_left_alone():
    set_global_policy("mixed_float16")
    own = LossScaleOptimizer(optimizers.SGD())
    assert compiled(classifier(), own) is own
    assert not isinstance(compiled(classifier(), auto_scale_loss=False), LossScaleOptimizer)
    model = classifier()
    model.compile("sgd", "mse", None, None, None, False, 1, "auto", False)
    assert not isinstance(model.optimizer, LossScaleOptimizer)


def test_plain_keras_scales_with_its_own():
    set_global_policy("mixed_float16", safe=False)
    assert type(compiled(classifier())) is LossScaleOptimizer
    set_global_policy("mixed_bfloat16", safe=False)
    assert not isinstance(compiled(one_low_layer()), LossScaleOptimizer)


def test_files_are_those_of_plain_keras(tmp_path):
    set_global_policy("mixed_float16")
    model = classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    inputs, targets = noise(32)
    model.fit(inputs, targets, verbose=0)
    expected = array(model(inputs))
    model.save(tmp_path / "model.keras")
    assert "halfstep" not in str(model.get_config()) + str(model.get_compile_config())
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, ours())
    assert (array(again(inputs)) == expected).all()
    again.fit(inputs, targets, verbose=0)
    set_global_policy("mixed_float16", safe=False)
    plain = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert plain.layers[-1].dtype_policy.name == "mixed_float16"
    assert abs(array(plain(inputs)) - expected).max() < 1e-3
