"""Run by test_masters.py, in a process that compiles for a processor that contracts nothing."""

import optax
import pytest

from halfstep.jax import apply_updates
from tests.jax.masters import LAYOUTS, check


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
@pytest.mark.parametrize("name", ["momentum", "adam", "lion", "injected"])
def test_training_is_bit_for_bit_that_of_float32(name, layout, dtype):
    apply = apply_updates if name == "adam" else optax.apply_updates
    check(name, layout, dtype, apply, jit=True)
