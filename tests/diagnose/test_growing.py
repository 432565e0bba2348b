import math

import pytest

from halfstep.diagnose._growing import growth_of


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([2.0, 1.0, 30.0, 900.0, math.inf], 2),
        ([2.0, None, 1.0, 30.0, 25.0, 900.0, 900.0, math.nan, 1.0], 4),
        ([-1.0, 5.0, -40.0, 900.0], 3),
    ],
)
def test_a_loss_that_grows(losses, steps):
    growth = growth_of(losses)
    assert (growth.first, growth.last, growth.steps) == (1.0, 900.0, steps)
    assert f"from 1 to 900 in the {steps} steps before" in str(growth)


def test_a_loss_that_breaks_at_once():
    growth = growth_of([1.56, 29704.0, math.inf, math.nan])
    assert (growth.first, growth.last, growth.steps) == (1.56, 29704.0, 1)
    assert "from 1.56 to 2.97e+04 in the step before" in str(growth)


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [1.0, 900.0],
        [900.0, 1.0, math.inf],
        [1.0, 50.0, math.inf],
        [math.nan],
        [2.0, 1.0, 0.5, math.inf],
        [2.0, 1.0, 0.5, 900.0, math.inf],  # one bad batch
        [9.0, 1e-4, 0.05, 0.5, math.inf],  # no worse than it began
        [1.0, 2.0, 4.0, 8.0, math.nan],
    ],
)
def test_a_loss_that_does_not(losses):
    assert growth_of(losses) is None
