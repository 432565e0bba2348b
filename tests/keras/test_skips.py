import re
import warnings

import keras
import numpy as np
import pytest

from halfstep.errors import NonFiniteError
from halfstep.keras import LossScaleOptimizer, SkippedStepsWarning, StepCounts
from tests.keras.loops import BACKEND, array, compiled, eager, variable


def running(loop, **settings):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), **settings)
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [variable([1.0], name="kernel")])
    return optimizer, lambda value: step(array([value]))


def told(action):
    """Returns the texts of the warnings about skips; Keras has others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if each.category is SkippedStepsWarning]


def test_counts_before_the_first_step():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    assert optimizer.counts == StepCounts(0, 0, 0, 8.0)


def test_many_skips_in_a_row_are_told_ever_more_rarely():
    _, step = running(eager, loss_scale="static(8.0)")
    numbers = range(1, 120)
    assert [number for number in numbers if told(lambda: step(np.nan))] == [25, 50, 100]


def test_the_warning_names_the_variable_and_what_its_gradient_holds():
    _, step = running(eager, loss_scale="static(8.0)")
    for _ in range(24):
        step(-np.inf)
    (text,) = told(lambda: step(np.inf))
    assert re.search(r"25 optimizer steps .* kernel \(inf\).*float32", text)


def test_a_good_step_starts_the_count_anew():
    _, step = running(eager, loss_scale="static(8.0)")
    for _ in range(3):
        for _ in range(24):
            assert not told(lambda: step(np.nan))
        step(1.0)


def test_a_limit_makes_it_an_error():
    optimizer, step = running(eager, max_consecutive_skips=2)
    step(np.nan)
    with pytest.raises(NonFiniteError, match=r"max_consecutive_skips=2 .* got 2.*kernel \(nan\)"):
        step(np.nan)
    assert optimizer.counts.skipped == 2


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_an_overflow_at_the_floor_is_an_error(hysteresis):
    settings = {"initial_scale": 2.0, "min_scale": 1.0, "hysteresis": hysteresis}
    optimizer, step = running(eager, **settings)
    for _ in range(hysteresis):
        step(np.inf)
    text = r"at its smallest scale.*1, .*kernel \(inf\).*halfstep\.keras\.diagnose\(model, x, y\)"
    with pytest.raises(NonFiniteError, match=text):
        step(np.inf)
    assert optimizer.counts.scale == 1.0


@pytest.mark.skipif(BACKEND == "torch", reason="nothing is compiled there")
def test_compiled_loops_tell_when_they_are_asked():
    optimizer, step = running(compiled, loss_scale="static(8.0)")
    for _ in range(30):
        step(np.nan)
    (text,) = told(optimizer.check_skips)
    assert re.search(r"30 optimizer steps.*kernel \(nan\)", text)
    assert not told(optimizer.check_skips)


def test_the_end_of_fit_tells():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), loss_scale="static(8.0)")
    model.compile(optimizer, "mse")
    inputs = np.full((25, 1), np.nan)
    (text,) = told(lambda: model.fit(inputs, inputs, batch_size=1, verbose=0))
    assert "25 optimizer steps" in text


def test_an_error_of_fit_is_not_hidden():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse")

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[Stop()])


def test_a_training_that_skipped_most_of_its_steps_says_so_at_its_end():
    inputs, targets = np.full((9, 2), 1e30, "float32"), np.ones((9, 1), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.warns(SkippedStepsWarning, match="9 of 9 optimizer steps were skipped, because"):
        model.fit(inputs, targets, batch_size=1, verbose=0)
    # The next one is counted from its own start.
    model.fit(targets[:, [0, 0]], targets, batch_size=2, verbose=0)
