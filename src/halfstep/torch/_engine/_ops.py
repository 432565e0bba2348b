"""PyTorch's operations as the rules see them: overload by overload, with family and technique."""

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.core import FAMILIES, Rules
from halfstep.errors import RuleError
from halfstep.torch import _private
from halfstep.torch._engine._families import FAMILY_OF

_TECHNIQUES = {
    "embedding": "result",
    "rms_norm": "follow",
    "layer_norm": "mixes",
    "native_layer_norm": "mixes",
    "group_norm": "mixes",
    "instance_norm": "mixes",
}
# These refuse a low input whatever dtype they are asked for.
_REFUSE_LOW = ("linalg_norm", "linalg_matrix_norm", "nuclear_norm", "frobenius_norm")


@dataclass(frozen=True, eq=False)
class Operation:
    """One overload of one operation.

    Args:
        name: `aten::softmax.int`; the overload is always named, if only `default`.
        overload: What PyTorch calls it by.
        family: The family of the rules, or an empty text.
        technique: How a rule is carried out: `inputs` (cast the tensors), `dtype` (the operation
            has a `dtype` argument of its own), `written` (the first tensor is written to and
            decides), `follow` (the first tensor decides), `mixes` (it decides too, but on CPU
            float32 weights may stay), `fill` (constants have to fit), `result` (cast what comes
            out, which is smaller than what goes in).
    """

    name: str
    overload: Any
    family: str
    technique: str

    @property
    def base(self) -> str:
        """The name without the overload."""
        return self.name.partition(".")[0]


def operation(overload: Any) -> Operation:
    """Returns an overload with its family and its technique.

    Example:
        >>> operation(torch.ops.aten.sum.default).technique
        'dtype'
    """
    schema = overload._schema
    name = f"{schema.name}.{overload._overloadname}"
    return Operation(name, overload, FAMILY_OF.get(schema.name, ""), _technique(schema))


def _technique(schema: Any) -> str:
    name = schema.name.partition("::")[2]
    if FAMILY_OF.get(schema.name) == "masking" or schema.overload_name == "value":
        return "fill"
    if name in _TECHNIQUES:
        return _TECHNIQUES[name]
    if schema.is_mutable:
        return "written"
    has_dtype = any(argument.name == "dtype" for argument in schema.arguments)
    return "dtype" if has_dtype and name not in _REFUSE_LOW else "inputs"


def overloads(target: str) -> tuple[Any, ...]:
    """Returns the functional overloads of `aten::name` or `aten::name.overload`.

    Raises:
        RuleError: There is no such operation.
    """
    base, _, wanted = target.partition(".")
    namespace, _, name = base.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    names = [] if packet is None else packet.overloads()
    if not names or (wanted and wanted not in names):
        raise RuleError(_unknown(target, names))
    every = (getattr(packet, overload) for overload in names if wanted in ("", overload))
    return tuple(overload for overload in every if wanted or _takes_part(overload))


def _takes_part(overload: Any) -> bool:
    """Leaves out what TorchScript alone sees and what writes to `out=`, as PyTorch does."""
    arguments = overload._schema.arguments
    return (
        _private.is_dispatched(dispatch_name(overload))
        and any("Tensor" in str(argument.type) for argument in arguments)
        and not any(argument.is_out or argument.name == "out_dtype" for argument in arguments)
    )


def dispatch_name(overload: Any) -> str:
    """Returns the name under which the dispatcher knows an overload."""
    return f"{overload._schema.name}.{overload._overloadname}".removesuffix(".default")


def _unknown(target: str, overload_names: list[str]) -> str:
    if overload_names:
        known, what = [f"{target.partition('.')[0]}.{n}" for n in overload_names], "an overload"
    else:
        known, what = [*FAMILY_OF, *FAMILIES], "an operation"
    close = difflib.get_close_matches(target, known, n=3) or known[:3]
    return (
        f"A rule needs {what} that PyTorch {torch.__version__} has, got {target!r}. "
        f"Did you mean {' or '.join(close)}?"
    )


def operations(rules: Rules) -> Iterator[Operation]:
    """Yields every operation that some row of the rules, or PyTorch itself, speaks about.

    Raises:
        RuleError: An edit names an operation that PyTorch does not have.
    """
    edited = {edit.target for edit in rules.edits if "::" in edit.target}
    for overload in dict.fromkeys([*_known(rules.base), *_all_of(sorted(edited))]):
        yield operation(overload)


@functools.cache
def _known(base: str) -> tuple[Any, ...]:
    """Returns what a named set speaks about; operations newer than this PyTorch are left out."""
    named = [row.target for name in (base, "torch-2.13", "torch-2.13-cpu") for row in _rows(name)]
    present = [t for t in dict.fromkeys([*FAMILY_OF, *named]) if _exists(t)]
    return tuple(dict.fromkeys(_all_of(present)))


def _rows(name: str) -> tuple[Any, ...]:
    return tuple(row for row in Rules.named(name).rows if "::" in row.target)


def _exists(target: str) -> bool:
    base, _, overload = target.partition(".")
    packet = getattr(torch.ops.aten, base.partition("::")[2], None)
    return packet is not None and (not overload or overload in packet.overloads())


def _all_of(targets: list[str]) -> Iterator[Any]:
    for target in targets:
        yield from overloads(target)
