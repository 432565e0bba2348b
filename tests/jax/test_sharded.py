import pytest

from tests.jax.processes import passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded.py", "sharded_backwards.py"])
def test_four_devices_do_as_one_does(name):
    assert passes(name, flags="--xla_force_host_platform_device_count=4")
