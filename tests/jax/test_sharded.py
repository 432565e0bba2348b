import pytest

from tests.jax.processes import passes


@pytest.mark.slow
def test_four_devices_decide_as_one_does():
    assert passes("sharded.py", flags="--xla_force_host_platform_device_count=4")
