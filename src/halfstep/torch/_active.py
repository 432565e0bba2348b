"""The rules while they are in force for one type of device, in one thread."""

from typing import Any

import torch

from halfstep.torch._actions import Casts, Runner
from halfstep.torch._dtypes import COMPUTE
from halfstep.torch._explain import CountingCache, Observer
from halfstep.torch._ops import Operation
from halfstep.torch._paths import PATHS
from halfstep.torch._tables import Table
from halfstep.torch._weights import NoCache, WeightCache


class Active:
    """The rules that are in force for one type of device, in one thread.

    Args:
        table: What the rules mean on the device.
        cache: Where the low copies of weights are kept.
        observer: Who is told what runs, if anybody.
    """

    def __init__(
        self, table: Table, cache: WeightCache | NoCache, observer: Observer | None
    ) -> None:
        self.table = table
        self.device_type = table.scope.device_type
        self.text = table.text
        made = cache if observer is None else CountingCache(cache, observer)
        self._casts = {dtype: Casts(self.device_type, dtype, made) for dtype in COMPUTE.values()}
        self.owns = self._casts[torch.float32].is_here
        self._observer = observer
        self.run = self._run if observer is None else self._run_observed

    def runner(self, operation: Operation) -> Runner | None:
        """Returns what runs for an operation; None leaves it to PyTorch's kernel."""
        path = PATHS.current() if self.table.needs_paths else ""
        return self.table.runner(operation, path)

    def _run(
        self, runner: Runner, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs an operation by its rule, in the dtype of the innermost autocast."""
        low = torch.get_autocast_dtype(self.device_type)
        return runner(operation.overload, args, kwargs, self._casts[low])

    def _run_observed(
        self, runner: Runner, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        rule = self.table.rule(operation, PATHS.current())
        action = "keep" if rule is None else rule.action
        given = (*args, *kwargs.values())
        return self._observer.ruled(
            operation.base, action, given, lambda: self._run(runner, operation, args, kwargs)
        )
