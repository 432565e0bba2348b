"""Which modules pytest may import for their examples.

Keras has one backend per process: `tests/keras/test_backends.py` runs those of `halfstep.keras` in
a process per backend. Those of `halfstep.jax` need JAX and optax.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

BACKENDS = {"jax", "tensorflow", "torch"}
KERAS = Path(__file__).parent / "halfstep" / "keras"
JAX = Path(__file__).parent / "halfstep" / "jax"

_chosen = os.environ.get("KERAS_BACKEND")
collect_ignore_glob = [f"{KERAS}*/_on_{name}.py" for name in sorted(BACKENDS - {_chosen})]
if _chosen is None or find_spec("keras") is None:
    collect_ignore_glob = [str(KERAS), f"{KERAS}/*"]
if not all(map(find_spec, ("jax", "optax"))):
    collect_ignore_glob += [str(JAX), f"{JAX}/*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets Keras use what its dependencies deprecate."""
    for item in items:
        if KERAS in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(r"ignore::DeprecationWarning:keras\..*"))
