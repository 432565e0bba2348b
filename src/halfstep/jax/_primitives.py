"""The operations that halfstep adds to those of JAX; their rules stand where they are made."""

from jax.extend.core import Primitive


def _made(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


# The derivative of a region.
linear_p = _made("halfstep_linear")
# What nothing may have scaled what it is handed.
true_p = _made("halfstep_true")
# How a function moves of which only the way back is known.
reverse_p = _made("halfstep_reverse")
