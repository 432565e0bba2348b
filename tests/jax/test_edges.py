"""What is written keeps each value, and each derivative, that an operation has by itself."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from halfstep.jax._diagnosing._remedy import _SINGULAR
from tests.jax.test_diagnose_remedy import pasted

POWERS = (0.5, 1.5, -0.5, 2.0, -3.0, 0.0, 1.0)
# Word, what is called with h, and what the text names besides.
CALLS = {
    "sqrt": ("sqrt", jnp.sqrt, {}),
    "rsqrt": ("rsqrt", jax.lax.rsqrt, {}),
    "cbrt": ("cbrt", jnp.cbrt, {}),
    "log": ("log", jnp.log, {}),
    "log1p": ("log1p", jnp.log1p, {}),
    "acos": ("acos", jnp.acos, {}),
    "asin": ("asin", jnp.asin, {}),
    "exp": ("exp", jnp.exp, {}),
    "div": ("div", lambda h: 3 / h, {"dividend": 3}),
    **{f"pow {p}": ("pow", lambda h, p=p: jax.lax.pow(h, h.dtype.type(p)), p) for p in POWERS},
}


def numbers(dtype):
    """Returns all normal numbers of float16, or those of float32 around the edges."""
    if dtype == np.float16:
        found = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    else:
        ends = np.float32([0, 1, -1, 88.72283, 2.0**-126, -(2.0**-126)])
        close = [np.nextafter(ends, np.float32(to)) for to in (0, np.inf, -np.inf)]
        found = np.concatenate([ends, *close, np.linspace(-3, 100, 4001, dtype=np.float32)])
    normal = (abs(found) >= np.finfo(dtype).tiny) | (found == 0)
    return found[np.isfinite(found) & normal]


def with_derivative(call, h):
    return call(h), jax.vmap(jax.grad(call))(h)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_safe_is_the_same_elsewhere(name, dtype):
    word, call, names = CALLS[name]
    h = jnp.asarray(numbers(dtype))
    text = _SINGULAR[word].remedy
    names = {"power": jnp.asarray(names, dtype)} if word == "pow" else names
    value, derivative = with_derivative(call, h)
    written, moved = with_derivative(lambda h: pasted(text, h=h, **names), h)
    right = np.isfinite(value) & np.isfinite(derivative)
    assert right.any()
    assert np.array_equal(written[right], value[right])
    assert np.array_equal(moved[right], derivative[right])


@pytest.mark.parametrize(("name", "end"), [("acos", 1.0), ("acos", -1.0), ("asin", -1.0)])
def test_a_value_at_the_edge_that_is_right_stays(name, end):
    word, call, names = CALLS[name]
    written, derivative = with_derivative(
        lambda h: pasted(_SINGULAR[word].remedy, h=h, **names), jnp.float32([end])
    )
    assert written == call(jnp.float32(end))
    assert np.isfinite(derivative).all()


@pytest.mark.parametrize(("name", "end"), [("log", 0.0), ("log1p", -1.0)])
def test_a_logarithm_at_its_end_is_not_what_it_is_at_one(name, end):
    assert pasted(_SINGULAR[name].remedy, h=jnp.float32(end)) < -4
