"""Layers that run others, or that run in ways of their own."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfstep.keras import diagnose
from tests.keras.faulty import Call, feed_forward, filled, model_of, ones
from tests.keras.loops import BACKEND


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


def where(fault):
    return fault.module, fault.operation, fault.phase


def test_a_layer_in_a_wrapper():
    wrapper = layers.Bidirectional(layers.LSTM(4, name="lstm"), name="both")
    model = model_of(wrapper, shape=(5, 8))
    filled(wrapper.forward_layer, 100.0, 1.0, 0.0)
    fault = diagnose(model, ones(2, 5, 8, value=1e3)).first
    # PyTorch runs the layer without its cell.
    assert fault.module in ("both/forward_lstm/lstm_cell", "both/forward_lstm")
    assert fault.operation == "matmul"
    assert fault.remedy.startswith("keras.layers.LSTM(4, ")
    assert fault.remedy.endswith('name="forward_lstm", dtype="float32")')


def test_a_lambda():
    model = model_of(layers.Lambda(ops.exp, name="exp"), layers.Dense(1, name="head"))
    fault = diagnose(model, ones(2, 4, value=12.0)).first
    assert where(fault)[:2] == ("exp", "exp")
    assert fault.remedy.splitlines()[0] == 'model.get_layer("exp").dtype_policy = "float32"'


def test_a_layer_that_is_run_again_in_the_backward_pass():
    with keras.RematScope(mode="full"):
        expand = layers.Dense(64, kernel_initializer="ones", name="expand")
    diagnosis = diagnose(feed_forward(expand), ones(2, 4))
    assert [where(fault)[:2] for fault in diagnosis.faults] == [("expand", "matmul")]


def compiled(function):
    """Returns a function that the backend compiles."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    return function


def test_a_layer_that_compiles_itself():
    function = compiled(lambda x: ops.exp(x) * 2)
    model = model_of(Call(function, name="own"), layers.Dense(1))
    assert not diagnose(model, ones(2, 4))
    fault = diagnose(model, ones(2, 4, value=12.0)).first
    assert (fault.module, fault.phase, fault.role) == ("own", "forward", "output")


class OwnLoss(keras.Model):
    """Computes its loss itself, from its inputs, too."""

    def __init__(self):
        super().__init__(name="own")
        self.head = layers.Dense(1, dtype="float32")

    def call(self, inputs):
        return self.head(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred - y)) + ops.sum(ops.log(ops.relu(x)))


def test_a_loss_of_the_model():
    model = OwnLoss()
    model.compile("sgd")
    assert not diagnose(model, ones(2, 4), ones(2, 1))
    assert where(diagnose(model, -ones(2, 4), ones(2, 1)).first) == ("loss", "log", "forward")


def test_a_layer_that_is_added_by_hand():
    class Own(layers.Layer):
        def build(self, shape):
            self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")

        def call(self, inputs):
            return inputs * self.gain

    own = Own(name="own")
    model = model_of(own)
    filled(own, 3e4)
    fault = diagnose(model, ones(2, 4, value=3.0)).first
    assert (where(fault)[:2], fault.largest) == (("own", "multiply"), 3e4)
    filled(own, 1e5)
    fault = diagnose(model, ones(2, 4)).first
    assert (where(fault)[:2], fault.role) == (("own", "cast"), "weight")


def test_variables_in_float16():
    keras.config.set_dtype_policy("float16")
    fault = diagnose(feed_forward(), ones(2, 4), ones(2, 1), "mse").first
    assert where(fault) == ("expand", "matmul", "forward")
    assert not fault.in_float32


def test_dropout_and_statistics_in_training():
    inputs = np.random.RandomState(0).rand(4, 8, 8, 3).astype("float32")
    parts = [layers.GaussianNoise(0.1), layers.SpatialDropout2D(0.3), layers.Conv2D(2, 3)]
    parts += [layers.BatchNormalization(), layers.MaxPooling2D(), layers.Flatten()]
    model = model_of(*parts, layers.Dropout(0.5), layers.Dense(1), shape=(8, 8, 3))
    assert not diagnose(model, inputs, ones(4, 1), "mse", loss_scale=4.0)
    assert not diagnose(model, inputs, training=True)
