"""The rules while they are in force for one type of device, in one thread."""

from collections.abc import Callable
from typing import Any

from halfstep.torch._actions import Cache, Casts, Runner
from halfstep.torch._dtypes import COMPUTE
from halfstep.torch._explain import CountingCache, Observer
from halfstep.torch._ops import Operation
from halfstep.torch._paths import PATHS
from halfstep.torch._tables import Table


class Active:
    """The rules that are in force for one type of device, in one thread.

    Args:
        table: What the rules mean on the device.
        cache: Where the low copies of weights are kept.
        observer: Who is told what runs, if anybody.
    """

    def __init__(self, table: Table, cache: Cache, observer: Observer | None) -> None:
        self.table = table
        self.device_type = table.scope.device_type
        self.text = table.text
        self.handles = bool(table.handled)
        self.needs_paths = table.needs_paths
        made = cache if observer is None else CountingCache(cache, observer)
        self.casts = {dtype: Casts(self.device_type, dtype, made) for dtype in COMPUTE.values()}
        self.owns = next(iter(self.casts.values())).is_here
        self.runner = self._find_runner(observer)

    def _find_runner(self, observer: Observer | None) -> Callable[[Operation], Runner | None]:
        """Returns the function that says what runs for an operation; None leaves it to PyTorch."""
        if observer is not None:
            return lambda operation: self._recorded(operation, observer)
        if self.needs_paths:
            return lambda operation: self.table.runner(operation, PATHS.current())
        runners = self.table.runners
        return lambda operation: runners.get(operation.name)

    def _recorded(self, operation: Operation, observer: Observer) -> Runner | None:
        path = PATHS.current()
        runner = self.table.runner(operation, path)
        if runner is None:
            return None
        rule = self.table.rule(operation, path)

        def recorded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], casts: Casts) -> Any:
            return observer.ruled(
                operation.base,
                "keep" if rule is None else rule.action,
                (*args, *kwargs.values()),
                lambda: runner(op, args, kwargs, casts),
            )

        return recorded
