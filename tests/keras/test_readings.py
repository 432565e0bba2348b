from types import SimpleNamespace

import pytest

from halfstep.keras._readings import Reading, Sum, by_variable, reading, sums
from tests.keras.policies import keras, nothing_left  # noqa: F401


def test_what_a_model_calls_a_loss_is_one():
    names = "d_loss", "accuracy", "loss"
    metrics = [keras.metrics.Mean(name) for name in names]
    for each in metrics:
        each.update_state(3.0, sample_weight=2.0)
    model = SimpleNamespace(metrics=[*metrics, keras.metrics.AUC(name="loss_too")])
    assert sums(model, by_variable) == [Sum(6.0, 2.0)] * 2


def test_steps_taken_and_the_scale_are_those_of_the_inner_optimizer():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    assert reading(optimizer) == Reading(applied=0.0, scale=8.0)
    optimizer.inner_optimizer.apply([keras.ops.array([1.0])])
    optimizer.dynamic_scale.assign(4.0)
    assert reading(optimizer) == Reading(applied=1.0, scale=4.0)


def test_accumulated_gradients_are_steps():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    weight = keras.Variable([1.0])
    for _ in range(3):
        optimizer.apply([keras.ops.array([1.0])], [weight])
    assert reading(optimizer).applied == pytest.approx(3.0)
