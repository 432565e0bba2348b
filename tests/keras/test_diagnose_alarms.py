"""What is meant to be infinite is no fault, and what float32 makes is told apart."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfstep.keras import diagnose, set_global_policy
from tests.keras.faulty import Call, causal, filled, model_of, ones

LOWEST = -65504.0


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


def masked(function):
    return model_of(Call(function, name="mask"), layers.Flatten(), layers.Dense(1), shape=(4, 4))


# TensorFlow says so while the model is built, long before it is diagnosed.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("value", [-np.inf, -1e9, LOWEST])
def test_a_mask_that_the_softmax_takes_away(value):
    assert not diagnose(masked(causal(value)), ones(2, 4, 4))


def test_a_mask_in_a_layer_of_its_own():
    def mask(scores):
        return ops.where(scores > 0, scores, -np.inf)

    model = model_of(Call(mask, name="mask"), layers.Softmax())
    assert not diagnose(model, np.array([[1.0, 1.0, -1.0, 2.0]]))


def test_masks_of_keras_itself():
    inputs = keras.Input((6, 8))
    attended = layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
    assert not diagnose(keras.Model(inputs, attended), ones(2, 6, 8), ones(2, 6, 8), "mse")
    padded = model_of(layers.MaxPooling2D(3, padding="same"), layers.Conv2D(1, 1), shape=(5, 5, 1))
    assert not diagnose(padded, ones(2, 5, 5, 1))


def test_a_logarithm_of_zero_that_is_taken_back():
    model = model_of(Call(lambda x: ops.exp(ops.log(x)), name="own"), layers.Dense(1))
    assert not diagnose(model, np.array([[0.0, 1.0, 2.0, 3.0]]))


def test_a_row_that_is_masked_as_a_whole():
    def mask(scores):
        return ops.softmax(ops.where(scores > 0, scores, -np.inf))

    fault = diagnose(model_of(Call(mask, name="mask")), -ones(2, 4)).first
    assert (fault.module, fault.operation, fault.kind) == ("mask", "softmax", "nan")
    assert fault.in_float32


def test_two_masks_add_up():
    def mask(scores):
        lowest = ops.where(scores > 0, ops.zeros_like(scores), ops.full_like(scores, LOWEST))
        return ops.softmax(ops.add(ops.add(scores, lowest), lowest))

    fault = diagnose(model_of(Call(mask, name="mask")), -ones(2, 4)).first
    assert (fault.module, fault.operation) == ("mask", "add")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inputs_that_are_not_finite(value):
    inputs = {"a": ones(2, 4), "b": ones(2, 4, value=value)}
    fields = {name: keras.Input((4,), name=name) for name in inputs}
    total = layers.Add()(list(fields.values()))
    diagnosis = diagnose(keras.Model(fields, layers.Dense(1)(total)), inputs)
    fault = diagnosis.first
    assert (fault.module, fault.operation, fault.role) == ("inputs['b']", "data", "input")
    assert fault.in_float32
    kind = "nan" if np.isnan(value) else "inf"
    assert str(fault).startswith(f"inputs['b']: the input holds {kind} before the model computes")
    assert fault.largest is None
    assert "largest" not in str(fault)


def test_targets_and_variables_that_are_not_finite():
    model = model_of(layers.Dense(1, name="head"))
    fault = diagnose(model, ones(2, 4), ones(2, 1, value=np.nan), "mse").first
    assert (fault.module, fault.operation, fault.role) == ("targets", "data", "target")
    filled(model.layers[0], np.inf, 0.0)
    fault = diagnose(model, ones(2, 4)).first
    assert (fault.module, fault.role) == ("model/head/kernel", "weight")


def test_what_float32_makes_too():
    model = model_of(layers.Dense(4, name="big", kernel_initializer="ones"), layers.Dense(1))
    own = Call(lambda x: ops.exp(x * x), name="own")
    fault = diagnose(model_of(own), ones(2, 4, value=100.0)).first
    assert (fault.module, fault.operation, fault.in_float32) == ("own", "exp", True)
    assert "float32 makes it, too" in str(fault)
    assert fault.remedy == ""
    fault = diagnose(model, ones(2, 4, value=3e4)).first
    assert not fault.in_float32


def test_a_model_in_float32():
    keras.config.set_dtype_policy("float32")
    big = layers.Dense(4, kernel_initializer="ones", name="big")
    fault = diagnose(model_of(big), ones(2, 4, value=3e38)).first
    assert (fault.module, fault.dtype, fault.in_float32) == ("big", "float32", True)


def test_a_policy_of_halfstep_keeps_the_end_wide():
    set_global_policy("mixed_float16")
    model = model_of(layers.Dense(3, activation="softmax"))
    assert not diagnose(model, ones(2, 4, value=100.0), np.array([0, 2]), LOSS, loss_scale=2.0**15)
    set_global_policy("float32")


LOSS = "sparse_categorical_crossentropy"
