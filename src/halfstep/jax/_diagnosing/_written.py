"""Numbers that somebody wrote and a format cannot hold: they are inf or 0 once it is traced."""

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import numpy as jnp

from halfstep.core import replace as patched
from halfstep.jax import _tracing
from halfstep.jax._diagnosing._numbers import is_inexact
from halfstep.jax._private import Literal, closed_over, is_own, source, sub_jaxprs

_FRAMES = 12
_LOW = ("float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class Written:
    """A number, or an array of numbers.

    Args:
        numbers: They themselves, as float64.
        line: Where it is used, as "file:line"; empty where that may be anywhere.
        source: Where it was written.
    """

    numbers: Any
    line: str
    source: str = ""

    @property
    def key(self) -> Hashable:
        """What is the same in every run."""
        return self.numbers.shape, self.numbers.tobytes(), self.line

    @property
    def text(self) -> str:
        """What is said of it: the largest one that was written."""
        flat = np.ravel(self.numbers)
        return f"{flat[np.argmax(np.abs(flat))]:g}"

    def becomes(self, array: Any) -> bool:
        """Returns whether an array is what became of it in its format, which holds it not."""
        if self.numbers.shape not in ((), array.shape):
            return False
        with np.errstate(all="ignore"):
            cast = self.numbers.astype(array.dtype)
        lost = np.isinf(cast) | ((cast == 0) & (self.numbers != 0))
        return bool(lost.any() and (array == cast).all())

    def vanishes(self, form: Any) -> bool:
        """Returns whether it is 0 in a format."""
        with np.errstate(all="ignore"):
            return bool(((self.numbers.astype(form) == 0) & (self.numbers != 0)).any())


def is_low(array: Any) -> bool:
    """Returns whether an array is in a format of 16 bits."""
    return str(getattr(array, "dtype", "")) in _LOW


def found(
    written: Sequence[Written], array: Any, line: str, *, anywhere: bool = False
) -> Written | None:
    """Returns the number that an array was, None where it was none that it could not hold.

    Args:
        written: What was written.
        array: The array.
        line: The line that it is used in, as a source.
        anywhere: Whether what was written elsewhere counts.
    """
    if not is_low(array) or not (np.isinf(array) | (array == 0)).any():
        return None
    here = [each for each in written if anywhere or line.startswith(f"{each.line} ")]
    alone = [each for each in written if not each.line]
    return next((each for each in (*here, *alone) if each.becomes(array)), None)


def written_in(trace: Callable[[], Any]) -> tuple[Written, ...]:
    """Returns the numbers that were written in a program and are not what they were.

    Args:
        trace: Traces the program, and returns it closed.
    """
    with _tracing.afresh(), recording() as noted:
        closed = trace()
    return tuple(placed(noted, closed.jaxpr))


def has_inf(jaxpr: Any) -> bool:
    """Returns whether an inf in a format of 16 bits stands in a program."""
    return any(bool(np.isinf(array).any()) for array, _ in _used(jaxpr))


@contextlib.contextmanager
def recording() -> Iterator[list[Written]]:
    """Takes note of each number that NumPy casts to a format that cannot hold it."""
    noted: list[Written] = []

    def lost(*_: Any) -> None:
        noted.extend(_in_frames(sys._getframe(1)))

    def asarray(original: Any, value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # An underflow of a number of Python is not told of.
        if isinstance(value, float) and dtype is not None and is_inexact(np.dtype(dtype)):
            line = _line(sys._getframe(2))
            noted.extend([Written(np.array(value), line, line)] if _is_lost(value) else [])
        return original(value, dtype, *args, **kwargs)

    undo = patched(np, "asarray", asarray)
    try:
        with np.errstate(over="call", under="call", call=lost):
            yield noted
    finally:
        undo()


def placed(noted: Sequence[Written], jaxpr: Any) -> Iterator[Written]:
    """Yields what was written, without a line where it is used in another one."""
    used = list(_used(jaxpr))
    for each in noted:
        at_its_line = any(
            line.startswith(f"{each.line} ") and each.becomes(array) for array, line in used
        )
        yield each if at_its_line else replace(each, line="")


def _used(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """Yields the constants in a program that are in a low format, with the lines that use them."""
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, Literal) and is_inexact(atom.aval.dtype):
                array = np.asarray(atom.val, atom.aval.dtype)
                if is_low(array):
                    yield array, source(equation)
        for inner in sub_jaxprs(equation.params):
            yield from _used(inner)


def _in_frames(frame: Any) -> Iterator[Written]:
    """Yields the numbers that a cast in a frame, or what called it, may have been given."""
    line, here = _line(frame), frame
    for _ in range(_FRAMES):
        if here is None:
            return
        own = is_own(here.f_code.co_filename)
        held = here.f_code.co_consts if own else here.f_locals.values()
        numbers = [each for each in map(_numbers, held) if each is not None]
        # The same number may be there alone and in a list.
        yield from (Written(each, line, line) for each in numbers)
        if numbers or own:
            return
        here = here.f_back


def _numbers(value: Any) -> Any:
    """Returns numbers as float64, None where float16 holds them or there are none."""
    if not isinstance(value, (float, int, np.generic, np.ndarray, list, tuple)):
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array = np.array(value, np.float64)
        return array if _is_lost(array) else None
    return None


def _is_lost(value: Any) -> bool:
    with np.errstate(all="ignore"):
        array = np.array(value, np.float64)
        cast = array.astype(jnp.float16)
    finite = bool(array.size) and bool(np.isfinite(array).all())
    return finite and bool((np.isinf(cast) | ((cast == 0) & (array != 0))).any())


def _line(frame: Any) -> str:
    """Returns the line of somebody's own in which a frame runs."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def names_of(function: Any, arrays: Sequence[Any]) -> list[str]:
    """Returns what arrays that a function closes over are called, "" where that is not known.

    Example:
        >>> mask = jnp.zeros(2)
        >>> names_of(lambda x: x + mask, [mask])
        ['mask']
    """
    known = {id(leaf): name for name, leaf, _ in closed_over(function)}
    return [known.get(id(each), "") for each in arrays]
