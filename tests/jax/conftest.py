"""Strict promotion: no dtype changes unless the code says so."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

HAS_JAX = all(map(find_spec, ("jax", "optax")))
collect_ignore = [] if find_spec("sklearn") else ["trainings.py"]
if HAS_JAX:
    import jax

    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 2)
        collect_ignore.append("sharded_backwards.py")  # which needs four
else:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py")]


@pytest.fixture(autouse=HAS_JAX)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
