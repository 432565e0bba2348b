"""What every test stands on: fixed seeds, one thread, the same hypothesis examples each time."""

import os
import random
from importlib.util import find_spec

import numpy
import pytest
from hypothesis import settings

from tests.report.browser import BROWSER, DRIVER

settings.register_profile("halfstep", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("halfstep")

# Compiling programs for speed takes several times as long as all that the tests compute in them.
# Processes that are started inherit it, and those of TensorFlow heed it as well.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
)

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


HAS_CUDA = HAS_TORCH and torch.cuda.is_available()
HAS_BROWSER = BROWSER is not None and DRIVER is not None and find_spec("selenium") is not None
NEEDS = {
    "gpu": (HAS_CUDA, "needs a CUDA device"),
    "browser": (HAS_BROWSER, "needs Chromium, chromedriver and selenium"),
}


def pytest_collection_modifyitems(items):
    """Skips tests that are marked with what is not there, and starts with what takes longest."""
    for item in items:
        for mark, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=_turn)


def _turn(item):
    """Returns a small number for a test that would leave the other workers idle at the end."""
    if item.path.name == "test_backends.py":
        return 0
    return 1 if item.get_closest_marker("slow") else 2
