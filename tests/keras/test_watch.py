"""What is told of a training that knows nothing of halfstep."""

import math

import numpy as np
import pytest

from halfstep.core import subscribe
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
    assert len(told.all("update")) == len(told.losses) == 4


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
