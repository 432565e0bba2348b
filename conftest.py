"""Leaves out what needs Keras where there is none, and says on which backend the rest runs."""

import os
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "jax")

collect_ignore_glob = [] if find_spec("keras") else ["src/halfstep/keras/*", "tests/keras/*"]
