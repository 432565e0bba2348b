"""What the rules cast in calls of a model that are made again."""

from collections.abc import Iterable, Iterator

from torch import nn

from halfstep.core import Cast
from halfstep.torch._called import Call
from halfstep.torch._engine import _state
from halfstep.torch._engine._observe import Observer
from halfstep.torch._explain import Explanation
from halfstep.torch._observing._twins import twin
from halfstep.torch._observing._untouched import undrawn


def casts_of(model: nn.Module, calls: Iterable[Call]) -> Iterator[Cast]:
    """Yields what is cast for each operation, in calls that a copy of the model makes again.

    Example:
        >>> list(casts_of(nn.Linear(2, 2), []))
        []
    """
    explanation, copied = Explanation(), twin(model)[0]
    observer = Observer(explanation, _state.below_autocast)
    with undrawn(), _state.observed(observer), observer:
        for call in calls:
            call.again(copied)
    for row in explanation.rows:
        if row.casts:
            target = (*row.outputs, "")[0]
            others = [each for each in dict.fromkeys(row.inputs) if each != target]
            source = " ".join(others) or target
            yield Cast(row.operation, row.module, row.casts, source, target, row.cast_bytes)
