"""A record of every operation that ran in a region, in which dtype, and what was cast for it."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any


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


Key = tuple[str, str, str, tuple[str, ...], tuple[str, ...]]


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
        self._counts: Counter[Key] = Counter()
        self._casts: Counter[Key] = Counter()
        self._bytes: Counter[Key] = Counter()

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

    def add(self, key: Key, casts: int, cast_bytes: int) -> None:
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
