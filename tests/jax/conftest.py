"""JAX refuses to promote dtypes by itself here, so that a cast that is missing shows."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = [] if find_spec("sklearn") else ["trainings.py"]
if find_spec("jax") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py")]
else:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(autouse=find_spec("jax") is not None)
def strict_promotion():
    """Lets JAX raise where arrays of two dtypes meet."""
    with jax.numpy_dtype_promotion("strict"):
        yield
