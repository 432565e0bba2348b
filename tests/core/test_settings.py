import fractions
import math

import numpy
import pytest

from halfstep.core import LossScale
from halfstep.errors import ScaleError

MESSAGES = [
    (
        {"growth_factor": 0.5},
        "LossScale needs growth_factor >= 1, got growth_factor=0.5."
        " Write 2.0, or 1.0 for a scale that never grows.",
    ),
    (
        {"backoff_factor": 0.0},
        "LossScale needs 0 < backoff_factor <= 1, got backoff_factor=0.0."
        " Write 0.5, or LossScale.static(...) for a scale that never changes.",
    ),
    (
        {"backoff_factor": -0.5},
        "LossScale needs 0 < backoff_factor <= 1, got backoff_factor=-0.5."
        " Write 0.5, or LossScale.static(...) for a scale that never changes.",
    ),
    (
        {"backoff_factor": 1.5},
        "LossScale needs 0 < backoff_factor <= 1, got backoff_factor=1.5."
        " Write 0.5, or LossScale.static(...) for a scale that never changes.",
    ),
    (
        {"backoff_factor": 1.0},
        "LossScale needs backoff_factor < 1 where growth_factor > 1, got growth_factor=2.0,"
        " backoff_factor=1.0. Write 0.5, because a scale that only grows never recovers from an"
        " overflow.",
    ),
    (
        {"growth_interval": 0},
        "LossScale needs 1 <= growth_interval < 2**31, got growth_interval=0."
        " Write 2000, or growth_factor=1.0 for a scale that never grows.",
    ),
    (
        {"growth_interval": 2.0},
        "LossScale needs growth_interval to be a whole number, got 2.0. Write an int.",
    ),
    (
        {"growth_interval": True},
        "LossScale needs growth_interval to be a whole number, got True. Write an int.",
    ),
    (
        {"hysteresis": 0},
        "LossScale needs 1 <= hysteresis < 2**31, got hysteresis=0."
        " Write 1 to back off at every overflow.",
    ),
    (
        {"min_scale": 0.0},
        "LossScale needs min_scale >= 2**-126, got min_scale=0.0."
        " Write 2.0**-16, below which gradients of float16 gain nothing.",
    ),
    (
        {"min_scale": 1e-60},
        "LossScale needs min_scale >= 2**-126, got min_scale=0.0."
        " Write 2.0**-16, below which gradients of float16 gain nothing.",
    ),
    (
        {"max_scale": 1e39},
        "LossScale needs max_scale to fit float32, got 1e+39."
        " Write at most 3.4028234663852886e+38.",
    ),
    (
        {"max_scale": math.inf},
        "LossScale needs max_scale to be a finite number, got inf. Write a float.",
    ),
    (
        {"init_scale": math.nan},
        "LossScale needs init_scale to be a finite number, got nan. Write a float.",
    ),
    (
        {"init_scale": True},
        "LossScale needs init_scale to be a finite number, got True. Write a float.",
    ),
    (
        {"init_scale": "8"},
        "LossScale needs init_scale to be a finite number, got '8'. Write a float.",
    ),
    (
        {"init_scale": 0.0},
        "LossScale needs min_scale <= init_scale <= max_scale, got min_scale=1.52587890625e-05,"
        " init_scale=0.0, max_scale=3.4028234663852886e+38. Move init_scale between the two, or"
        " move the one that is in its way.",
    ),
    (
        {"init_scale": -8.0, "max_scale": 16.0},
        "LossScale needs min_scale <= init_scale <= max_scale, got min_scale=1.52587890625e-05,"
        " init_scale=-8.0, max_scale=16.0. Move init_scale between the two, or move the one that"
        " is in its way.",
    ),
    (
        {"min_scale": 4.0, "max_scale": 2.0, "init_scale": 3.0},
        "LossScale needs min_scale <= init_scale <= max_scale, got min_scale=4.0, init_scale=3.0,"
        " max_scale=2.0. Move init_scale between the two, or move the one that is in its way.",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MESSAGES)
def test_errors(settings, message):
    with pytest.raises(ScaleError) as caught:
        LossScale(**settings)
    assert str(caught.value) == message


def test_an_int_too_large_for_a_float_is_refused():
    with pytest.raises(ScaleError, match="LossScale needs init_scale to be a finite number"):
        LossScale(init_scale=10**400)


@pytest.mark.parametrize("value", [8, numpy.float32(8), numpy.int64(8), fractions.Fraction(8)])
def test_every_kind_of_number_becomes_a_float(value):
    rule = LossScale(init_scale=value)
    assert type(rule.init_scale) is float
    assert rule == LossScale(init_scale=8.0)


def test_a_numpy_integer_becomes_an_int():
    assert type(LossScale(growth_interval=numpy.int32(4)).growth_interval) is int


def test_settings_cannot_be_changed_and_have_names():
    with pytest.raises(AttributeError):
        LossScale().init_scale = 2.0
    with pytest.raises(TypeError):
        LossScale(65536.0)
