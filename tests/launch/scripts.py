"""Scripts that train as far as `compare` can see, without a framework."""

import os
import sys
import textwrap
from pathlib import Path

TRAINING = """
import random
from types import SimpleNamespace

import halfstep
from halfstep import core

policy = core.overriding_policy() or halfstep.Policy.named("mixed_float16")
low = policy.compute_dtype == "float16"
for step in range(20):
    core.emit("loss", value=2.0 - 0.1 * step + 0.01 * random.random())
    skipped = low and step == 0
    core.emit("step", record=SimpleNamespace(skipped=skipped, reason="gradients held inf"))
    core.emit("update", scale=policy.scale.init_scale)
halfstep.metric("accuracy", 0.97)
"""


def write(path, text):
    """Writes a script and returns its path as a user would type it."""
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def hide_frameworks(monkeypatch, folder):
    """Makes the processes that are started see no framework, so that they start fast."""
    folder.mkdir()
    for name in ("torch", "keras", "jax"):
        write(folder / f"{name}.py", "raise ImportError('hidden by a test')")
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [before])]))
    assert str(Path(folder)) not in sys.path
