"""What an examination of a script asks of JAX: what looks at its steps, devices, memory."""

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax

Undo = Callable[[], None]


class Probe:
    """The measuring side of JAX, which has neither a global policy nor a global seed.

    Example:
        >>> probe = Probe()
        >>> probe.floats([jax.numpy.ones(()), 3.0]), "jax" in probe.versions()
        ([1.0, 3.0], True)
    """

    def __init__(self) -> None:
        self._looking: Any = None

    def seed(self, seed: int) -> None:
        """Does nothing: random numbers come of keys that the script makes."""

    def watch(self) -> Undo:
        """Watches nothing: steps are told of by what looks closely."""
        return lambda: None

    def watch_kept(self, report: Callable[[dict[str, Any]], None]) -> Undo:
        """Watches nothing."""
        return lambda: None

    def look_closely(self) -> Any:
        """Returns what looks at the numbers of a step."""
        from halfstep.jax._looking import Looking

        self._looking = Looking()
        return self._looking

    def set_policy(self, policy: str) -> None:
        """Does nothing: functions that `autocast` made ask for the policy in force."""

    def snapshot(self, value: Any) -> Any:
        """Returns the value, which nothing changes in place."""
        return value

    def floats(self, values: Sequence[Any]) -> list[float]:
        """Returns values as floats, waiting once for all."""
        return [float(each) for each in jax.device_get(list(values))]

    def tick(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Returns the differences."""
        return [after - before for before, after in pairwise(marks)]

    def has_lowered(self) -> bool | None:
        """Returns None if there were steps: a function computes in what it is written in."""
        return None if self._looking is not None and self._looking.stepped else False

    def may_count(self) -> bool:
        """Returns False: what is kept for a gradient cannot be seen."""
        return False

    def saved_bytes(self) -> contextlib.AbstractContextManager[None]:
        """Counts nothing."""
        return contextlib.nullcontext()

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes in use on the accelerators, if they tell."""
        stats: list[dict[str, Any]] = [each.memory_stats() or {} for each in jax.local_devices()]
        peak = sum(each.get("peak_bytes_in_use", 0) for each in stats)
        return (peak, "allocated on the accelerator") if peak else None

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""
        first = jax.local_devices()[0]
        return "" if first.platform == "cpu" else str(first.device_kind)

    def versions(self) -> dict[str, str]:
        """Returns JAX's version."""
        return {"jax": str(jax.__version__)}
