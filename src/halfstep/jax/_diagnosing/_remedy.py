"""What to write so that a fault is gone; it has been tried."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfstep.jax._diagnosing._made import Made
from halfstep.jax._diagnosing._numbers import numbers
from halfstep.jax._diagnosing._programs import Program, run
from halfstep.jax._diagnosing._run import Key
from halfstep.jax._diagnosing._verdict import faults
from halfstep.jax._interpret import FLOAT32
from halfstep.jax._interpret._values import BFLOAT16

_BFLOAT16 = "jnp.bfloat16  # in place of jnp.float16: it has the range of float32"
_POLICY = 'policy="mixed_bfloat16"  # it has the range of float32'
_WIDE = "x = x.astype(jnp.float32)  # for each x that goes into {path}"
_ISLAND = 'halfstep.jax.autocast(f, "float32")  # in place of the f that runs in {path}'
_SELECTED = """\
safe = jnp.where({taken}, h, {instead})  # h is what goes into {word}
jnp.where({taken}, {call}, 0)"""


def _selected(word: str, taken: str, instead: int, call: str) -> str:
    return _SELECTED.format(word=word, taken=taken, instead=instead, call=call)


def _clipped(word: str) -> str:
    return f"jnp.{word}(jnp.clip(h, -1 + 1e-6, 1 - 1e-6))"


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


# In the order in which a line that has several is read.
_SINGULAR = {
    "sqrt": _Singular(_up_to_zero, _selected("sqrt", "h > 0", 1, "jnp.sqrt(safe)")),
    "rsqrt": _Singular(_up_to_zero, _selected("rsqrt", "h > 0", 1, "jax.lax.rsqrt(safe)")),
    "cbrt": _Singular(_at_zero, _selected("cbrt", "h != 0", 1, "jnp.cbrt(safe)")),
    "log": _Singular(_up_to_zero, _selected("log", "h > 0", 1, "jnp.log(safe)")),
    "log1p": _Singular(lambda h: h <= -1, _selected("log1p", "h > -1", 0, "jnp.log1p(safe)")),
    "pow": _Singular(_up_to_zero, _selected("pow", "h > 0", 1, "safe**power")),
    "acos": _Singular(lambda h: abs(h) >= 1, _clipped("acos")),
    "asin": _Singular(lambda h: abs(h) >= 1, _clipped("asin")),
    "exp": _Singular(lambda h: h > 80, "jnp.exp(jnp.minimum(h, 80))"),
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
        in_float32: What float32 makes, too.
        cast: Whether `autocast` made the whole function.
    """

    program: Program
    written: Program
    known: frozenset[Key]
    found: tuple[Made, ...]
    in_float32: frozenset[Key]
    cast: bool

    def remedy(self, made: Made) -> str:
        """Returns what to write, empty where nothing is known that helps."""
        if made.key in self.in_float32:
            return self._defined(made) if made.backward else ""
        return self._scope(made) or self._bfloat16(made)

    def _defined(self, made: Made) -> str:
        """Returns how to call what has no derivative everywhere only where it has one."""
        at = run(self.written, line=made.source).operands if made.source else []
        names = {name for name, operands in at if _is_at_edge(name, operands)}
        word = next((each for each in _SINGULAR if each in names), "")
        mended = frozenset(each.key for each in self.found)
        if not word or not run(self.program, known=self.known, mended=mended).finite:
            return ""
        return _SINGULAR[word].remedy

    def _scope(self, made: Made) -> str:
        def formats(path: str) -> Any:
            return FLOAT32 if f"{path}.".startswith(f"{made.path}.") else None

        fine = made.path and made.operation != "data" and self._helps(formats)
        text = _ISLAND if made.region or self.cast else _WIDE
        return text.format(path=made.path) if fine else ""

    def _bfloat16(self, made: Made) -> str:
        text = _POLICY if made.region or self.cast else _BFLOAT16
        return text if self._helps(lambda path: BFLOAT16) else ""

    def _helps(self, formats: Callable[[str], Any]) -> bool:
        tried = run(self.program, known=self.known, formats=formats)
        return tried.finite and not any(
            each.key not in self.in_float32 for each in faults(tried, tried)
        )


def _is_at_edge(name: str, operands: list[Any]) -> bool:
    known = _SINGULAR.get(name)
    held = numbers(operands[known.operand]) if known else None
    if known is None or held is None or not held.is_real:
        return False
    return bool(known.edge(held.values).any())
