import math
import warnings

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep import LossScale
from halfstep.errors import NonFiniteError
from halfstep.keras import LossScaleOptimizer, SkippedStepsWarning
from tests.conformance.traces import TRACES
from tests.keras.loops import LOOPS, array, compiled, variable


class Run:
    """A loop whose gradients are finite or not, as a trace says."""

    def __init__(self, loop, rule):
        self.optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=rule)
        self.optimizer.scale_loss(1.0)
        self._step = loop(self.optimizer, [variable([1.0, 2.0])])
        self._grads = {True: array([1.0, 1.0]), False: array([1.0, math.nan])}

    def step(self, finite):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedStepsWarning)
                self._step(self._grads[finite])
        except NonFiniteError:
            pass
        return self.optimizer._cell.read()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_keras_replays(trace, loop):
    run = Run(loop, trace.rule)
    for finite, expected in trace:
        assert run.step(finite) == expected


RULES = st.builds(
    LossScale,
    init_scale=st.sampled_from([1.0, 3.0, 64.0, 2.0**15]),
    growth_factor=st.sampled_from([1.0, 1.1, 2.0, 4.0, 1e6]),
    backoff_factor=st.sampled_from([0.3, 0.5, 0.9, 1e-6]),
    growth_interval=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-126, 2.0**-3, 1.0]),
    max_scale=st.sampled_from([2.0**16, 1e30, 3.4028234663852886e38]),
    hysteresis=st.integers(1, 3),
)


@settings(max_examples=6)
@given(rule=RULES, trace=st.lists(st.booleans(), min_size=20, max_size=60))
def test_a_compiled_loop_agrees_with_core_on_random_traces(rule, trace):
    run, state = Run(compiled, rule), rule.init()
    for finite in trace:
        if rule.at_floor(state) and not finite:
            continue  # an error, which the host cannot raise everywhere
        state = rule.next(state, finite=finite)
        assert run.step(finite) == state
        assert 0.0 < run.optimizer.counts.scale < math.inf


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_are_counted(loop):
    run = Run(loop, "dynamic(init_scale=64.0)")
    for finite in (True, False, True, False, False):
        run.step(finite)
    counts = run.optimizer.counts
    assert (counts.steps, counts.skipped, counts.consecutive_skips) == (5, 3, 2)
    assert counts.scale == 8.0
    run.step(True)
    assert run.optimizer.counts.consecutive_skips == 0
