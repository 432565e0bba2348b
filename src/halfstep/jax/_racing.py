"""Operations of the kinds that a training step is made of, to be timed in each format."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from halfstep.core import Entry

_DTYPES = ("float32", "bfloat16", "float16")
# The shapes of what is multiplied, and of the weights. What a device is asked for is compiled
# first, so there is one of each.
_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "matmul": ((128, 512), (512, 512)),
    "convolution": ((2, 64, 16, 16), (64, 64, 3, 3)),
}


def calls(device: Any) -> Mapping[Entry, Callable[[], object]]:
    """Returns what runs each operation forward and backward, in each format, and waits for it.

    Args:
        device: Where.

    Example:
        >>> len(calls(jax.devices("cpu")[0]))
        6
    """
    return {
        Entry(family, "large", dtype): _call(family, dtype, device)
        for family in _SHAPES
        for dtype in _DTYPES
    }


def _call(family: str, dtype: str, device: Any) -> Callable[[], object]:
    generator = np.random.default_rng(0)
    drawn = [generator.standard_normal(each, np.float32) for each in _SHAPES[family]]
    inputs, weights = drawn[0].astype(jnp.dtype(dtype)), drawn[1]
    arrays = jax.device_put((inputs, weights), device)
    run = jax.jit(functools.partial(_backward, _PRODUCTS[family]))
    return lambda: jax.block_until_ready(run(*arrays))


def _backward(product: Callable[..., Any], inputs: Any, weights: Any) -> Any:
    """Returns the gradients of a product whose weights are cast, as in a step."""
    out, back = jax.vjp(lambda x, w: product(x, w.astype(x.dtype)), inputs, weights)
    # Of what was computed, so that no part of it can be left out.
    return back(out)


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "matmul": jnp.matmul,
    "convolution": functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME"
    ),
}
