"""The power of two by which gradients are scaled inside a region, chosen by what arrives.

The sum of the magnitudes of what enters is brought just below the scale of the region, as it is in
the other front-ends: multiplying a loss by a million changes nothing inside.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp

from halfstep.jax._numbers import wide
from halfstep.jax._private import manual_axes, sub_jaxprs

_EXPONENT = 0x7F800000
# Beyond these, the reciprocal of a scale would not be exact any more.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


class Factor(NamedTuple):
    """A power of two.

    Args:
        times: The factor.
        inverse: Its inverse.
    """

    times: Any
    inverse: Any


def neutral() -> Factor:
    """Returns the factor of what is not scaled."""
    return Factor(jnp.float32(1), jnp.float32(1))


def choose(scale: Any, arrays: Sequence[Any], axes: tuple[str, ...]) -> Factor:
    """Returns the factor for what enters.

    Args:
        scale: What the sum of magnitudes is brought below.
        arrays: What enters.
        axes: The mesh axes over which all devices must choose the same factor.
    """
    size = lax.stop_gradient(sum(map(_size, arrays), start=jnp.zeros((), jnp.float32)))
    size = lax.pmax(size, axes) if axes else size
    # Where nothing but zeros enters, what enters later should find a usual factor.
    power = jnp.where(size == 0, jnp.float32(0.5), _power_of_two(size))
    around = 2 * jnp.clip(power, jnp.float32(_SMALLEST), jnp.float32(_LARGEST))
    scale = _power_of_two(jnp.asarray(scale, jnp.float32))
    return Factor(scale / around, around / scale)


def lowest(factors: Sequence[Factor]) -> Factor:
    """Returns a factor that is too large for none of what has one of these."""
    first, *others = {id(each): each for each in factors}.values()
    for each in others:
        smaller = jnp.minimum(first.times, each.times), jnp.maximum(first.inverse, each.inverse)
        first = Factor(*smaller)
    return first


def brought(array: Any, before: Factor, after: Factor | None) -> Any:
    """Returns what has a factor with another one, or as it is."""
    return (
        array
        if after is None or before is after
        else multiplied(array, before.inverse * after.times)
    )


def multiplied(array: Any, factor: Any) -> Any:
    """Returns an array times a factor that its dtype may not hold."""
    number = wide(array)
    return (number * factor.astype(number.dtype)).astype(array.dtype)


def times(factor: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays times a factor."""
    return [array * factor.astype(array.dtype) for array in arrays]


def _size(array: Any) -> Any:
    return jnp.sum(jnp.abs(array).astype(jnp.float32))


def _power_of_two(number: Any) -> Any:
    """Returns the largest power of two that is not larger, inf for what is not finite."""
    bits = lax.bitcast_convert_type(number, jnp.int32) & jnp.int32(_EXPONENT)
    return lax.bitcast_convert_type(bits, jnp.float32)


def shared_axes(equations: Iterable[Any], but: str = "") -> tuple[str, ...]:
    """Returns the mesh axes over which equations combine values of several devices.

    Those that an equation maps over by itself exist only inside of it.

    Args:
        equations: The equations.
        but: The names of primitives that do not count.
    """
    return tuple(dict.fromkeys(_axes(equations, but.split())))


def _axes(equations: Iterable[Any], but: Sequence[str]) -> Iterator[str]:
    for equation in equations:
        names = () if equation.primitive.name in but else ("axes", "axis_name")
        for name in names:
            given = equation.params.get(name, ())
            yield from (axis for axis in _tuple(given) if isinstance(axis, str))
        bound = _bound(equation)
        for inner in sub_jaxprs(equation.params):
            yield from (axis for axis in _axes(inner.eqns, but) if axis not in bound)


def _bound(equation: Any) -> Iterable[str]:
    return manual_axes(equation) if equation.primitive.name == "shard_map" else ()


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
