import keras
import numpy as np
import pytest

from halfstep.keras import LossScaleOptimizer, MasterOptimizer
from tests.keras.loops import BACKEND, numbers, torch_compiles

X = np.random.RandomState(0).randn(64, 4).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WAYS = {"interpreted": {"jit_compile": False}, "eager": {"run_eagerly": True}}
if BACKEND != "torch":
    WAYS["compiled"] = {"jit_compile": True}


def model_of(optimizer, policy="mixed_float16", **compile_settings):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    # Initializers draw other numbers in another dtype.
    start = np.random.RandomState(1)
    model.set_weights([start.uniform(-1.0, 1.0, each.shape) for each in model.weights])
    model.compile(optimizer, "mse", **compile_settings)
    return model


def fitted(optimizer, **settings):
    model = model_of(optimizer, **settings)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_fit_trains_as_keras_own_optimizer_does(way):
    theirs, ours = (
        fitted(wrapper(keras.optimizers.Adam(0.01), dynamic_growth_steps=3), **WAYS[way])
        for wrapper in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    )
    for expected, weight in zip(theirs.weights, ours.weights, strict=True):
        np.testing.assert_allclose(numbers(weight), numbers(expected), rtol=1e-5, atol=1e-7)
    assert ours.optimizer.counts.scale == float(numbers(theirs.optimizer.dynamic_scale))
    assert ours.optimizer.counts.steps == 16


@pytest.mark.parametrize("way", WAYS)
def test_fit_skips_a_batch_that_overflows(way):
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=256.0)
    model = model_of(optimizer, **WAYS[way])
    inputs = X.copy()
    inputs[0] = np.inf
    model.fit(inputs, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    counts = model.optimizer.counts
    assert (counts.steps, counts.skipped, counts.scale) == (16, 2, 64.0)
    assert int(numbers(model.optimizer.iterations)) == 14
    assert all(np.isfinite(numbers(weight)).all() for weight in model.weights)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_masters_follow_float32_training(policy, way):
    losses = {}
    for dtype in (policy, "float32"):
        inner = keras.optimizers.Adam(0.01)
        optimizer = MasterOptimizer(inner) if dtype == policy else inner
        if dtype == "float16":
            optimizer = LossScaleOptimizer(optimizer, initial_scale=256.0)
        model = model_of(optimizer, policy=dtype, **WAYS[way])
        history = model.fit(X, Y, batch_size=8, epochs=6, shuffle=False, verbose=0)
        losses[dtype] = np.array(history.history["loss"])
    np.testing.assert_allclose(losses[policy], losses["float32"], rtol=0.05)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere it is one of the ways above")
@torch_compiles
def test_fit_skips_in_a_model_that_torch_compiles():
    inputs = X.copy()
    inputs[0] = np.inf
    models = []
    for compiled in (False, True):
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=256.0)
        models.append(model_of(optimizer, jit_compile=compiled))
        models[-1].fit(inputs, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    interpreted, compiled = models
    assert compiled.jit_compile
    assert compiled.optimizer.counts == interpreted.optimizer.counts
    assert compiled.optimizer.counts.skipped == 2
    for expected, weight in zip(interpreted.weights, compiled.weights, strict=True):
        np.testing.assert_allclose(numbers(weight), numbers(expected), rtol=1e-3, atol=1e-4)


def test_train_on_batch():
    model = model_of(LossScaleOptimizer(keras.optimizers.Adam(0.01)))
    model.train_on_batch(X, Y)
    assert model.optimizer.counts.steps == 1


def test_averages_become_the_weights_at_the_end():
    def weights_of(wrap, policy="float32"):
        return fitted(wrap(keras.optimizers.SGD(0.05, use_ema=True)), policy=policy).weights

    plain = weights_of(lambda inner: inner)
    scaled = weights_of(LossScaleOptimizer)
    for expected, weight in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(numbers(weight), numbers(expected), rtol=1e-5)
    rounded = weights_of(MasterOptimizer, policy="bfloat16")
    for expected, weight in zip(plain, rounded, strict=True):
        np.testing.assert_allclose(numbers(weight), numbers(expected), rtol=0.05, atol=0.02)
