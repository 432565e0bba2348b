"""The rules while they are in force for one type of device, in one thread."""

from collections.abc import Callable
from typing import Any

from halfstep.torch._dtypes import COMPUTE
from halfstep.torch._engine._actions import Cache, Casts, Runner
from halfstep.torch._engine._observe import CountingCache, Listener
from halfstep.torch._engine._ops import Operation
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._engine._tables import Table
from halfstep.torch._engine._weights import NoCache

# Without a runner no rule speaks, and PyTorch's own rule must not either.
Found = tuple[Runner | None, Casts]


class Active:
    """The rules that are in force for one type of device, in one thread.

    Args:
        table: What the rules mean on the device.
        cache: Where the low copies of weights are kept.
        observer: Who is told what runs, if anybody.
    """

    def __init__(self, table: Table, cache: Cache, observer: Listener | None) -> None:
        self.table = table
        self.device_type = table.scope.device_type
        self.low = COMPUTE[table.scope.dtype]
        self.text = table.text
        self.handles = bool(table.handled)
        self.patterns = table.patterns
        self._observer = observer
        self._anew, self._remembered = self._casts(NoCache()), self._casts(cache)
        self.owns = self._anew.is_here
        self.find = self._finder()

    def _casts(self, cache: Cache) -> Casts:
        counted = CountingCache(cache, self._observer) if self._observer else cache
        return Casts(self.device_type, self.low, counted)

    def _finder(self) -> Callable[[Operation], Found | None]:
        """Returns the function that says what runs for an operation; None leaves it to PyTorch."""
        if self._observer or self.patterns:
            return lambda operation: self._find(operation, PATHS.current())
        found = {operation.name: self._find(operation, "") for operation in self.table.handled}
        return lambda operation: found.get(operation.name)

    def _find(self, operation: Operation, path: str) -> Found | None:
        if operation.name not in self.table.runners:
            return None
        runner = self.table.runner(operation, path)
        if runner is not None and self._observer is not None:
            runner = _recorded(
                runner, operation, self.table.action(operation, path), self._observer
            )
        remembers = self.table.remembers_weights(operation)
        return runner, self._remembered if remembers else self._anew


def _recorded(runner: Runner, operation: Operation, action: str, observer: Listener) -> Runner:
    def recorded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], casts: Casts) -> Any:
        run = lambda: runner(op, args, kwargs, casts)  # noqa: E731
        return observer.ruled(operation, action, args, kwargs, run)

    return recorded
