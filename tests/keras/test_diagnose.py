"""The first inf or NaN of a run forward is found, where it was made."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfstep.errors import UsageError
from halfstep.keras import diagnose, set_global_policy
from tests.keras.faulty import Call, Residual, feed_forward, filled, model_of, ones

FLOAT16 = 65504.0


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


def where(fault):
    return fault.module, fault.operation, fault.phase, fault.role, fault.kind


def test_a_feed_forward_layer_overflows():
    diagnosis = diagnose(feed_forward(), ones(2, 4))
    fault = diagnosis.first
    assert where(fault) == ("expand", "matmul", "forward", "output", "inf")
    assert (fault.dtype, fault.limit, fault.shape) == ("float16", FLOAT16, (2, 64))
    assert fault.largest == 1200.0
    assert not fault.in_float32
    assert diagnosis.faults == (fault,)


def test_nothing_is_found_where_nothing_is():
    keras.config.set_dtype_policy("float32")
    diagnosis = diagnose(feed_forward(), ones(2, 4))
    assert not diagnosis
    assert str(diagnosis) == "no inf and no NaN"


@pytest.mark.parametrize("safe", [True, False])
def test_under_a_policy_of_halfstep(safe):
    set_global_policy("mixed_float16", safe=safe)
    assert where(diagnose(feed_forward(), ones(2, 4)).first)[:2] == ("expand", "matmul")
    set_global_policy("float32")


def test_what_a_later_layer_hides():
    hidden = layers.Dense(64, kernel_initializer="ones", name="expand")
    model = model_of(layers.Dense(64, name="embed"), hidden, layers.Activation("tanh"))
    filled(model.layers[0], 300.0, 0.0)
    assert np.isfinite(ops.convert_to_numpy(ops.cast(model(ones(2, 4)), "float32"))).all()
    assert where(diagnose(model, ones(2, 4)).first)[:2] == ("expand", "matmul")


def test_what_the_activation_of_the_layer_hides():
    last = layers.Dense(64, kernel_initializer="ones", activation="tanh", name="expand")
    assert where(diagnose(feed_forward(last), ones(2, 4)).first)[:2] == ("expand", "matmul")


OWN = {
    "multiply": (lambda x: x / ops.sqrt(ops.mean(x * x)), 300.0, "inf"),
    "square": (lambda x: x / ops.sqrt(ops.mean(ops.square(x))), 300.0, "inf"),
    "exp": (lambda x: ops.log(ops.exp(x) + 1), 12.0, "inf"),
    "log": (lambda x: ops.log(1 - ops.clip(x, 1e-4, 1 - 1e-4)), 1.0, "inf"),
    "divide": (lambda x: x / (ops.norm(x) + 1e-8), 0.0, "nan"),
    "sum": (lambda x: ops.sum(x, axis=-1, keepdims=True), 3e4, "inf"),
    "cast": (lambda x: ops.cast(ops.cast(x, "float32") * 1e4, "float16"), 10.0, "inf"),
}


@pytest.mark.parametrize("operation", OWN)
def test_a_layer_of_somebodys_own(operation):
    function, value, kind = OWN[operation]
    model = model_of(Call(function, name="own"), layers.Dense(1))
    fault = diagnose(model, ones(2, 4, value=value)).first
    assert where(fault) == ("own", operation, "forward", "output", kind)
    assert not fault.in_float32


def test_a_sum_of_many_calls():
    model = model_of(Residual(18, name="spread"), layers.Dense(1))
    fault = diagnose(model, ones(2, 4)).first
    assert where(fault)[:2] == ("spread", "add")
    assert fault.largest == 32768.0


def test_a_weight_that_does_not_fit():
    model = model_of(layers.Dense(4, name="big"))
    filled(model.layers[0], 1e5, 0.0)
    fault = diagnose(model, ones(2, 4)).first
    assert where(fault) == ("big", "cast", "forward", "weight", "inf")
    assert (fault.largest, fault.shape) == (1e5, (4, 4))


def test_an_input_that_does_not_fit():
    model = model_of(layers.Dense(4, name="first"))
    fault = diagnose(model, ones(2, 4, value=1e5)).first
    assert where(fault) == ("first", "cast", "forward", "input", "inf")
    assert fault.largest == 1e5


def test_the_innermost_layer_of_nested_models():
    inner = model_of(layers.Dense(8, name="a"), layers.Dense(8, name="b"), name="block")
    inputs = keras.Input((4,))
    hidden = ops.relu(inner(inputs))[:, :4] / 1e4
    model = keras.Model(inputs, layers.Dense(1)(inner(hidden)))
    filled(inner.layers[0], 200.0, 0.0)
    filled(inner.layers[1], 100.0, 0.0)
    fault = diagnose(model, ones(2, 4)).first
    assert where(fault)[:2] == ("block/b", "matmul")


def test_a_layer_inside_of_attention():
    inputs = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    filled(attention._query_dense, 300.0, 0.0)
    fault = diagnose(model, ones(2, 6, 8, value=100.0)).first
    assert where(fault)[:2] == ("attention/query", "einsum")


def test_an_operation_of_a_functional_model():
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, kernel_initializer="identity")(inputs)
    model = keras.Model(inputs, layers.Dense(1)(hidden * hidden))
    assert where(diagnose(model, ones(2, 4, value=300.0)).first)[1] == "multiply"


class Two(keras.Model):
    """Takes and returns dicts, and calls a layer twice."""

    def __init__(self):
        super().__init__(name="two")
        self.a, self.b = (layers.Dense(4, kernel_initializer="ones", name=name) for name in "ab")

    def call(self, inputs):
        return {"p": self.a(inputs["u"]) * self.a(inputs["v"]), "q": self.b(inputs["u"])}


def test_dicts_of_inputs_and_outputs():
    fault = diagnose(Two(), {"u": ones(2, 4, value=100.0), "v": ones(2, 4, value=100.0)}).first
    assert where(fault)[:3] == ("two", "multiply", "forward")
    assert not diagnose(Two(), {"u": ones(2, 4), "v": ones(2, 4)})


def test_the_second_call_of_a_layer():
    fault = diagnose(Two(), {"u": ones(2, 4), "v": ones(2, 4, value=30000.0)}).first
    assert where(fault)[:2] == ("a", "matmul")
    assert fault.largest == 30000.0


def recurrent():
    parts = layers.Embedding(10, 8, mask_zero=True, name="words"), layers.LSTM(8, name="lstm")
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *parts, layers.Dense(1)])
    return model, np.array([[1, 2, 3, 0, 0]] * 2, "int32")


def test_integers_and_masks():
    model, tokens = recurrent()
    assert not diagnose(model, tokens)
    filled(model.layers[0], 1e4)
    filled(model.layers[1], 100.0, 1.0, 0.0)
    assert where(diagnose(model, tokens).first)[:2] == ("lstm/lstm_cell", "matmul")


def test_a_convolution():
    model = model_of(layers.Conv2D(4, 3, name="conv"), layers.Flatten(), shape=(8, 8, 3))
    filled(model.layers[0], 3000.0, 0.0)
    assert where(diagnose(model, ones(1, 8, 8, 3, value=30.0)).first)[:2] == ("conv", "conv")


def test_a_layer_alone():
    layer = layers.Dense(64, kernel_initializer="ones", name="alone")
    assert where(diagnose(layer, ones(2, 64, value=2e3)).first)[:2] == ("alone", "matmul")


def test_a_model_that_is_not_built():
    model = keras.Sequential([layers.Dense(4, kernel_initializer="ones", name="late")])
    assert where(diagnose(model, ones(2, 4, value=3e4)).first)[:2] == ("late", "matmul")


def test_faults_that_follow():
    parts = [layers.Dense(4, "tanh", kernel_initializer="ones", name=name) for name in "ab"]
    model = model_of(*parts)
    filled(parts[0], 6e4, 0.0)
    filled(parts[1], 6e4, 0.0)
    diagnosis = diagnose(model, ones(2, 4))
    assert [fault.module for fault in diagnosis.faults] == ["a", "b"]
    assert str(diagnosis).splitlines()[-1].startswith("after it: b: matmul made inf")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "net"}, r"needs a model or layer of Keras, got 'net'.*Write diagnose\("),
        ({"targets": ones(2, 1)}, r"needs a loss for its targets.*Write .*loss=\"mse\""),
        ({"loss": "mse"}, r"needs targets for its loss, got loss='mse'.*Write diagnose\("),
        ({"inputs": ones(0, 4)}, r"got inputs of shape \(0, 4\). Write diagnose\("),
        ({"loss": "nope", "targets": ones(2, 1)}, r"got 'nope'. Write loss=\"mse\""),
        ({"loss": {"a": 3}, "targets": ones(2, 1)}, r"needs a loss of Keras.*got 3"),
        ({"loss_scale": 0.0}, r"needs a loss_scale above zero, got 0.0.*Write loss_scale="),
        ({"loss_scale": float("nan")}, r"got nan"),
    ],
)
def test_refuses(arguments, text):
    arguments = {"model": feed_forward(), "inputs": ones(2, 4), **arguments}
    with pytest.raises(UsageError, match=text):
        diagnose(**arguments)
