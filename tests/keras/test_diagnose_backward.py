"""The first inf or NaN of a run backward, when everything forward is finite."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfstep.keras import LossScaleOptimizer, diagnose
from tests.keras.faulty import Call, filled, model_of, ones


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


def where(fault):
    return fault.module, fault.operation, fault.phase, fault.role


def gain(dtype=None):
    """Returns a model whose gradient grows by 1000 in a layer, and whose outputs stay small."""
    body = layers.Dense(4, name="body", kernel_initializer="ones")
    loud = layers.Dense(4, name="loud", kernel_initializer="ones")
    model = model_of(body, loud, layers.Dense(1, name="head", dtype=dtype))
    filled(body, 1e-4, 0.0)
    filled(loud, 1000.0, 0.0)
    filled(model.layers[2], 1.0, 0.0)
    return model


def total(targets, outputs):
    return ops.sum(outputs)


def test_the_layer_in_which_a_gradient_grows():
    model = gain()
    assert not diagnose(model, ones(2, 4), ones(2, 1), total)
    fault = diagnose(model, ones(2, 4), ones(2, 1), total, loss_scale=32.0).first
    assert where(fault) == ("loud", "matmul", "backward", "grad_input")
    assert (fault.dtype, fault.kind, fault.largest) == ("float16", "inf", 32.0)
    assert not fault.in_float32


def test_the_gradient_of_a_weight():
    model = model_of(layers.Dense(4, name="body", kernel_initializer="ones"))
    fault = diagnose(model, ones(8, 4, value=1000.0), ones(8, 4), total, loss_scale=32.0).first
    assert where(fault) == ("body", "matmul", "backward", "grad_weight")
    assert fault.shape == (4, 4)


def test_the_gradient_of_a_lookup():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(5, 2, name="e")])
    scaled = Call(lambda x: x * 1000.0, name="scaled")
    model.add(scaled)
    tokens = np.array([[1, 1, 1]], "int32")
    fault = diagnose(model, tokens, ones(1, 3, 2), total, loss_scale=100.0).first
    assert (fault.module, fault.phase) == ("scaled", "backward")


def test_a_cast_between_layers():
    model = gain(dtype="float32")
    filled(model.layers[2], 7e4, 0.0)
    fault = diagnose(model, ones(2, 4), ones(2, 1), total).first
    assert where(fault) == ("loud", "cast", "backward", "grad_output")
    assert fault.largest == pytest.approx(7e4)


def test_a_loss_whose_gradient_does_not_fit():
    model = model_of(layers.Dense(1, name="head"))
    fault = diagnose(model, ones(2, 4), ones(2, 1, value=200.0), "mse", loss_scale=2.0**15).first
    assert (fault.module, fault.phase, fault.role) == ("mse", "backward", "grad_input")
    assert (fault.dtype, fault.largest) == ("float16", 2.0**15)


def test_a_loss_that_is_not_finite():
    def loss(targets, outputs):
        return ops.mean(ops.log(outputs - outputs))

    fault = diagnose(model_of(layers.Dense(1)), ones(2, 4), ones(2, 1), loss).first
    assert where(fault) == ("loss", "log", "forward", "output")
    assert fault.in_float32


def test_a_gradient_of_zero_times_infinity():
    def norm(x):
        return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))

    body = layers.Dense(4, name="body", kernel_initializer="zeros")
    model = model_of(body, Call(norm, name="norm"), layers.Dense(1, name="head"))
    fault = diagnose(model, ones(2, 4), ones(2, 1), "mse").first
    assert where(fault) == ("norm", "sqrt", "backward", "grad_input")
    assert fault.in_float32


def test_the_scale_of_the_optimizer():
    model = gain()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=32.0), total)
    assert diagnose(model, ones(2, 4), ones(2, 1)).first.largest == 32.0
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0), total)
    assert not diagnose(model, ones(2, 4), ones(2, 1))
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=64.0), total)
    model.fit(ones(2, 4), ones(2, 1), verbose=0)
    assert model.optimizer.counts.scale == 32.0
    assert diagnose(model, ones(2, 4), ones(2, 1)).first.largest == 32.0


@pytest.mark.parametrize("kind", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_the_scale_with_which_a_step_was_skipped(kind):
    model, batch = gain(), (ones(2, 4), ones(2, 1))
    model.compile(kind(keras.optimizers.SGD(0.0), initial_scale=64.0), total)
    model.fit(*batch, epochs=4, verbose=0)
    scale = float(ops.convert_to_numpy(model.optimizer.dynamic_scale))
    assert scale < 32.0
    assert str(diagnose(model, *batch, loss_scale=scale)).endswith(f" at loss scale {scale:g}")
    found = diagnose(model, *batch)
    assert (found.loss_scale, found.first.module) == (2 * scale, "body")


def test_no_other_scale_is_tried_where_no_step_was_skipped():
    model, batch = gain(), (ones(2, 4), ones(2, 1))
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0), total)
    model.fit(*batch, verbose=0)
    assert diagnose(model, *batch).loss_scale == 2.0


def test_losses_of_several_outputs():
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, name="body", kernel_initializer="ones")(inputs)
    outputs = {
        "p": layers.Dense(1, name="p", kernel_initializer="ones")(hidden),
        "q": layers.Dense(1, name="q")(hidden),
    }
    model = keras.Model(inputs, outputs)
    targets = {"p": ones(2, 1), "q": ones(2, 1)}
    assert not diagnose(
        model, ones(2, 4), targets, {"p": "mse", "q": keras.losses.MeanAbsoluteError()}
    )
    filled(model.get_layer("p"), 1e3, 0.0)
    fault = diagnose(model, ones(2, 4), targets, {"p": total, "q": "mse"}, loss_scale=512.0).first
    assert where(fault) == ("p", "matmul", "backward", "grad_input")


def test_regularisation_and_attention():
    inputs = keras.Input((6, 8))
    hidden = layers.MultiHeadAttention(2, 4, kernel_regularizer="l2")(inputs, inputs)
    hidden = layers.Dropout(0.5)(layers.LayerNormalization()(hidden + inputs))
    model = keras.Model(inputs, layers.GRU(4)(hidden))
    assert not diagnose(model, ones(2, 6, 8), ones(2, 4), "mse", loss_scale=16.0)
