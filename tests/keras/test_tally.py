import keras
import numpy as np
import pytest

from halfstep.keras import LossScaleOptimizer, MasterOptimizer
from tests.keras.loops import LOOPS, array, numbers, variable


def trained(loop, inner=None, names="abc", dtype="float32"):
    optimizer = LossScaleOptimizer(inner or keras.optimizers.SGD(0.1), initial_scale=8.0)
    variables = [variable([1.0, 2.0], name=name, dtype=dtype) for name in names]
    optimizer.scale_loss(1.0)
    return optimizer, loop(optimizer, variables)


@pytest.mark.parametrize("loop", LOOPS)
def test_names_whose_gradients_were_not_finite_and_what_they_held(loop):
    optimizer, step = trained(loop)
    fine = array([1.0, 1.0])
    assert optimizer.nonfinite == ()
    step(fine, fine, fine)
    assert optimizer.nonfinite == ()
    step(fine, array([1.0, -np.inf]), array([np.nan, 1.0]))
    assert optimizer.nonfinite == (("b", "inf"), ("c", "nan"))
    step(fine, array([np.nan, 1.0]), fine)
    assert optimizer.nonfinite == (("b", "inf and nan"), ("c", "nan"))
    np.testing.assert_array_equal(numbers(optimizer._tally.found), [[0, 0], [1, 1], [0, 1]])


@pytest.mark.parametrize("loop", LOOPS)
def test_names_what_only_the_rounding_to_float16_made_infinite(loop):
    optimizer, step = trained(loop, names="a", dtype="float16")
    step(array([1e6, 1.0]))
    assert (optimizer.counts.skipped, optimizer.nonfinite) == (1, (("a", "inf"),))


def test_names_only_the_variables_that_a_step_was_for():
    optimizer = LossScaleOptimizer(MasterOptimizer(keras.optimizers.SGD(0.1)), initial_scale=8.0)
    first, second = (variable([1.0], name=name) for name in ("first", "second"))
    optimizer.build([first, second])
    optimizer.scale_loss(1.0)
    optimizer.apply([array([np.inf])], [second])
    assert optimizer.nonfinite == (("second", "inf"),)


def test_before_the_first_step_nothing_is_named():
    assert LossScaleOptimizer(keras.optimizers.SGD()).nonfinite == ()
