"""`auto` in Keras: one format for all, or float32; and when it is found out."""

import keras
import pytest

from halfstep.core import Chosen, FamilyTimes, override_policy
from halfstep.keras import _auto as auto
from halfstep.keras import global_policy, set_global_policy
from halfstep.keras._held import hold_auto
from halfstep.keras._measure import Probe
from tests.keras.policies import nothing_left  # noqa: F401


class Device:
    """What a device takes for operations, and how often it was asked."""

    def __init__(self):
        self.count = 0
        self.is_fast_in(matmul=(0.5, 30.0), attention=(1.0, 9.0))

    def is_fast_in(self, **ratios):
        self.times = tuple(FamilyTimes(name, "large", 1.0, *r) for name, r in ratios.items())

    def __call__(self):
        self.count += 1
        return self.times


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Device()
    monkeypatch.setattr(auto, "_measured", found)
    monkeypatch.setattr(auto, "CHOSEN", Chosen(lambda: tmp_path))
    yield found
    set_global_policy("float32")


def test_layers_compute_in_what_the_device_is_fast_in(device):
    set_global_policy("auto")
    assert keras.layers.Dense(2).compute_dtype == "bfloat16"
    assert str(global_policy()) == "mixed_bfloat16"


def test_what_is_slower_in_anything_is_not_taken(device):
    device.is_fast_in(matmul=(0.5, 30.0), attention=(2.5, 9.0))
    set_global_policy("auto")
    assert keras.layers.Dense(2).compute_dtype == "float32"


def test_float16_comes_with_a_scale(device):
    device.is_fast_in(matmul=(2.0, 0.2))
    set_global_policy("auto")
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert "LossScale" in type(model.optimizer).__name__


def test_it_wins_and_is_won_over(device):
    with override_policy("auto"):
        set_global_policy("mixed_float16")
        assert str(global_policy()) == "mixed_bfloat16"
    with override_policy("float32"):
        set_global_policy("auto")
        assert str(global_policy()) == "float32"


def test_a_script_is_measured_for_when_it_builds_a_layer(device):
    keras.utils.clear_session()  # in which nobody has set a policy
    probe = Probe()
    probe.set_policy("auto")
    assert device.count == 0
    assert keras.layers.Dense(2).compute_dtype == "bfloat16"
    keras.utils.clear_session()
    assert keras.layers.Dense(2).compute_dtype == "bfloat16"
    assert device.count == 1
    probe.set_policy("float32")
    assert keras.layers.Dense(2).compute_dtype == "float32"
    probe._release()


def test_a_policy_of_the_script_comes_before_it(device):
    end = hold_auto(lambda: set_global_policy("auto"))
    keras.mixed_precision.set_global_policy("mixed_float16")
    assert keras.layers.Dense(2).compute_dtype == "float16"
    assert device.count == 0
    end()


@pytest.mark.parametrize("entry", auto.calls([]), ids="-".join)
def test_every_operation_runs_in_every_format(entry):
    last = []
    auto.calls(last)[entry]()
    auto.wait(last)
    found = {keras.backend.standardize_dtype(each.dtype) for each in last}
    assert entry.dtype in found
    assert all(keras.ops.all(keras.ops.isfinite(each)) for each in last)
