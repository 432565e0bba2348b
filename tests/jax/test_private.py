import pytest

from halfstep.errors import UnsupportedVersionError
from halfstep.jax import _private


def test_a_version_that_lacks_something_is_named_with_the_ones_that_have_it():
    with pytest.raises(UnsupportedVersionError, match=r"needs JAX 0\.9 or later, got 0\."):
        _private.found("core.no_such_thing")
    with pytest.raises(UnsupportedVersionError, match=r"jax\._src\.no_such_module\.thing"):
        _private.found("no_such_module.thing")
