"""Layers that make parameters while autocast traces them."""

import sys
from types import SimpleNamespace

import jax
import pytest
from jax import numpy as jnp

from halfstep.errors import UnsupportedVersionError, UsageError
from halfstep.jax import autocast

X, KEY = jnp.ones((2, 8)), jax.random.key(0)
REFUSED = r"no parameters.*Linen or Haiku that does\. Wrap.*autocast\(module\.apply\)"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(flax|haiku).*")


@pytest.fixture(autouse=True)
def usual_promotion(strict_promotion):
    """Lets the libraries promote dtypes, as they do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def of_linen():
    """Returns a module that is decorated itself, one that wraps a layer, and one that is plain."""
    nn = pytest.importorskip("flax.linen")

    class Decorated(nn.Module):
        @autocast
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x)

    class Around(nn.Module):
        @nn.compact
        def __call__(self, x):
            return autocast(lambda x: nn.Dense(4)(x))(x)

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return autocast(jnp.tanh)(nn.Dense(4)(x))

    return Decorated(), Around(), Plain()


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_linen_are_refused_while_they_make_parameters(compiled):
    *leaking, plain = of_linen()
    for module in leaking:
        init = jax.jit(module.init) if compiled else module.init
        with pytest.raises(UsageError, match=REFUSED):
            init(KEY, X)
    params = plain.init(KEY, X)
    for module in (*leaking, plain):
        assert module.apply(params, X).shape == (2, 4)
    assert autocast(plain.apply, "mixed_float16")(params, X).shape == (2, 4)


def test_state_of_linen_that_changes_inside_is_refused():
    nn = pytest.importorskip("flax.linen")

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, cast):
            norm = nn.BatchNorm(use_running_average=False)
            return autocast(lambda x: norm(x))(x) if cast else norm(x)

    variables = Normed().init(KEY, X, False)
    with pytest.raises(UsageError, match=REFUSED):
        Normed().apply(variables, X, True, mutable=["batch_stats"])


def test_layers_of_haiku_are_refused_while_they_make_parameters():
    hk = pytest.importorskip("haiku")
    with pytest.raises(UsageError, match=REFUSED):
        hk.transform(lambda x: autocast(hk.Linear(4))(x)).init(KEY, X)
    transformed = hk.transform(lambda x: autocast(jnp.tanh)(hk.Linear(4)(x)))
    params = transformed.init(KEY, X)
    assert autocast(transformed.apply)(params, None, X).shape == (2, 4)


VERSIONS = [
    ("flax.linen.module", r"a Flax like 0\.12\.8, got .*lacks flax\.linen\.module\._context"),
    ("haiku._src.base", r"a Haiku like 0\.0\.17, got .*Install dm-haiku==0\.0\.17"),
]


@pytest.mark.parametrize(("module", "message"), VERSIONS)
def test_a_version_without_a_private_name_is_refused(module, message, monkeypatch):
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    with pytest.raises(UnsupportedVersionError, match=message):
        autocast(jnp.tanh)(X)
