"""What is told of a training that knows nothing of halfstep."""

import math

import numpy as np
import pytest

from halfstep.core import subscribe
from halfstep.keras import LossScaleOptimizer
from halfstep.keras._loops import watch_loops
from halfstep.keras._watch import Models, watch
from tests.keras.policies import keras, nothing_left  # noqa: F401

BACKEND = keras.config.backend()


class Told:
    """The events so far, by their names."""

    def __init__(self):
        self.events = []

    def __call__(self, event, values):
        self.events.append((event, values))

    def all(self, event):
        return [values for name, values in self.events if name == event]

    @property
    def losses(self):
        return [values["value"] for values in self.all("loss")]


@pytest.fixture
def told():
    told, models = Told(), Models()
    undo = [subscribe(told), watch(models)]
    told.models = models
    yield told
    for each in undo:
        each()


def compiled(kind=keras.Sequential, **options):
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def data(rows=8):
    inputs = np.random.RandomState(0).rand(rows, 3).astype("float32")
    return inputs, inputs.mean(1, keepdims=True)


def fit(model, inputs, targets, **options):
    model.fit(inputs, targets, batch_size=2, shuffle=False, verbose=0, **options)


def test_each_batch_is_told_once(told):
    fit(compiled(), *data(), epochs=2, validation_data=data())
    assert len(told.losses) == len(told.all("step")) == len(told.all("update")) == 8
    assert [values["name"] for values in told.all("metric")] == ["val_loss"] * 2
    assert not any(values["record"].skipped for values in told.all("step"))


def test_an_evaluation_is_a_metric(told):
    model = compiled(metrics=["mae"])
    value = model.evaluate(*data(), verbose=0, return_dict=True)["mae"]
    found = {values["name"]: values["value"] for values in told.all("metric")}
    assert found["evaluate_mae"] == pytest.approx(float(value))


def test_a_sum_that_is_not_finite_hides_the_rest_of_its_epoch(told):
    inputs, targets = data()
    targets[2] = np.inf
    fit(compiled(), inputs, targets)
    assert [math.isfinite(each) for each in told.losses] == [True, False]
    assert len(told.all("step")) == 4


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch")
def test_several_batches_in_one_execution(told):
    fit(compiled(steps_per_execution=2), *data(), epochs=2)
    assert len(told.all("step")) == 8
    assert [values["steps"] for values in told.all("update")] == [2] * 4
    assert len(told.losses) == 4


@pytest.mark.parametrize("kind", [keras.optimizers.LossScaleOptimizer, LossScaleOptimizer])
def test_skipped_steps(told, kind):
    model, (inputs, targets) = compiled(), data()
    model.compile(kind(keras.optimizers.SGD(0.01), initial_scale=8.0), "mse", jit_compile=False)
    inputs[[0, 4]] = np.inf
    fit(model, inputs, targets)
    assert [values["record"].skipped for values in told.all("step")] == [True, False] * 2
    assert [values["scale"] for values in told.all("update")] == [4.0, 4.0, 2.0, 2.0]


@pytest.mark.skipif(BACKEND == "jax", reason="a step on JAX has one optimizer")
def test_optimizers_that_a_model_has_besides(told):
    class Two(keras.Sequential):
        def train_step(self, _):
            for optimizer in (self.ours, self.theirs):
                optimizer.apply([keras.ops.ones_like(v) for v in self.trainable_variables])
            return {"rest": keras.ops.zeros(())}

    model = compiled(Two)
    model.ours, model.theirs = (keras.optimizers.SGD(rate) for rate in (0.1, 0.2))
    for each in (model.ours, model.theirs):
        each.build(model.trainable_variables)
    fit(model, *data())
    assert not any(values["record"].skipped for values in told.all("step"))
    scalers = [values["scaler"] for values in told.all("update")]
    assert scalers == [id(model.ours), id(model.theirs)] * 4


@pytest.mark.skipif(BACKEND == "jax", reason="a step on JAX has the optimizer of Keras")
def test_a_model_that_no_optimizer_of_keras_trains(told):
    keras.config.set_dtype_policy("mixed_float16")  # then `compile` wraps what is not used

    class Without(keras.Sequential):
        def train_step(self, _):
            for variable in self.trainable_variables:
                variable.assign(variable * 0.9)
            return {"rest": keras.ops.zeros(())}

    fit(compiled(Without), *data())
    assert [values["record"].skipped for values in told.all("step")] == [False] * 4
    assert [values["scale"] for values in told.all("update")] == [1.0] * 4


def test_models_are_noted_with_what_they_compute_in(told):
    assert told.models.lowered is None
    fit(compiled(), *data())
    assert told.models.lowered is False
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = compiled()
    for _ in range(2):
        fit(model, *data())
    assert told.models.lowered is True
    assert told.all("region") == [{"policy": "mixed_bfloat16"}]


def test_it_ends():
    methods = "make_train_function", "fit", "evaluate"
    before = [getattr(keras.Model, name) for name in methods]
    end = watch(Models())
    assert [getattr(keras.Model, name) for name in methods] != before
    end()
    end()
    assert [getattr(keras.Model, name) for name in methods] == before


@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends build before they compile")
@pytest.mark.parametrize("kind", [keras.optimizers.LossScaleOptimizer, LossScaleOptimizer])
def test_an_optimizer_that_a_compiled_loop_builds(told, kind):
    import tensorflow as tf

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    inputs, targets = map(tf.constant, data())
    optimizer = kind(keras.optimizers.SGD(0.01))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, variables), variables)

    end = watch_loops()
    for _ in range(3):
        step()
    end()
    assert [values["record"].skipped for values in told.all("step")] == [False] * 3
    assert told.all("update")[-1]["scale"] == 2.0**15
