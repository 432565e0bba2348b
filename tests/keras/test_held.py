import threading

import pytest

from halfstep.core import override_policy
from halfstep.keras import global_policy, set_global_policy
from halfstep.keras._held import hold_policy
from tests.keras.policies import keras, nothing_left  # noqa: F401


@pytest.fixture
def held():
    set_global_policy("mixed_bfloat16")
    end = hold_policy()
    yield
    end()


def name():
    return keras.config.dtype_policy().name


def test_it_outlives_the_session_of_keras(held):
    keras.utils.clear_session()
    assert (name(), str(global_policy())) == ("mixed_bfloat16", "mixed_bfloat16")
    assert keras.layers.Dense(1).compute_dtype == "bfloat16"


def test_it_holds_in_every_thread(held):
    names = []
    thread = threading.Thread(target=lambda: names.append(name()))
    thread.start()
    thread.join()
    assert names == ["mixed_bfloat16"]


def test_what_a_script_sets_counts_unless_the_command_line_wins(held):
    keras.mixed_precision.set_global_policy("mixed_float16")
    assert name() == "mixed_float16"
    with override_policy("mixed_bfloat16"):
        assert name() == "mixed_bfloat16"
        set_global_policy("mixed_float16")
        assert str(global_policy()) == "mixed_bfloat16"
    assert name() == "mixed_bfloat16"


def test_it_ends():
    end = hold_policy()
    keras.config.set_dtype_policy("mixed_float16")
    end()
    assert name() == "mixed_float16"
