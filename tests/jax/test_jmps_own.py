"""jmp's own tests, from its wheel, run with our jmp.

They are loaded with our module in place of jmp's two, because some name its classes while they
are defined. `WRONG` lists those that ask for what jmp gets wrong; the tests of what we do instead
are in test_jmp.py.
"""

import importlib
import sys

import jax
import pytest

from halfstep.jax import jmp as ours

jmp = pytest.importorskip("jmp")
SOURCES = sys.modules["jmp._src"]
POLICY = importlib.import_module("halfstep.jax.jmp._policy")

WRONG = {
    "test_static_empty_trees_StaticLossScale": "a scale of 0 makes every gradient NaN: refused",
    "test_dynamic_loss_scale_raises_type_error_on_int_loss_scale": (
        "jmp warns and then fails in adjust(): an integer becomes float32"
    ),
    "test_dynamic_loss_scale_raises_type_error_on_int_min_loss_scale": (
        "jmp warns and then fails in adjust(): an integer becomes float32"
    ),
}


def own_tests(name, module):
    """Returns the test class of a file of jmp's, in which `jmp` is the given module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SOURCES, name, module, raising=False)
        own = importlib.import_module(f"jmp._src.{name}_test")
    assert own.jmp is module
    return next(value for key, value in vars(own).items() if key.endswith("Test"))


MODULES = {"loss_scale": ours, "policy": POLICY}
OWN = {name: own_tests(name, module) for name, module in MODULES.items()}


# The tests compare with quotients by 3**100, which no float32 can hold.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
class TestLossScale(OWN["loss_scale"]):
    pass


class TestPolicy(OWN["policy"]):
    @pytest.fixture(autouse=True)
    def standard_promotion(self):
        with jax.numpy_dtype_promotion("standard"):
            yield


for _name in (name for name in vars(OWN["loss_scale"]) if name.startswith(tuple(WRONG))):
    setattr(TestLossScale, _name, None)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_left_out_is_there(name):
    assert any(key.startswith(name) for key in vars(OWN["loss_scale"]))


def test_every_public_name_of_jmp_is_ours_too():
    assert set(jmp.__all__) == set(ours.__all__)
    assert jmp.__version__ == ours.__version__
