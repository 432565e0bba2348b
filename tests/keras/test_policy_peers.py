"""Keras' own tests of dtype policies pass beside ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.keras.policies import array, keras, nothing_left, patched  # noqa: F401

from halfstep.keras import set_global_policy  # isort: skip

POLICIES = Path(keras.__file__).parent / "src" / "dtype_policies"
TESTS = sorted(POLICIES.glob("*_test.py"))

PLUGIN = """
import pytest
from halfstep.keras import set_global_policy

@pytest.fixture(autouse=True)
def round_trip():
    for name in ("mixed_float16", "mixed_bfloat16", "float32"):
        set_global_policy(name)
    yield
    set_global_policy("float32")
"""


@pytest.mark.slow
def test_keras_own_tests_pass_after_round_trips(tmp_path):
    assert TESTS
    (tmp_path / "round_trips.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    paths = [str(tmp_path), *filter(None, sys.path)]
    options = ["-q", "-p", "round_trips", "-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(paths)},
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_everything_comes_back_in_any_order():
    before = patched()
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16"):
        set_global_policy(policy)
        assert patched() != before
    set_global_policy("mixed_float16", safe=False)
    assert patched() == before
    set_global_policy("mixed_float16")
    set_global_policy("float64")
    assert patched() == before


def test_someone_elses_change_stays(monkeypatch):
    from keras.src import backend

    set_global_policy("mixed_float16")
    ours = backend.nn.softmax
    monkeypatch.setattr(backend.nn, "softmax", lambda *args, **kwargs: ours(*args, **kwargs))
    theirs = backend.nn.softmax
    set_global_policy("float32")
    assert backend.nn.softmax is theirs
    assert array(keras.ops.softmax(keras.ops.zeros((1, 2)))).tolist() == [[0.5, 0.5]]
    monkeypatch.undo()
    backend.nn.softmax = ours.__wrapped__
