"""Which modules pytest may import for their examples: Keras has one backend per process.

`tests/keras/test_backends.py` runs those of `halfstep.keras` in a process per backend.
"""

import os
from importlib.util import find_spec

BACKENDS = {"jax", "tensorflow", "torch"}

_chosen = os.environ.get("KERAS_BACKEND")
_others = sorted(BACKENDS - {_chosen})
collect_ignore = [f"halfstep/keras/_stepping/_on_{name}.py" for name in _others]
if _chosen is None or find_spec("keras") is None:
    collect_ignore = ["halfstep/keras"]
