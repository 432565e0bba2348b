"""What is told of the inf and NaN of a training step: where each was made, and what to write."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from halfstep.core._changes import LATER, Change, Together, changes_of, together
from halfstep.core._formats import Format

_ROLES = {
    "grad_output": "the gradient of its output",
    "grad_input": "the gradient of its input",
    "grad_weight": "the gradient of its weight",
}
_OF_PARAMETERS = {"grad_weight": "the gradient of ", "constant": "the constant "}
_MADE = "{module}: {operation} made {kind} in the {phase} pass, in {range}"
_WORDS = {
    "data": "{module}: the {role} holds {kind} before the model computes anything",
    "cast": "{module}: {what} became {kind} in the {phase} pass, in the cast to {range}",
    "update": "{module}: {source} made the {role} {kind}, in {range}",
}
_UPDATE = "update"
_LOST = "{module}: most of {what} became zero in {operation}, in {range}"
_HELD = "{what} of shape {shape} holds it"
_ZERO = "it has the shape {shape}, and zeros where float32 has numbers"
_LARGEST = "; the largest number that went in was {largest:g}"
_IN_FLOAT32 = "float32 makes it, too"
_LOOK = ": look at the learning rate, the data and the initial values"


@dataclass(frozen=True)
class Fault:
    """The first inf or NaN that one operation made.

    Args:
        module: The path of the innermost module that ran the operation.
        operation: A word for it, such as "matmul", "conv" or "divide"; "cast" where a number did
            not fit into the format that it was cast to, "data" where it came from outside,
            "update" where a step of the optimizer made it, which `source` names.
        phase: "forward" or "backward".
        role: What held it: "input", "weight", "buffer", "target", "constant", "output",
            "grad_output", "grad_input" or "grad_weight".
        kind: "inf", "nan", "inf and nan"; "underflow" where numbers became zero.
        dtype: The format that could not hold the number.
        shape: The shape of the tensor.
        largest: The largest finite magnitude that went in; None where nothing finite did.
        in_float32: Whether the same model in float32 makes it, too.
        remedy: What to write instead, to be pasted; empty where nothing is known.
        source: The line that it came from, as "file:line (function)"; empty where it is not known.
        parameter: The name of the parameter, buffer or argument that held it, or whose gradient
            did, or the number that was written; empty for none, and where it is not known.
        note: What else there is to know; empty for nothing.
        changes: What the remedy changes.

    Example:
        >>> fault = Fault("expand", "matmul", "forward", "output", "inf", "float16", (2, 8), 1200.0)
        >>> print(fault)
        expand: matmul made inf in the forward pass, in float16, which ends at 65504
          its output of shape (2, 8) holds it; the largest number that went in was 1200
        >>> fault.limit
        65504.0
    """

    module: str
    operation: str
    phase: str
    role: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    largest: float | None
    in_float32: bool = False
    remedy: str = ""
    source: str = ""
    parameter: str = ""
    note: str = ""
    changes: tuple[Change, ...] = field(default=(), repr=False, compare=False)

    @property
    def limit(self) -> float:
        """The largest finite number of the format.

        Example:
            >>> Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0).limit
            65504.0
        """
        return Format.named(self.dtype).max

    @property
    def breaks(self) -> bool:
        """Whether it is inf or NaN of the forward pass, which no loss scale cures.

        Example:
            >>> Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0).breaks
            True
        """
        return self.phase == "forward" and self.kind != "underflow"

    @property
    def _end(self) -> str:
        if self.kind == "underflow":
            return f"begins at {Format.named(self.dtype).smallest_subnormal:.2g}"
        return f"ends at {self.limit:g}"

    @property
    def _what(self) -> str:
        """What held it, in words."""
        if self.parameter:
            return f"{_OF_PARAMETERS.get(self.role, '')}{self.parameter}"
        return _ROLES.get(self.role, f"its {self.role}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data.

        Example:
            >>> fault = Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0)
            >>> fault.to_dict()["shape"]
            [2]
        """
        held = {**dataclasses.asdict(self), "shape": list(self.shape)}
        return held | {"changes": [dataclasses.asdict(each) for each in self.changes]}

    def __str__(self) -> str:
        lost, words = self.kind == "underflow", self._words
        held = _ZERO if lost else _HELD
        held += "" if self.largest is None else _LARGEST
        made = _LOST if lost else _WORDS.get(self.operation, _MADE)
        below = [
            held.format(**words),
            f"in {self.source}" if self.source and self.operation != _UPDATE else "",
            f"{_IN_FLOAT32}{'' if self.remedy else _LOOK}" if self.in_float32 else "",
            self.note,
            *(["write:", *self.remedy.splitlines()] if self.remedy else ()),
        ]
        return "\n".join([made.format(**words), *(f"  {line}" for line in below if line)])

    @property
    def _words(self) -> dict[str, Any]:
        """What the texts are filled in with."""
        return {
            **vars(self),
            "role": "parameter" if self.parameter and self.role == "weight" else self.role,
            "what": self._what,
            "range": f"{self.dtype}, which {self._end}",
        }


@dataclass(frozen=True)
class Diagnosis:
    """The faults of a model, in the order in which they happened; false if there is none.

    Print it for a short text.

    Args:
        faults: All of them.
        loss_scale: The loss scale at which they happened, or the largest without any; None where
            there was no loss.

    Example:
        >>> diagnosis = Diagnosis()
        >>> print(diagnosis)
        no inf and no NaN
        >>> bool(diagnosis), diagnosis.first
        (False, None)
    """

    faults: tuple[Fault, ...] = ()
    loss_scale: float | None = None

    @property
    def first(self) -> Fault | None:
        """The first fault, None if there is none.

        Example:
            >>> fault = Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0)
            >>> Diagnosis((fault,)).first == fault
            True
        """
        return self.faults[0] if self.faults else None

    @property
    def remedies(self) -> Together:
        """The remedies of all faults as one text, without those that contradict one before them.

        Example:
            >>> fault = Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0)
            >>> Diagnosis((fault, fault)).remedies
            Together(text='', later=())
        """
        return together(self._told)

    @property
    def _told(self) -> list[tuple[str, tuple[Change, ...]]]:
        return [(_line(each), changes_of(each)) for each in self.faults if each.remedy]

    def to_dict(self) -> dict[str, Any]:
        """Returns the faults, the loss scale and all that there is to write, as plain data.

        Example:
            >>> Diagnosis().to_dict()
            {'faults': [], 'loss_scale': None, 'remedies': {'text': '', 'later': []}}
        """
        faults = [each.to_dict() for each in self.faults]
        whole = self.remedies._asdict() | {"later": list(self.remedies.later)}
        return {"faults": faults, "loss_scale": self.loss_scale, "remedies": whole}

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        scale = "" if self.loss_scale is None else f"at loss scale {self.loss_scale:g}"
        if not self.faults:
            return f"no inf and no NaN {scale}".rstrip()
        first, *others = self.faults
        also = [f"after it: {_line(each)}" for each in others]
        return "\n".join(filter(None, [str(first), *also, *self._whole, scale]))

    @property
    def _whole(self) -> list[str]:
        """The lines that say what to write in all, where that is more than for the first fault."""
        text, later = self.remedies
        lines = [] if text == self.faults[0].remedy else ["all in one, write:", *text.splitlines()]
        return [*lines[:1], *(f"  {line}" for line in lines[1:]), *(LATER + it for it in later)]


def _line(fault: Fault) -> str:
    return str(fault).partition("\n")[0]
