import keras
import numpy as np
import pytest

from halfstep.keras import LossScaleOptimizer, MasterOptimizer, set_global_policy
from tests.keras.loops import BACKEND, array, numbers, values_of, variable

X = np.random.RandomState(0).randn(32, 4).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def scaled(inner=None, **settings):
    inner = inner or keras.optimizers.Adam(0.01)
    return LossScaleOptimizer(inner, **{"dynamic_growth_steps": 3, **settings})


OPTIMIZERS = {
    "mixed_float16": scaled,
    "float16": lambda: scaled(MasterOptimizer(keras.optimizers.Adam(0.01)), hysteresis=2),
    "bfloat16": lambda: MasterOptimizer(keras.optimizers.AdamW(0.01)),
}


def trained(policy, optimizer, epochs=1):
    keras.config.set_dtype_policy(policy)
    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    if epochs:
        model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0)
    return model


def test_settings_survive_their_configuration():
    settings = {"min_scale": 0.5, "max_scale": 2.0**20, "growth_factor": 4.0, "hysteresis": 3}
    optimizer = scaled(backoff_factor=0.25, max_consecutive_skips=7, **settings)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert again.rule == optimizer.rule
    assert again.get_config() == optimizer.get_config()


def test_a_static_scale_survives_its_configuration():
    optimizer = scaled(loss_scale="static(1024.0)", dynamic_growth_steps=2000)
    assert str(LossScaleOptimizer.from_config(optimizer.get_config()).rule) == "static(1024.0)"


def test_default_settings_have_the_configuration_of_keras():
    inner = keras.optimizers.SGD()
    theirs = keras.optimizers.LossScaleOptimizer(inner, name="scaled").get_config()
    assert LossScaleOptimizer(inner, name="scaled").get_config() == theirs
    assert LossScaleOptimizer.from_config(theirs).get_config() == theirs


def test_reading_a_configuration_leaves_it_as_it_is():
    config = scaled().get_config()
    LossScaleOptimizer.from_config(config)
    assert "inner_optimizer" in config


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_are_serialized_by_their_public_names(make):
    config = keras.saving.serialize_keras_object(make())
    assert config["registered_name"].startswith("halfstep>")
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(make())


@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_a_saved_model_continues_as_if_it_had_not_been_saved(policy, tmp_path):
    model = trained(policy, OPTIMIZERS[policy]())
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, again):
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    compare(model, again)


@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_weights_files_hold_the_state(policy, tmp_path):
    model = trained(policy, OPTIMIZERS[policy]())
    model.save_weights(tmp_path / "model.weights.h5")
    again = trained(policy, OPTIMIZERS[policy](), epochs=0)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "model.weights.h5")
    compare(model, again)


def compare(model, again):
    for ours, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(numbers(ours), numbers(theirs))
    for ours, theirs in zip(values_of(model.optimizer), values_of(again.optimizer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_weights_files_of_keras_own_optimizer_are_read(tmp_path):
    theirs = trained("mixed_float16", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    theirs.save_weights(tmp_path / "model.weights.h5")
    model = trained("mixed_float16", scaled(), epochs=0)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "model.weights.h5")
    expected = float(numbers(theirs.optimizer.dynamic_scale))
    assert model.optimizer.counts.scale == expected
    assert model.optimizer.counts.steps == 0
    inner = values_of(model.optimizer.inner_optimizer)
    for ours, own in zip(inner, values_of(theirs.optimizer.inner_optimizer), strict=True):
        np.testing.assert_array_equal(ours, own)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.train is TensorFlow's")
def test_checkpoints_of_tensorflow_hold_the_state(tmp_path):
    import tensorflow as tf

    pairs = [(scaled(initial_scale=8.0), variable([1.0])) for _ in range(2)]
    for optimizer, weight in pairs:
        optimizer.build([weight])
        optimizer.scale_loss(1.0)
    optimizer, weight = pairs[0]
    optimizer.apply([array([np.inf])], [weight])
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "state"))
    tf.train.Checkpoint(optimizer=pairs[1][0]).read(path).assert_consumed()
    assert pairs[1][0].counts == optimizer.counts


def functional():
    inputs = keras.Input((4,))
    body = keras.layers.Dense(8, name="body_1")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(body), name="classifier")


def sequential():
    layers = [keras.layers.Dense(8, name="body_1"), keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input((4,)), *layers], name="classifier")


@pytest.mark.parametrize("build", [functional, sequential])
def test_keys_of_a_map_that_match_with_and_without_the_name_of_the_model(build, tmp_path):
    low = keras.DTypePolicy("mixed_float16")
    keys = {"(.*/)?body_.*": low}
    keras.config.set_dtype_policy(keras.dtype_policies.DTypePolicyMap("float32", keys))
    model = build()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, again):
        dtypes = {layer.name: layer.compute_dtype for layer in each.layers if layer.weights}
        assert dtypes == {"body_1": "float16", "head": "float32"}


def test_keras_alone_continues_with_the_state_of_the_inner_optimizer(tmp_path):
    set_global_policy("mixed_float16")
    model = sequential()
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    set_global_policy("float32")
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is keras.optimizers.LossScaleOptimizer
    inner = [values_of(each.optimizer.inner_optimizer) for each in (model, again)]
    for ours, theirs in zip(*inner, strict=True):
        np.testing.assert_array_equal(ours, theirs)
