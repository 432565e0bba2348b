"""A record of every operation that ran in a region, in which dtype, and what was cast for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.torch._dtypes import name_of
from halfstep.torch._engine._actions import Cache, tensors_of
from halfstep.torch._engine._paths import PATHS


@dataclass(frozen=True)
class Row:
    """Calls of one operation that were alike.

    Args:
        operation: Such as `aten::linear`.
        module: The dotted path of the module, empty for the outermost one.
        action: What the rules say, or an empty text where they say nothing.
        inputs: The dtypes of the tensors that the caller passed.
        outputs: The dtypes of the tensors that came out.
        count: How often.
        casts: How many casts the rules inserted.
        cast_bytes: How many bytes those casts wrote.
    """

    operation: str
    module: str
    action: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    count: int
    casts: int
    cast_bytes: int


# What autograd and factory functions do for themselves.
_BOOKKEEPING = ("aten::detach", "aten::lift_fresh")

_Key = tuple[str, str, str, tuple[str, ...], tuple[str, ...]]


class Explanation:
    """What ran in a region; made by `autocast(...).explain()`.

    Print it for a table. Operations that are part of another one in the table are not listed, and
    neither is what runs inside a compiled graph.

    Example:
        >>> import torch
        >>> from halfstep.torch import autocast
        >>> layer, inputs = torch.nn.Linear(4, 2), torch.ones(1, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16).explain() as explanation:
        ...     _ = layer(inputs)
        >>> explanation.rows[0].operation, explanation.rows[0].outputs, explanation.casts
        ('aten::linear', ('bfloat16',), 3)
    """

    def __init__(self) -> None:
        self._counts: Counter[_Key] = Counter()
        self._casts: Counter[_Key] = Counter()
        self._bytes: Counter[_Key] = Counter()

    @property
    def rows(self) -> list[Row]:
        """The operations in the order in which they first ran."""
        return [
            Row(*key, count=count, casts=self._casts[key], cast_bytes=self._bytes[key])
            for key, count in self._counts.items()
        ]

    @property
    def casts(self) -> int:
        """How many casts the rules inserted."""
        return sum(self._casts.values())

    @property
    def cast_bytes(self) -> int:
        """How many bytes those casts wrote."""
        return sum(self._bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as plain data."""
        rows = [asdict(row) for row in self.rows]
        return {"casts": self.casts, "cast_bytes": self.cast_bytes, "rows": rows}

    def add(self, key: _Key, casts: int, cast_bytes: int) -> None:
        """Counts one call."""
        self._counts[key] += 1
        self._casts[key] += casts
        self._bytes[key] += cast_bytes

    def __str__(self) -> str:
        header = ("operation", "module", "rule", "count", "in", "out", "casts", "bytes")
        lines = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        total = f"{self.casts} casts inserted, {self.cast_bytes:,} bytes written by them"
        return "\n".join([*body, total])


def _cells(row: Row) -> tuple[str, ...]:
    inputs, outputs = (" ".join(dict.fromkeys(names)) or "-" for names in (row.inputs, row.outputs))
    numbers = (str(row.casts), f"{row.cast_bytes:,}")
    names = (row.operation, row.module or "-", row.action or "-")
    return (*names, str(row.count), inputs, outputs, *numbers)


class Observer(TorchDispatchMode):
    """Fills an explanation: ruled operations tell it themselves, others it sees go by.

    Args:
        explanation: What is filled.
        again: Puts autocast in force for the parts of an operation, where PyTorch hides it.
    """

    def __init__(self, explanation: Explanation, again: Callable[[], Any]) -> None:
        super().__init__()
        self._explanation = explanation
        self._again = again
        self._depth = self._seen = 0
        self._copies = self._copied_bytes = 0

    def ruled(self, name: str, action: str, given: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Runs an operation that a rule decides about, and records it unless it is part of one."""
        self._depth += 1
        before = (self._copies, self._copied_bytes)
        try:
            result = call()
        finally:
            self._depth -= 1
        if not self._depth:
            made = (self._copies - before[0], self._copied_bytes - before[1])
            self._record(name, action, given, result, *made)
        return result

    @property
    def seen(self) -> int:
        """How many operations went by."""
        return self._seen

    def count_cast(self, result: Tensor) -> None:
        """Counts a cast for the operation that is running, unless it is part of another one."""
        if self._depth == 1:
            self._copies += 1
            self._copied_bytes += result.numel() * result.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._seen += 1
        if self._depth:
            return func(*args, **(kwargs or {}))
        self._depth += 1
        try:
            with self._again():
                result = func(*args, **(kwargs or {}))
        finally:
            self._depth -= 1
        if func._schema.name not in _BOOKKEEPING:
            self._record(func._schema.name, "", args, result, 0, 0)
        return result

    def _record(
        self, name: str, action: str, given: Any, result: Any, casts: int, cast_bytes: int
    ) -> None:
        outputs = result if isinstance(result, list | tuple) else (result,)
        key = (name, PATHS.current(), action, _dtypes(given), _dtypes(outputs))
        self._explanation.add(key, casts, cast_bytes)


class CountingCache:
    """A cache of casts that tells an observer what it really cast.

    Args:
        cache: The cache that does the work.
        observer: Who counts.
    """

    def __init__(self, cache: Cache, observer: Observer) -> None:
        self._cache = cache
        self._observer = observer

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype, counted unless it came from memory."""
        before = self._observer.seen
        result = self._cache.cast(tensor, dtype)
        if self._observer.seen > before:
            self._observer.count_cast(result)
        return result


def _dtypes(values: Any) -> tuple[str, ...]:
    return tuple(name_of(tensor.dtype) for tensor in tensors_of(values))
