"""Tells of gradients that are taken inside of a region, which are not scaled."""

import warnings
from typing import Any

from halfstep.core import levels_to_user
from halfstep.jax._interpret import REGION
from halfstep.jax._ops import FAMILY_OF, plain_name
from halfstep.jax._primitives import linear_p
from halfstep.jax._private import is_of_gradient, sub_jaxprs

_PRODUCTS = ("matmul", "convolution")
_TEXT = (
    "autocast(..., '{policy}') is around a function that takes gradients itself. They are computed"
    " in {dtype} without a scale, so small ones become 0 and large ones inf. Put autocast around"
    " the loss, not around the step: jax.grad(autocast(loss, '{policy}'))."
)


class UnscaledGradientsWarning(UserWarning):
    """A function in float16 takes gradients, which nothing scales there.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     # A network whose own derivative is part of the loss, and known to be near 1.
        ...     warnings.simplefilter("ignore", UnscaledGradientsWarning)
    """


def warn_of_gradients(jaxpr: Any, policy: Any) -> None:
    """Warns where a program holds the backward of a product.

    Args:
        jaxpr: The program, as it was written.
        policy: The policy that it is to run by.
    """
    if _goes_back(jaxpr):
        text = _TEXT.format(policy=policy, dtype=policy.compute_dtype)
        warnings.warn(UnscaledGradientsWarning(text), stacklevel=levels_to_user())


def _goes_back(jaxpr: Any) -> bool:
    return any(_is_product_of_backward(each) or _holds_one(each) for each in jaxpr.eqns)


def _is_product_of_backward(equation: Any) -> bool:
    family = FAMILY_OF.get(plain_name(equation.primitive.name))
    return family in _PRODUCTS and is_of_gradient(equation)


def _holds_one(equation: Any) -> bool:
    # A region in there scales by itself, and so does its derivative.
    scales = equation.primitive is linear_p or equation.params.get("name") == REGION
    return not scales and any(map(_goes_back, sub_jaxprs(equation.params)))
