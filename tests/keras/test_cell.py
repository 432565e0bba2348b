"""What a cell counts beside the state of its scale, which `tests/conformance` replays."""

import math

import keras
import pytest

from halfstep.keras import LossScaleOptimizer
from tests.keras.loops import LOOPS, array, variable


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_are_counted(loop):
    inner = keras.optimizers.SGD(0.0)
    optimizer = LossScaleOptimizer(inner, loss_scale="dynamic(init_scale=64.0)")
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [variable([1.0, 2.0])])
    for second in (1.0, math.nan, 1.0, math.nan, math.nan):
        step(array([1.0, second]))
    counts = optimizer.counts
    assert (counts.steps, counts.skipped, counts.consecutive_skips) == (5, 3, 2)
    assert counts.scale == 8.0
    step(array([1.0, 1.0]))
    assert optimizer.counts.consecutive_skips == 0
