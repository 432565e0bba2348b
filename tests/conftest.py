"""What every test stands on: fixed seeds, one thread, the same hypothesis examples each time."""

import random
from importlib.util import find_spec

import numpy
import pytest
from hypothesis import settings

settings.register_profile("halfstep", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("halfstep")

HAS_TORCH = find_spec("torch") is not None

if HAS_TORCH:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeds():
    """Starts every test from the same random state."""
    random.seed(0)
    numpy.random.seed(0)
    if HAS_TORCH:
        torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` where there is no CUDA device."""
    if HAS_TORCH and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
