import keras
import numpy as np
import pytest

from halfstep.core import Exponents
from halfstep.keras._diagnose import case_of
from halfstep.keras._ranges import ranges

RANDOM = np.random.RandomState(0)
INPUTS, TARGETS = RANDOM.rand(8, 4).astype("float32"), RANDOM.rand(8, 2).astype("float32")
SMALL = 2.0**-24


def small(targets, outputs):
    return keras.ops.mean(keras.ops.square(outputs - targets)) * SMALL


@pytest.fixture
def found():
    same = keras.layers.Dense(4, name="same", use_bias=False, dtype="mixed_float16")
    layer = keras.layers.Dense(2, name="only", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), same, layer])
    same.set_weights([np.eye(4)])
    return model, ranges(case_of(model, INPUTS, TARGETS, small, training=True))


def row(found, role):
    (one,) = [each for each in found.rows if (each.module, each.role) == ("only", role)]
    return one


def test_the_reference_is_what_float32_makes(found):
    model, seen = found
    weights, bias = model.layers[1].get_weights()
    outputs = INPUTS @ weights + bias
    gradient = (outputs - TARGETS) * np.float32(2 / outputs.size * SMALL)
    near = {"output": outputs, "grad_output": gradient, "grad_input": gradient @ weights.T}
    for role, values in near.items():
        reference = row(seen, role).reference
        assert reference.largest == pytest.approx(np.abs(values).max(), rel=1e-4)
        assert reference.total == values.size
    both = Exponents.of(INPUTS.T @ gradient) + Exponents.of(gradient.sum(0))
    assert row(seen, "grad_weight").reference.total == both.total
    assert row(seen, "grad_weight").reference.largest == pytest.approx(both.largest, rel=1e-4)


def test_what_becomes_zero_is_what_numpy_makes_zero(found):
    model, seen = found
    weights, bias = model.layers[1].get_weights()
    gradient = (INPUTS @ weights + bias - TARGETS) * np.float32(SMALL / TARGETS.size * 2)
    zeros = (gradient.astype("float16") == 0).mean()
    assert 0.5 < zeros <= 1
    assert row(seen, "grad_output").run.zero == pytest.approx(zeros, abs=0.07)
    assert seen.form == row(seen, "grad_output").form == "float16"
    assert seen.lost(seen.power) < 0.01 < seen.lost()


def test_without_a_loss_there_are_only_outputs(found):
    model, _ = found
    seen = ranges(case_of(model, INPUTS, None, None, training=None))
    assert [each.role for each in seen.rows] == ["output", "output"]


def test_the_model_stays_what_it_is(found):
    model, _ = found
    before = [each.copy() for each in model.get_weights()]
    ranges(case_of(model, INPUTS, TARGETS, small, training=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
