"""What to write so that a fault is gone; it has been tried."""

import dataclasses
import linecache
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np
from jax import numpy as jnp

from halfstep.jax._diagnosing._made import Made, Value
from halfstep.jax._diagnosing._numbers import are_alike, numbers
from halfstep.jax._diagnosing._programs import Program, is_loss_scale, run
from halfstep.jax._diagnosing._run import Key, Run
from halfstep.jax._diagnosing._verdict import faults, keys_of
from halfstep.jax._diagnosing._written import Written
from halfstep.jax._interpret import FLOAT32
from halfstep.jax._interpret._values import BFLOAT16

_BFLOAT16 = "jnp.bfloat16  # in place of jnp.float16: it has the range of float32"
_POLICY = 'policy="mixed_bfloat16"  # it has the range of float32'
_WIDE = "x = x.astype(jnp.float32)  # for each x that goes into {path}"
_ISLAND = 'halfstep.jax.autocast(f, "float32")  # in place of the f that runs in {path}'
_LOWER = (
    "halfstep.jax.autocast(f, policy, scale={0!r})"
    "  # in place of {1!r}; or init_scale={0!r} of the state that it is"
)
_LOSS_SCALE = 'loss_scale="dynamic(init_scale={0!r})"  # in place of {1!r}'
# Each is a run, so they are far apart.
_FACTORS = (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
_MANY_LOST = 0.01
_CASTING = ("astype", "asarray", "array(", "convert_element_type", "float16")
_BOUND = "jnp.finfo(jnp.{form}).min / 2  # in place of {number}, which {form} cannot hold"
_NUMBER = "jnp.float32({number})  # in place of {number}, which {form} {verb}"
_NUMBERS = "jnp.float32  # in place of jnp.{form}, which {verb} {number}"
_EPSILON = "epsilon = {0:g}  # in place of {1}, which is 0 in {2}"
_CAST = "jnp.float32  # in place of jnp.{0} in this cast{1}"
_SELECTED = """\
safe = jnp.where({taken}, h, {instead})  # h is what goes into {word}
jnp.where({taken}, {call}, 0)"""
# What is left out of a logarithm would make a loss of nothing where a prediction is quite wrong.
_MOVED = """\
safe = jnp.where({taken}, h, {instead})  # h is what goes into {word}
jnp.{word}(safe)"""
# An angle has a value at both ends, and only no derivative.
_ANGLE = """\
safe, ends = jnp.where(abs(h) < 1, h, 0), jnp.clip(jax.lax.stop_gradient(h), -1, 1)
jnp.where(abs(h) < 1, jnp.{word}(safe), jnp.{word}(ends))  # h is what goes into {word}"""
_POWER = """\
taken = (h > 0) | (power % 1 == 0) & ((h != 0) | (power >= 0))
safe = jnp.where(taken, h, 1)  # h is what goes into pow
jnp.where(taken, safe**power, 0)"""
# Of what is above it, exp is inf in float32.
_MOST = 88.72283


def _selected(word: str, taken: str, instead: int, call: str) -> str:
    return _SELECTED.format(word=word, taken=taken, instead=instead, call=call)


def _moved(word: str, taken: str, instead: str) -> str:
    return _MOVED.format(word=word, taken=taken, instead=instead)


def _angle(word: str) -> str:
    return _ANGLE.format(word=word)


@dataclass(frozen=True)
class _Singular:
    """An operation that has no derivative everywhere.

    Args:
        edge: Whether it has none, at each number.
        remedy: What to write in its place.
        operand: Which of its operands is meant.
    """

    edge: Callable[[Any], Any]
    remedy: str
    operand: int = 0


def _at_zero(h: Any) -> Any:
    return h == 0


def _up_to_zero(h: Any) -> Any:
    return h <= 0


def _from_one(h: Any) -> Any:
    return abs(h) >= 1


# In the order in which a line that has several is read.
_SINGULAR = {
    "sqrt": _Singular(_up_to_zero, _selected("sqrt", "h > 0", 1, "jnp.sqrt(safe)")),
    "rsqrt": _Singular(_up_to_zero, _selected("rsqrt", "h > 0", 1, "jax.lax.rsqrt(safe)")),
    "cbrt": _Singular(_at_zero, _selected("cbrt", "h != 0", 1, "jnp.cbrt(safe)")),
    "log": _Singular(_up_to_zero, _moved("log", "h > 0", "jnp.finfo(h.dtype).tiny")),
    "log1p": _Singular(lambda h: h <= -1, _moved("log1p", "h > -1", "-1 + jnp.finfo(h.dtype).eps")),
    "pow": _Singular(_up_to_zero, _POWER),
    "acos": _Singular(_from_one, _angle("acos")),
    "asin": _Singular(_from_one, _angle("asin")),
    "exp": _Singular(lambda h: h > _MOST, _moved("exp", f"h <= {_MOST}", f"{_MOST}")),
    "div": _Singular(_at_zero, _selected("div", "h != 0", 1, "dividend / safe"), operand=1),
}


@dataclass(frozen=True)
class Trial:
    """What a remedy is tried on.

    Args:
        program: The program with the faults.
        written: The program forward.
        known: What it makes and takes back forward.
        found: The faults.
        wide: A run of the program in float32.
        cast: Whether `autocast` made the whole function.
        backward: Returns the program with its gradient, None where that is not to be tried.
    """

    program: Program
    written: Program
    known: frozenset[Key]
    found: tuple[Made, ...]
    wide: Run
    cast: bool
    backward: Callable[[], Program | None] = lambda: None

    @property
    def in_float32(self) -> frozenset[Key]:
        """What float32 makes, too."""
        return keys_of(self.wide)

    def remedy(self, made: Made) -> str:
        """Returns what to write, empty where nothing is known that helps.

        What mends the gradient as well is better than what mends the way forward alone.
        """
        alone = dataclasses.replace(self, backward=lambda: None)
        return self._remedy(made) or alone._remedy(made)

    def _remedy(self, made: Made) -> str:
        if made.written is not None:
            return self._number(made, made.written) or self._bfloat16(made)
        if made.key in self.in_float32:
            return self._defined(made) if made.backward else ""
        ways = (self._lower, self._epsilon, self._cast, self._scope, self._bfloat16)
        return next(filter(None, (way(made) for way in ways)), "")

    def _number(self, made: Made, written: Written) -> str:
        """Returns what to write in place of a number that its format cannot hold."""
        form = made.held.dtype
        bound = np.asarray(jnp.finfo(form).min / 2, form)
        if (written.numbers <= 0).all() and self._masks(self._instead(written, lambda _: bound)):
            return _BOUND.format(number=written.text, form=form)
        wide = self._instead(written, _in_float32)
        if not self._helps(instead=wide):
            return ""
        text = _NUMBER if written.numbers.ndim == 0 else _NUMBERS
        return text.format(number=written.text, form=form, verb="cannot hold")

    def _instead(self, written: Written, number: Callable[[Written], Any]) -> dict[Hashable, Any]:
        """Returns what takes the place of a number, and of those that are lost like it."""
        others = [each.written for each in self.found if each.written]
        alike = [each for each in others if (each.numbers < 0).all() == (written.numbers < 0).all()]
        return {each.key: number(each) for each in (written, *alike)}

    def _masks(self, instead: dict[Hashable, Any]) -> bool:
        """Returns whether a number is only there to be less than others: any such will do."""
        tried = run(self.program, known=self.known, instead=instead)
        pairs = zip(map(_held, tried.results), map(_held, self.wide.results), strict=True)
        return self._helps(instead=instead) and all(starmap(are_alike, pairs))

    def _epsilon(self, made: Made) -> str:
        """Returns what to add before a division by a number that its format rounds to 0."""
        form = np.dtype(made.held.dtype)
        lost = [each for each in self.program.written if each.vanishes(form)]
        if made.divisor is not None:
            wide = {made.divisor.key: _in_float32(made.divisor)}
            words = {"number": made.divisor.text, "form": form, "verb": "rounds to 0"}
            text = _NUMBER.format(**words)
            return text if self._helps(instead=wide) else ""
        epsilon = 10.0 ** math.ceil(math.log10(float(jnp.finfo(form).tiny)))
        instead = dict.fromkeys((each.key for each in lost), np.asarray(epsilon, form))
        if not lost or not self._helps(instead=instead):
            return ""
        return _EPSILON.format(epsilon, lost[0].text, made.held.dtype)

    def _cast(self, made: Made) -> str:
        """Returns what to cast to in place of a format that cannot hold what is cast by hand."""
        by_hand = not (made.region or self.cast or made.backward) and _is_by_hand(made)
        casts = frozenset(each.key for each in self.found if each.operation == made.operation)
        tried = ({made.key}, casts) if by_hand else ()
        if not any(self._helps(widened=frozenset(each)) for each in tried):
            return ""
        return _CAST.format(made.held.dtype, f" of {made.of}" if made.of else "")

    def _defined(self, made: Made) -> str:
        """Returns how to call what has no derivative everywhere only where it has one."""
        at = run(self.written, line=made.source).operands if made.source else []
        names = {name for name, operands in at if _is_at_edge(name, operands)}
        word = next((each for each in _SINGULAR if each in names), "")
        mended = frozenset(each.key for each in self.found)
        if not word or not run(self.program, known=self.known, mended=mended).finite:
            return ""
        return _SINGULAR[word].remedy

    def _lower(self, made: Made) -> str:
        """Returns the scale to write, where it is the scale that makes gradients overflow."""
        option, text = ("rescaled", _LOWER) if made.scale else ("loss_rescaled", _LOSS_SCALE)
        before = made.scale or self._loss_scale()
        tried = _FACTORS if made.backward and before else ()
        factor = next((each for each in tried if self._helps(**{option: each})), None)
        return "" if factor is None else text.format(before * factor, before)

    def _loss_scale(self) -> float:
        """Returns the loss scale that the function is called with, 0.0 for none."""
        pairs = zip(self.program.operands, self.program.names, strict=True)
        return next((float(each) for each, name in pairs if is_loss_scale(each, name)), 0.0)

    def _scope(self, made: Made) -> str:
        def formats(path: str) -> Any:
            return FLOAT32 if f"{path}.".startswith(f"{made.path}.") else None

        if not made.path or made.operation == "data" or not self._helps(formats=formats):
            return ""
        if made.region or self.cast:
            return _ISLAND.format(path=made.path)
        # What is cast by hand in there is not in float32 because its operands are.
        return _WIDE.format(path=made.path) if self._helps(entered=made.path) else ""

    def _bfloat16(self, made: Made) -> str:
        text = _POLICY if made.region or self.cast else _BFLOAT16
        return text if self._helps(formats=lambda path: BFLOAT16) else ""

    def _helps(self, **options: Any) -> bool:
        tried = run(self.program, known=self.known, **options)
        left = [each for each in faults(tried, tried) if each.key not in self.in_float32]
        fine = tried.finite and not left and not _loses(tried, self.wide)
        return fine and self._helps_backward(tried, options)

    def _helps_backward(self, tried: Run, options: dict[str, Any]) -> bool:
        """Returns whether the gradient is finite, too, or not because of a low format."""
        both, known = self.backward(), frozenset(each.key for each in tried.made)
        if both is None:
            return True
        done = run(both, known=known, **options)
        in_float32 = run(both, known=known, formats=lambda path: FLOAT32)
        return done.finite or not in_float32.finite


def _loses(tried: Run, wide: Run) -> bool:
    """Returns whether many results became zero that are not so in float32."""
    pairs = zip(map(_held, tried.results), map(_held, wide.results), strict=True)
    there = [(ours, theirs != 0) for ours, theirs in pairs]
    lost = sum(int((known & (ours == 0)).sum()) for ours, known in there)
    return lost > _MANY_LOST * sum(int(known.sum()) for _, known in there)


def _held(result: Value) -> Any:
    held = numbers(result.array)
    return np.zeros(0) if held is None else held.values


def _in_float32(written: Written) -> Any:
    with np.errstate(over="ignore"):
        return written.numbers.astype(np.float32)


def _is_by_hand(made: Made) -> bool:
    """Returns whether a line casts, and not a function of JAX that it calls."""
    file, _, rest = made.source.rpartition(":")
    line = linecache.getline(file, int(rest.partition(" ")[0])) if file else ""
    return made.operation == "cast" and any(word in line for word in _CASTING)


def _is_at_edge(name: str, operands: list[Any]) -> bool:
    known = _SINGULAR.get(name)
    held = numbers(operands[known.operand]) if known else None
    if known is None or held is None or not held.is_real:
        return False
    with np.errstate(invalid="ignore"):
        return bool(known.edge(held.values).any())
