"""A diagnosis leaves a model, Keras and the backend as they were, also where it raises."""

import random
import threading

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfstep.keras import diagnose
from halfstep.keras._private import Layer, Operation, found
from tests.keras.faulty import Call, feed_forward, filled, model_of, ones
from tests.keras.policies import array, functions


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


class Counting(layers.Layer):
    """Has a loss and a count of its own."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.count.assign(self.count + 1)
        self.add_loss(ops.mean(ops.cast(inputs, "float32")))
        return inputs


def model_with_state():
    parts = [layers.BatchNormalization(), layers.Dropout(0.5), Counting(), layers.Dense(1)]
    model = model_of(layers.Dense(64, name="first", kernel_initializer="ones"), *parts)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    model.fit(INPUTS, TARGETS, verbose=0)
    return model


INPUTS = np.random.RandomState(0).rand(8, 4).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)


def state(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [array(each.value) for each in variables]


def patched():
    modules = [found(f"backend.{name}") for name in ("numpy", "nn", "math", "linalg", "random")]
    return [functions(each) for each in (*modules, Layer, Operation, keras.Variable, keras.Model)]


@pytest.mark.parametrize("value", [1.0, 3e4])
def test_state(value):
    model = model_with_state()
    before, losses, random_state = state(model), len(model.losses), random.getstate()
    generator = np.random.get_state()[1].tolist()
    diagnosis = diagnose(model, INPUTS * value, TARGETS, loss_scale=1.0)
    assert bool(diagnosis) == (value > 1)
    for now, then in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert len(model.losses) == losses
    assert random.getstate() == random_state
    assert np.random.get_state()[1].tolist() == generator
    assert model.dtype_policy.name == "mixed_float16"


def test_the_same_seed_gives_the_same_training():
    def trained(look):
        keras.utils.set_random_seed(1)
        model = model_with_state()
        if look:
            diagnose(model, INPUTS, TARGETS)
        model.fit(INPUTS, TARGETS, verbose=0)
        return state(model)

    for one, other in zip(trained(look=True), trained(look=False), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_change_of_keras_stays():
    before, dtype = patched(), Layer.compute_dtype
    diagnose(model_with_state(), INPUTS * 3e4, TARGETS)
    assert patched() == before
    assert Layer.compute_dtype is dtype


def test_no_change_stays_after_an_exception():
    def fail(inputs):
        if not isinstance(inputs, keras.KerasTensor) and BROKEN:
            raise KeyError("broken")
        return inputs

    model = model_of(layers.Dense(4, name="first"), Call(fail))
    before, weights = patched(), [array(each.value) for each in model.variables]
    BROKEN.append(True)
    with pytest.raises(KeyError, match="broken"):
        diagnose(model, ones(2, 4))
    BROKEN.clear()
    assert patched() == before
    for now, then in zip(model.variables, weights, strict=True):
        np.testing.assert_array_equal(array(now.value), then)
    assert not diagnose(model, ones(2, 4))
    filled(model.layers[0], 1e5, 0.0)
    assert diagnose(model, ones(2, 4)).first.operation == "cast"


BROKEN = []


def test_other_threads_see_nothing_of_it():
    model, other = feed_forward(), layers.Dense(4)
    other(ones(1, 4))
    seen = []

    def elsewhere(inputs):
        thread = threading.Thread(target=lambda: seen.append(other.compute_dtype))
        thread.start()
        thread.join()
        return inputs

    parts = [*model.layers[:2], Call(elsewhere)]
    assert diagnose(model_of(*parts), ones(2, 4)).first.module == "expand"
    assert set(seen) == {"float16"}
    assert len(seen) >= 3
