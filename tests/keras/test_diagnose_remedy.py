"""What a diagnosis says to write makes the fault go away."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import halfstep.keras
from halfstep.keras import diagnose
from halfstep.keras._diagnosing._layer_text import layer_text
from tests.keras.faulty import Call, Residual, feed_forward, filled, model_of, ones
from tests.keras.loops import BACKEND


@pytest.fixture(autouse=True)
def half():
    keras.config.set_dtype_policy("mixed_float16")


def pasted(line, **names):
    return eval(line, {"keras": keras, "halfstep": halfstep, **names})


def replaced(model, line):
    """Returns a Sequential model in which a layer is the one that a line builds."""
    new = pasted(line)
    parts = [new if each.name == new.name else each for each in model.layers]
    other = model_of(*parts, shape=model.input_shape[1:])
    if new.name in [each.name for each in model.layers]:
        new.set_weights(model.get_layer(new.name).get_weights())
    return other


def test_a_layer_of_keras_in_float32():
    model, inputs = feed_forward(), ones(2, 4)
    remedy = diagnose(model, inputs).first.remedy
    assert remedy == (
        'keras.layers.Dense(64, kernel_initializer=keras.initializers.Ones(), name="expand", '
        'dtype="float32")'
    )
    assert not diagnose(replaced(model, remedy), inputs)


def test_every_layer_that_the_number_passes():
    inputs, parts = ones(2, 4, value=1e5), [layers.Dense(4, name=name) for name in "abc"]
    filled_parts = [keras.initializers.Identity() for _ in parts]
    model = model_of(*parts)
    for part, initializer in zip(parts, filled_parts, strict=True):
        part.set_weights([keras.ops.convert_to_numpy(initializer((4, 4))), np.zeros(4)])
    lines = diagnose(model, inputs).first.remedy.splitlines()
    assert [pasted(line).name for line in lines] == ["a", "b", "c"]
    for line in lines:
        model = replaced(model, line)
    assert not diagnose(model, inputs)


def test_a_layer_of_somebodys_own():
    own = Call(lambda x: x / ops.sqrt(ops.mean(x * x)), name="own")
    model, inputs = model_of(own, layers.Dense(1)), ones(2, 4, value=300.0)
    remedy = diagnose(model, inputs).first.remedy
    assert remedy == 'model.get_layer("own").dtype_policy = "float32"'
    exec(remedy, {"model": model})
    assert not diagnose(model, inputs)


def test_a_layer_in_a_layer_of_somebodys_own():
    model, inputs = model_of(Residual(2, name="spread"), layers.Dense(1)), ones(2, 4)
    filled(model.layers[0].mix, 6e4)
    assert diagnose(model, inputs).first.module == "spread/mix"
    assert 'name="mix", dtype="float32")' in diagnose(model, inputs).first.remedy


def test_attention_as_a_whole():
    inputs = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    filled(attention._query_dense, 300.0, 0.0)
    values = ones(2, 6, 8, value=100.0)
    wide = pasted(diagnose(model, values).first.remedy)
    again = keras.Model(inputs, wide(inputs, inputs))
    wide.set_weights(attention.get_weights())
    assert not diagnose(again, values)


def test_a_policy_where_a_model_does_it_itself():
    def build():
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, kernel_initializer="identity")(inputs)
        return keras.Model(inputs, layers.Dense(1)(hidden * hidden))

    inputs = ones(2, 4, value=300.0)
    remedy = diagnose(build(), inputs).first.remedy
    assert remedy == 'halfstep.keras.set_global_policy("mixed_bfloat16")'
    pasted(remedy)
    assert not diagnose(build(), inputs)
    halfstep.keras.set_global_policy("float32")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_number_for_a_mask():
    def model(lowest):
        def mask(scores):
            outside = ops.cast(scores < 0, scores.dtype)
            return ops.softmax(ops.add(scores, ops.multiply(outside, lowest)))

        return model_of(Call(mask, name="mask"))

    inputs = np.array([[-1.0, 2.0, 3.0, -5.0], [-1.0, -2.0, -3.0, -4.0]])
    fault = diagnose(model(-1e9), inputs).first
    assert (fault.module, fault.operation) == ("mask", "multiply")
    number = pasted(fault.remedy)
    assert number == -32752.0
    assert not diagnose(model(number), inputs)


WRITTEN = {
    "after": lambda outside: outside * -1e9,
    "before": lambda outside: -1e9 * outside,
    "function": lambda outside: ops.multiply(outside, -1e9),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("how", WRITTEN)
def test_the_number_that_somebody_wrote(how):
    def mask(scores):
        return ops.softmax(scores + WRITTEN[how](ops.cast(scores < 0, scores.dtype)))

    masked = model_of(Call(mask, name="mask"))
    fault = diagnose(masked, -ones(2, 4)).first
    assert (fault.module, fault.operation, fault.largest) == ("mask", "multiply", 1e9)
    assert fault.remedy == "-32752  # in place of -1e+09, which float16 cannot hold"
    # PyTorch multiplies in float32: zero times the number is zero, elsewhere it is NaN.
    assert bool(diagnose(masked, ones(2, 4))) == (BACKEND != "torch")


def test_an_epsilon():
    def model(epsilon):
        return model_of(Call(lambda x: x / (ops.norm(x) + epsilon), name="unit"))

    inputs = ones(2, 4, value=0.0)
    names = {}
    exec(diagnose(model(1e-8), inputs).first.remedy.splitlines()[0], names)
    assert names["epsilon"] == 1e-4
    assert not diagnose(model(names["epsilon"]), inputs)


def test_a_scale():
    model = model_of(layers.Dense(4, name="body", kernel_initializer="ones"))
    batch = ones(8, 4, value=1000.0), ones(8, 4), "sum_over_batch"

    def total(targets, outputs):
        return ops.sum(outputs)

    arguments = (*batch[:2], total)
    remedy = diagnose(model, *arguments, loss_scale=2.0**15).first.remedy
    assert remedy == "halfstep.keras.LossScaleOptimizer(optimizer, initial_scale=8.0)"
    model.compile(pasted(remedy, optimizer=keras.optimizers.SGD()), total)
    assert not diagnose(model, *arguments[:2])
    assert diagnose(model, *arguments, loss_scale=16.0)


LAYERS = [
    lambda: layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
    lambda: layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1), use_bias=False),
    lambda: layers.LSTM(4, return_sequences=True, dropout=0.1),
    lambda: layers.MultiHeadAttention(2, 4, value_dim=3, output_shape=6),
    lambda: layers.LayerNormalization(epsilon=1e-5, axis=[1, 2]),
    lambda: layers.Embedding(10, 4, mask_zero=True),
    lambda: layers.DepthwiseConv1D(3, depth_multiplier=2),
    lambda: layers.EinsumDense("ab,bc->ac", output_shape=6, bias_axes="c"),
    lambda: layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(0.0, 2.0)),
    lambda: layers.Dense(2, activation=keras.activations.gelu, bias_initializer="ones"),
]


@pytest.mark.parametrize("make", LAYERS)
def test_the_line_builds_the_same_layer(make):
    layer = make()
    other = pasted(layer_text(layer, "float32"))
    own, theirs = layer.get_config(), other.get_config()
    assert other.compute_dtype == "float32"
    assert own.pop("dtype") != theirs.pop("dtype")
    assert own == theirs


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_factor_that_is_too_large_stays_what_it_is():
    grow = Call(lambda h: ops.tanh(h * 1e5), name="grow")
    model = model_of(layers.Dense(4, kernel_initializer="ones", name="d"), grow, layers.Dense(2))
    fault = diagnose(model, ones(2, 4)).first
    assert (fault.module, fault.operation, fault.kind) == ("grow", "multiply", "inf")
    assert fault.remedy == 'model.get_layer("grow").dtype_policy = "float32"'
    model.get_layer("grow").dtype_policy = "float32"
    assert not diagnose(model, ones(2, 4))
