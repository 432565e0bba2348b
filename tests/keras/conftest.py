"""Keras has one backend per process.

Where KERAS_BACKEND is set, the tests of this folder run on that backend. Where it is not,
`test_backends.py` runs them in a process per backend.
"""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

CHOSEN = os.environ.get("KERAS_BACKEND")
collect_ignore = ["replicas.py", "test_backends.py"]
if CHOSEN is None or find_spec("keras") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py")]
    collect_ignore.remove("test_backends.py")
else:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        # What TensorFlow and Keras say while they are imported is their own matter.
        warnings.simplefilter("ignore")
        import keras


@pytest.fixture(autouse=CHOSEN is not None)
def clean_keras():
    """Starts every test from the same random state and policy."""
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


def pytest_collection_modifyitems(items):
    """Lets Keras use what its dependencies deprecate."""
    here = Path(__file__).parent
    for item in (item for item in items if here in item.path.parents):
        item.add_marker(pytest.mark.filterwarnings(r"ignore::DeprecationWarning:keras\..*"))
