"""What to write so that a fault is gone; it has been tried."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from halfstep.jax._diagnosing._made import Made
from halfstep.jax._diagnosing._programs import Program, run
from halfstep.jax._diagnosing._run import Key
from halfstep.jax._diagnosing._verdict import faults
from halfstep.jax._interpret import FLOAT32
from halfstep.jax._interpret._values import BFLOAT16
from halfstep.jax._ops import plain_name
from halfstep.jax._private import source, sub_jaxprs

_BFLOAT16 = "jnp.bfloat16  # in place of jnp.float16: it has the range of float32"
_POLICY = 'policy="mixed_bfloat16"  # it has the range of float32'
_WIDE = "x = x.astype(jnp.float32)  # for each x that goes into {path}"
_ISLAND = 'halfstep.jax.autocast(f, "float32")  # in place of the f that runs in {path}'
_CLIPPED = "jnp.{word}(jnp.clip(h, -1 + 1e-6, 1 - 1e-6))"
_SELECTED = """\
safe = jnp.where({taken}, h, {instead})  # h is what goes into {word}
jnp.where({taken}, {call}, 0)"""


def _selected(taken: str, instead: int, call: str) -> str:
    return _SELECTED.format(taken=taken, instead=instead, call=call, word="{word}")


# What has no derivative everywhere, in the order in which a line that has several is read.
_SINGULAR = {
    "sqrt": _selected("h > 0", 1, "jnp.sqrt(safe)"),
    "rsqrt": _selected("h > 0", 1, "jax.lax.rsqrt(safe)"),
    "cbrt": _selected("h != 0", 1, "jnp.cbrt(safe)"),
    "log": _selected("h > 0", 1, "jnp.log(safe)"),
    "log1p": _selected("h > -1", 0, "jnp.log1p(safe)"),
    "pow": _selected("h > 0", 1, "safe**power"),
    "acos": _CLIPPED,
    "asin": _CLIPPED,
    "exp": "jnp.exp(jnp.minimum(h, 80))",
    "div": _selected("h != 0", 1, "dividend / safe"),
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
        names = set(_names_at(made.source, self.written.closed.jaxpr))
        word = next((each for each in _SINGULAR if each in names), "")
        mended = frozenset(each.key for each in self.found)
        if not word or not run(self.program, known=self.known, mended=mended).finite:
            return ""
        return _SINGULAR[word].format(word=word)

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


def _names_at(line: str, jaxpr: Any) -> Iterator[str]:
    """Yields the primitives that a line was traced to."""
    for equation in jaxpr.eqns:
        if source(equation) == line:
            yield plain_name(equation.primitive.name)
        for inner in sub_jaxprs(equation.params):
            yield from _names_at(line, inner)
