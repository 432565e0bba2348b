import keras
import numpy as np
import pytest

from halfstep.keras import LossScaleOptimizer, UnscaledLossWarning
from tests.keras.loops import BACKEND, LOOPS, array, numbers, variable


def optimizer_of(**settings):
    return LossScaleOptimizer(keras.optimizers.SGD(0.5), **{"initial_scale": 8.0, **settings})


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_forgets_to_scale_is_told_and_trains(loop):
    weight = variable([2.0])
    step = loop(optimizer_of(), [weight])
    with pytest.warns(UnscaledLossWarning, match=r"Write loss = optimizer.scale_loss\(loss\)"):
        step(array([1.0]))
    step(array([1.0]))
    assert numbers(weight).tolist() == [1.0]


@pytest.mark.parametrize("name", ["loss_scale", "dynamic_scale"])
def test_a_loop_may_multiply_by_the_scale_itself(name):
    weight, optimizer = variable([1.0]), optimizer_of()
    optimizer.build([weight])
    scale = float(numbers(getattr(optimizer, name)))
    optimizer.apply([array([scale])], [weight])
    assert numbers(weight).tolist() == [0.5]


def test_without_a_scale_there_is_nothing_to_forget():
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale="none")
    optimizer.apply([array([1.0])], [weight])
    assert numbers(weight).tolist() == [0.5]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_names_of_tf_keras_work(loop):
    weight, optimizer = variable([1.0]), optimizer_of()
    step = loop(optimizer, [weight])
    assert float(numbers(optimizer.get_scaled_loss(array(2.0)))) == 16.0
    assert float(numbers(optimizer.get_scaled_loss(lambda: array(2.0))())) == 16.0
    for grads in ([array([8.0])], [array([np.inf])], [array([4.0])]):
        true = optimizer.get_unscaled_gradients(grads)
        step(*[grad * 1.0 for grad in true])
    assert numbers(weight).tolist() == [0.0] or loop is not LOOPS[0]
    assert optimizer.counts.skipped == 1


def test_unscaling_happens_inside_of_a_compiled_step_too():
    weight, optimizer = variable([1.0]), optimizer_of()
    optimizer.build([weight])
    optimizer.get_scaled_loss(1.0)

    def step(grad):
        optimizer.apply(optimizer.get_unscaled_gradients([grad]), [weight])

    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(step)
    for _ in range(2):
        step(array([8.0]))
    assert numbers(weight).tolist() == [0.0]


def test_gradients_that_were_unscaled_only_to_look_at_them_are_divided():
    weight, optimizer = variable([1.0]), optimizer_of()
    optimizer.build([weight])
    optimizer.scale_loss(1.0)
    grads = [array([8.0])]
    assert numbers(optimizer.get_unscaled_gradients(grads)[0]).tolist() == [1.0]
    optimizer.apply(grads, [weight])
    assert numbers(weight).tolist() == [0.5]


def test_missing_gradients_stay_missing_when_they_are_unscaled():
    assert optimizer_of().get_unscaled_gradients([None]) == [None]


def test_a_custom_train_step_that_forgets_to_scale_is_told():
    class Forgetful(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.build((None, 2))

        def build(self, shape):
            self.dense.build(shape)
            self.built = True

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, *state_and_data):
            weights = self.trainable_variables
            if BACKEND == "jax":
                trained, others, state, metrics = state_and_data[0]
                trained, state = self.optimizer.stateless_apply(state, list(trained), trained)
                return {"loss": 0.0}, (trained, others, state, metrics)
            self.optimizer.apply([weight * 1.0 for weight in weights], weights)
            return {"loss": 0.0}

    model = Forgetful()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.warns(UnscaledLossWarning, match="scale_loss was never called"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
