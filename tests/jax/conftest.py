"""Strict promotion: no dtype changes unless the code says so."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

if find_spec("jax") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py")]
else:
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
