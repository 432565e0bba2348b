"""The numbers of every operation of a training step, against the same step in float32."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from halfstep.core import _fields
from halfstep.core._exponents import Exponents
from halfstep.core._formats import Format
from halfstep.core._limits import exponent
from halfstep.core._range import BACKWARD, FORWARD
from halfstep.core._ranges_text import aligned, span
from halfstep.core._text import check_known

_SHOWN = 40
_HEADER = (
    *("module", "pass", "operation", "role", "format", "values"),
    *("lost", "zeros", "subnormal", "saturated", "inf", "nan"),
)
# What may be asked for by each name: one of these, or of what rows have.
_FIXED = {"phase": ("forward", "backward"), "role": (*FORWARD, "buffer", "target", *BACKWARD)}
_NAMED = {"module": ("module",), "operation": ("operation", "name")}
_COUNTS = ("zeros", "subnormals", "saturated", "infs", "nans", "flushed")


@dataclass(frozen=True)
class Observed:
    """A tensor that one operation of a step read or wrote.

    Args:
        module: The path of the innermost module that ran the operation; in a backward pass, of the
            one whose gradient it is.
        operation: A word for it, such as "matmul"; in a backward pass, for the operation whose
            gradient it is.
        phase: "forward" or "backward".
        role: "input", "weight", "buffer", "output", "grad_output", "grad_input" or "grad_weight".
        form: The name of the format in which the tensor was.
        run: Its numbers.
        reference: Those of the same tensor in float32: in the same step in float32, or before the
            cast to a lower format that wrote it. None where there is no such tensor.
        name: What the framework calls the operation.
        call: Which call of the module it was in, counted from 1.
        nth: Which operation of that word it was in that call and pass, counted from 1.
        shape: The shape of the tensor.
        source: The line that it came from, as "file:line (function)"; empty where it is not known.

    Example:
        >>> run, reference = Exponents.of([0.0, 2.0, 0.0]), Exponents.of([1e-8, 2.0, 0.0])
        >>> row = Observed("head", "matmul", "backward", "grad_input", "float16", run, reference)
        >>> row.zeros, row.flushed, row.lost
        (2, 1, 0.5)
    """

    module: str
    operation: str
    phase: str
    role: str
    form: str
    run: Exponents
    reference: Exponents | None = None
    name: str = ""
    call: int = 1
    nth: int = 1
    shape: tuple[int, ...] = ()
    source: str = ""

    @property
    def largest(self) -> float:
        """The largest finite magnitude.

        Example:
            >>> row = Observed("head", "exp", "forward", "output", "float16", Exponents.of([1, -3]))
            >>> row.largest
            3.0
        """
        return self.run.largest

    @property
    def zeros(self) -> int:
        """How many numbers are zero.

        Example:
            >>> Observed("head", "exp", "forward", "output", "float16", Exponents.of([0, 1])).zeros
            1
        """
        return self.run.zeros

    @property
    def infs(self) -> int:
        """How many are infinite.

        Example:
            >>> Observed("head", "exp", "forward", "output", "float16", Exponents.of([1])).infs
            0
        """
        return self.run.infs

    @property
    def nans(self) -> int:
        """How many are not a number.

        Example:
            >>> Observed("head", "exp", "forward", "output", "float16", Exponents.of([1])).nans
            0
        """
        return self.run.nans

    @property
    def subnormals(self) -> int:
        """How many the format holds with fewer digits than others.

        Example:
            >>> run = Exponents({-15: 3, -14: 1}, largest=1e-4)
            >>> Observed("head", "exp", "forward", "output", "float16", run).subnormals
            3
        """
        end = exponent(Format.named(self.form).min_normal)
        return self._count(lambda place: place < end)

    @property
    def saturated(self) -> int:
        """How many are in the topmost power of two of the format: doubled, they overflow.

        Example:
            >>> run = Exponents({14: 1, 15: 3}, largest=65504.0)
            >>> Observed("head", "exp", "forward", "output", "float16", run).saturated
            3
        """
        top = exponent(Format.named(self.form).max)
        return self._count(lambda place: place >= top)

    @property
    def flushed(self) -> int | None:
        """How many became zero: more zeros than in float32, None without a reference.

        Example:
            >>> run, reference = Exponents.of([0, 1]), Exponents.of([1e-9, 1])
            >>> Observed("head", "exp", "forward", "output", "float16", run, reference).flushed
            1
        """
        return None if self.reference is None else max(0, self.zeros - self.reference.zeros)

    @property
    def lost(self) -> float | None:
        """The fraction of what is not zero in float32 that became zero; None without a reference.

        Example:
            >>> run, reference = Exponents.of([0, 0, 1]), Exponents.of([0, 1e-9, 1])
            >>> Observed("head", "exp", "forward", "output", "float16", run, reference).lost
            0.5
        """
        if self.reference is None or self.flushed is None:
            return None
        return self.flushed / max(self.reference.total - self.reference.zeros, 1)

    def _count(self, holds: Callable[[int], bool]) -> int:
        return sum(count for place, count in self.run.counts if holds(place))

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, with the counts.

        Example:
            >>> row = Observed("head", "exp", "forward", "output", "float16", Exponents.of([0, 1]))
            >>> row.to_dict()["zeros"]
            1
        """
        held = {name: getattr(self, name) for name in _fields.names(type(self))}
        held |= {"shape": list(self.shape), "run": self.run.to_dict()}
        held["reference"] = self.reference and self.reference.to_dict()
        return held | {name: getattr(self, name) for name in ("largest", "lost", *_COUNTS)}


@dataclass(frozen=True)
class Observation:
    """What every operation of a training step read and wrote; print it for a table, worst first.

    It has a length, and yields its rows in the order in which the operations ran.

    Args:
        rows: The tensors.

    Example:
        >>> run, reference = Exponents.of([0.0, 2.0]), Exponents.of([1e-8, 2.0])
        >>> row = Observed("head", "matmul", "backward", "grad_input", "float16", run, reference)
        >>> seen = Observation((row,))
        >>> [each.lost for each in seen.of(module="head", phase="backward")]
        [0.5]
        >>> print(seen)
        module  pass      operation  role        format   values      lost    zeros  ...
        head    backward  matmul     grad_input  float16  2^1 to 2^2  50.00%  1      ...
    """

    rows: tuple[Observed, ...] = ()
    # Those of the whole step, of which the rows were selected.
    _step: tuple[Observed, ...] = field(default=(), repr=False, compare=False)

    def of(
        self,
        *,
        module: str | None = None,
        operation: str | None = None,
        phase: str | None = None,
        role: str | None = None,
    ) -> "Observation":
        """Returns what belongs to a module, an operation, a pass and a role; None is any.

        Args:
            module: The path of the module that ran the operations itself.
            operation: The word, or what the framework calls it.
            phase: "forward" or "backward".
            role: The role.

        Raises:
            UsageError: One of them is of no operation of the step, with those that there are.

        Example:
            >>> len(Observation().of(role="output"))
            0
            >>> Observation().of(phase="forwards")
            Traceback (most recent call last):
            halfstep.errors.UsageError: of needs a phase among forward, backward, got 'forwards'. \
Did you mean 'forward'?
        """
        asked = {"module": module, "operation": operation, "phase": phase, "role": role}
        wanted = {name: value for name, value in asked.items() if value is not None}
        for name, value in wanted.items():
            check_known("of", name, value, self._known(name))
        found = (row for row in self.rows if all(_is(row, *pair) for pair in wanted.items()))
        return Observation(tuple(found), self._step or self.rows)

    def _known(self, name: str) -> Iterable[str]:
        """Returns what may be asked for: it need not be in the rows that were selected."""
        rows = self._step or self.rows
        found = (getattr(row, each) for each in _NAMED.get(name, ()) for row in rows)
        return _FIXED.get(name) or dict.fromkeys(filter(None, found))

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as plain data.

        Example:
            >>> Observation().to_dict()
            {'rows': []}
        """
        return {"rows": [row.to_dict() for row in self.rows]}

    def __iter__(self) -> Iterator[Observed]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        worst = sorted(self.rows, key=_badness, reverse=True)
        # Several operations of one gradient read the same.
        lines = list(dict.fromkeys(map(_cells, worst)))
        hidden = len(lines) - _SHOWN
        more = [f"and {hidden} more lines"] if hidden > 0 else []
        return "\n".join([*aligned(_HEADER, lines[:_SHOWN]), *more])


def _is(row: Observed, name: str, value: str) -> bool:
    return value in (getattr(row, each) for each in _NAMED.get(name, (name,)))


def _badness(row: Observed) -> tuple[float, ...]:
    """Returns what is worse the larger it is: inf and NaN, then zeros, then what is near them."""
    total = max(row.run.total, 1)
    counts = (row.infs + row.nans, row.saturated, row.subnormals)
    bad, saturated, subnormal = (count / total for count in counts)
    return bad, row.lost or 0.0, saturated, subnormal


def _cells(row: Observed) -> tuple[str, ...]:
    lost = "" if row.lost is None else f"{row.lost:.2%}"
    counts = (row.zeros, row.subnormals, row.saturated, row.infs, row.nans)
    words = (row.module, row.phase, row.operation, row.role, row.form, span(row.run), lost)
    return (*words, *map(str, counts))
