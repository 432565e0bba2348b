"""Outputs and fragile operations are float32, and the rest is not."""

import numpy as np
import pytest

from halfstep.keras import set_global_policy
from halfstep.keras._private import backend
from tests.keras.loops import BACKEND, TORCH_COMPILES
from tests.keras.policies import (  # noqa: F401
    Model,
    array,
    classifier,
    dtype_of,
    keras,
    noise,
    nothing_left,
)

layers, ops = keras.layers, keras.ops
LOW = ["mixed_float16", "mixed_bfloat16"]


class Subclassed(keras.Model):
    """Notes what its layers hand on."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(8, activation="relu"), layers.Dense(3)
        self.seen = []

    def call(self, inputs):
        hidden = self.body(inputs)
        result = ops.softmax(self.head(hidden))
        self.seen += [dtype_of(hidden), dtype_of(result)]
        return result


def functional():
    inputs = keras.Input((16,))
    hidden = layers.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, [layers.Dense(3, activation="softmax")(hidden), hidden])


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("build", [classifier, functional, Subclassed])
def test_what_leaves_a_model_is_float32(policy, build):
    set_global_policy(policy)
    outputs = build()(noise(4)[0])
    assert {dtype_of(each) for each in keras.tree.flatten(outputs)} == {"float32"}


def test_inside_a_model_everything_is_low():
    set_global_policy("mixed_float16")
    model = Subclassed()
    model(noise(4)[0])
    assert model.seen[-2:] == ["float16", "float16"]
    assert {dtype_of(each) for each in model.variables} == {"float32"}


def test_a_layer_on_its_own_hands_out_its_compute_dtype():
    set_global_policy("mixed_float16")
    layer = layers.Dense(3, activation="softmax")
    assert dtype_of(layer(noise(4)[0])) == layer.compute_dtype == "float16"
    assert dtype_of(Model(layer)(noise(4)[0])) == "float32"


def test_the_output_dtype_of_the_policy():
    set_global_policy("mixed_bfloat16, output_dtype=bfloat16")
    assert dtype_of(classifier()(noise(4)[0])) == "bfloat16"


@pytest.mark.parametrize(
    "activation", ["softmax", "log_softmax", "sigmoid", "softplus", "exponential"]
)
def test_a_fragile_activation_is_computed_from_the_low_product(activation):
    set_global_policy("mixed_float16")
    model, logits = classifier(activation), classifier("linear")
    logits.set_weights(model.get_weights())
    inputs = noise(8)[0]
    set_global_policy("mixed_float16")
    low = ops.cast(logits(inputs), "float32")
    expected = array(keras.activations.get(activation)(low))
    assert (array(model(inputs)) == expected).all()
    assert not (expected.astype("float16") == expected).all()


JIT = TORCH_COMPILES if BACKEND == "torch" else []


@pytest.mark.parametrize("build", [classifier, Subclassed])
@pytest.mark.parametrize("how", ["run_eagerly", pytest.param("jit_compile", marks=JIT)])
def test_no_step_is_lost_in_the_softmax(build, how):
    assert steps_done(build, safe=True, **{how: True}) == 24


def test_plain_keras_loses_steps_in_the_softmax():
    assert steps_done(classifier, safe=False) < 24


def steps_done(build, *, safe, **options):
    set_global_policy("mixed_float16", safe=safe)
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
    inputs, targets = noise()
    model.fit(inputs, targets % 3 if build is Subclassed else targets, epochs=3, verbose=0)
    return int(array(model.optimizer.iterations))


def steps(model):
    return int(array(model.optimizer.iterations))


def test_a_long_sum_inside_a_layer_of_ones_own():
    class Norm(layers.Layer):
        def call(self, inputs):
            return ops.sum(ops.abs(inputs), axis=-1) / ops.mean(inputs)

    set_global_policy("mixed_float16")
    assert array(Norm()(np.full((2, 3000), 2.0, "float32")))[0] == np.float16(3000)


def test_masked_pooling_of_a_long_sequence():
    set_global_policy("mixed_float16")
    inputs = np.full((2, 4000, 1), 40.0, "float32")
    mask = ops.ones((2, 4000), dtype="bool")
    assert (array(layers.GlobalAveragePooling1D()(inputs, mask=mask)) == 40.0).all()


def test_raw_data_outside_of_float16():
    set_global_policy("mixed_float16")
    inputs = np.array([[100_000.0], [100_002.0]], "float32")
    model = keras.Sequential(
        [keras.Input((1,)), layers.Normalization(mean=100_001.0, variance=1.0), layers.Dense(1)]
    )
    model.layers[-1].set_weights([np.ones((1, 1)), np.zeros(1)])
    assert array(model(inputs)).tolist() == [[-1.0], [1.0]]


def test_a_masked_softmax_layer_at_the_end():
    set_global_policy("mixed_float16")
    model, inputs = Model(layers.Softmax()), np.array([[0.0, 12.0, 3.0]], "float32")
    mask = np.array([[True, True, False]])
    found = array(model(inputs, mask=mask))
    assert found[0, 0] == pytest.approx(np.exp(-12), rel=1e-3)
    assert found[0, 2] == 0


def test_losses_that_layers_add():
    set_global_policy("mixed_float16")
    layer = layers.Dense(300, activity_regularizer=keras.regularizers.L2(1.0))
    layer.build((None, 300))
    layer.set_weights([np.eye(300) * 20, np.zeros(300)])
    layer(np.full((1, 300), 1.0, "float32"))
    assert array(layer.losses[0]) == 300 * 400

    class Adds(layers.Layer):
        def call(self, inputs):
            self.add_loss(ops.sum(inputs))
            return inputs

    adds = Adds()
    adds(np.full((1, 1000), 100.0, "float32"))
    assert array(adds.losses[0]) == 100_000


def test_unit_normalization_of_large_values():
    set_global_policy("mixed_float16")
    found = array(layers.UnitNormalization()(np.full((1, 4), 1000.0, "float32")))
    assert found.tolist() == [[0.5] * 4]


def test_spectral_normalization_keeps_its_statistics():
    set_global_policy("mixed_float16")
    layer = layers.SpectralNormalization(layers.Dense(4))
    assert dtype_of(layer(noise(4)[0], training=True)) == "float16"
    low = array(layer.vector_u).astype("float16").astype("float32")
    assert not (low == array(layer.vector_u)).all()


def test_masks_go_out_with_the_values():
    set_global_policy("mixed_float16")
    model = keras.Sequential([layers.Embedding(5, 4, mask_zero=True), layers.Dense(2)])
    outputs = model(np.array([[1, 2, 0]]))
    assert array(backend.get_keras_mask(outputs)).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("mode", ["full", "activations"])
def test_rematerialised_layers(mode):
    if mode == "full" and keras.config.backend() == "tensorflow":
        pytest.skip("Keras itself cannot rematerialise a Dense in a graph of TensorFlow")
    set_global_policy("mixed_float16")
    with keras.RematScope(mode=mode):
        model = classifier()
    plain = classifier()
    plain.set_weights(model.get_weights())
    inputs, targets = noise(64)
    assert (array(model(inputs)) == array(plain(inputs))).all()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    model.fit(inputs, targets, verbose=0)
    assert steps(model) == 2


def test_a_model_inside_a_layer_inside_a_model():
    set_global_policy("mixed_float16")
    inner = classifier("linear")
    inputs = keras.Input((16,))
    model = keras.Model(inputs, layers.Softmax()(layers.Dropout(0.5)(inner(inputs))))
    assert dtype_of(model(noise(4)[0])) == "float32"


def test_float32_is_what_it_is_without_a_policy():
    inputs, _ = noise(8)
    model = classifier()
    expected = array(model(inputs))
    set_global_policy("mixed_float16")
    assert (array(model(inputs)) == expected).all()


@pytest.mark.skipif(keras.config.backend() != "jax", reason="reads a jaxpr")
def test_products_run_low_and_the_softmax_after_them_wide():
    import jax

    set_global_policy("mixed_float16")
    model = classifier()
    text = str(jax.make_jaxpr(model)(noise(4)[0]))
    assert text.count("preferred_element_type=float16") == 2
    assert "f32[4,10] = exp" in text
    assert "f16[4,10] = exp" not in text
