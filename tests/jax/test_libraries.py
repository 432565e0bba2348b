"""Plain JAX and the libraries on top of it train in half precision to float32's accuracy."""

from importlib import import_module
from importlib.util import find_spec

import jax
import pytest
from jax import numpy as jnp

from halfstep.jax import autocast
from tests.jax.programs import dtypes

NEEDS = {
    "plain": (),
    "linen": ("flax", "optax"),
    "nnx": ("flax", "optax"),
    "haiku": ("haiku", "optax"),
    "equinox": ("equinox", "optax"),
}

pytestmark = [
    pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits"),
    # What a library uses that another one deprecates is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(flax|haiku|equinox|optax).*"),
]


@pytest.fixture(autouse=True)
def usual_promotion(strict_promotion):
    """Lets the libraries promote dtypes, as they do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def need(library):
    for package in NEEDS[library]:
        pytest.importorskip(package)


@pytest.mark.slow
@pytest.mark.parametrize("library", NEEDS)
def test_training_reaches_the_accuracy_of_float32(library):
    need(library)
    train = getattr(import_module("tests.jax.trainings"), library)
    full = train("float32")
    assert full > 0.93
    for policy in ("mixed_bfloat16", "mixed_float16"):
        assert train(policy) > full - 0.012


def test_layers_of_linen_run_low_and_are_found_by_their_path():
    need("linen")
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(8, name="hidden")(x))
            return nn.Dense(4, name="head")(x)

    model, x = Model(), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x)
    policy = "mixed_bfloat16, rules=halfstep-1 + matmul[where=*head*]=full"
    products = dtypes(jax.make_jaxpr(autocast(model.apply, policy))(params, x), "dot_general")
    assert [result for _, (result,) in products] == ["bfloat16", "float32"]
    adds = dtypes(jax.make_jaxpr(autocast(model.apply, policy))(params, x), "add")
    assert [result for _, (result,) in adds] == ["bfloat16", "float32"]


def test_attention_of_linen_runs_low():
    need("linen")
    from flax import linen as nn

    model, x = nn.MultiHeadDotProductAttention(num_heads=2), jnp.ones((2, 8, 8))
    params = model.init(jax.random.key(0), x)
    closed = jax.make_jaxpr(autocast(model.apply, "mixed_float16"))(params, x)
    assert {result for _, (result,) in dtypes(closed, "dot_general")} == {"float16"}
    assert {result for _, (result,) in dtypes(closed, "exp")} == {"float32"}


def test_modules_of_nnx_change_their_state_as_they_do_without():
    need("nnx")
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(self.norm(x)))

    x = jax.random.normal(jax.random.key(0), (16, 8)) + 3.0
    plain, ours = Model(), Model()
    nnx.grad(lambda model: jnp.sum(model(x)))(plain)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        ours = Model()
        nnx.grad(autocast(lambda model, x: jnp.sum(model(x)), policy))(ours, x)
        assert jnp.array_equal(ours.norm.mean[...], plain.norm.mean[...])
        assert ours.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 1
        before = ours.norm.mean[...]
        for call in (autocast(ours, policy), autocast(ours.__call__, policy)):
            assert call(x).shape == (16, 4)
        assert ours.dropout.rngs.count[...] == 3
        assert not jnp.array_equal(ours.norm.mean[...], before)
