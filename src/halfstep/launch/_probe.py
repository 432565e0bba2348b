"""What the recorder asks of a framework, and the answers where there is none."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from halfstep.core import processor


class SavedBytes(Protocol):
    """What `saved_bytes()` hands over."""

    @property
    def bytes(self) -> int | None:
        """The count, known once the block has ended; None if it had to be given up."""

    def may_end(self) -> bool:
        """Returns whether the block may end here."""


class Probe(Protocol):
    """The measuring side of a framework; `halfstep.torch` has one."""

    def seed(self, seed: int) -> None:
        """Seeds the framework's random generators."""

    def watch(self) -> Callable[[], None]:
        """Makes scripts that do not use halfstep visible, and returns what ends it."""

    def watch_kept(self, report: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Reports the bytes kept after each of the first steps, and returns what ends it."""

    def look_closely(self) -> Any:
        """Returns what looks at the numbers of a step, None where nothing does."""

    def set_policy(self, policy: str) -> None:
        """Lets scripts that do not use halfstep train under a policy."""

    def snapshot(self, value: Any) -> Any:
        """Returns a value that later changes in place do not reach, without waiting for it."""

    def floats(self, values: Sequence[Any]) -> list[float]:
        """Returns snapshots as floats, waiting once for all."""

    def tick(self) -> Any:
        """Returns a mark of the present moment, without waiting for the device."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns the time from each mark to the next one."""

    def has_lowered(self) -> bool | None:
        """Returns whether anything was to compute in low precision so far, None if unknown."""

    def may_count(self) -> bool:
        """Returns whether `saved_bytes` may begin here."""

    def saved_bytes(self) -> contextlib.AbstractContextManager[SavedBytes | None]:
        """Counts the bytes kept for backward within the block."""

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes in use on the device and what they count, if it tells."""

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""

    def versions(self) -> dict[str, str]:
        """Returns the framework's name and version."""


class KerasProbe(Protocol):
    """The side of Keras in measuring; its backend's own side may be another probe."""

    def seed(self, seed: int) -> None:
        """Seeds the generators of Keras and its backend."""

    def watch(self) -> Callable[[], None]:
        """Makes scripts that do not use halfstep visible, and returns what ends it."""

    def look_closely(self) -> Any:
        """Returns what looks at the numbers of a step."""

    def set_policy(self, policy: str) -> None:
        """Lets the models that are built from now on train under a policy."""

    def has_lowered(self) -> bool | None:
        """Returns whether a model that trained computes in low precision, None if unknown."""

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes in use on the device and what they count, if it tells."""

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""

    def versions(self) -> dict[str, str]:
        """Returns the names and versions of Keras and its backend."""


class NoProbe:
    """The probe where no framework is installed: Python floats, on the CPU."""

    def seed(self, seed: int) -> None:
        """Does nothing."""

    def watch(self) -> Callable[[], None]:
        """Watches nothing."""
        return lambda: None

    def watch_kept(self, report: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Watches nothing."""
        return lambda: None

    def look_closely(self) -> None:
        """Returns None."""

    def set_policy(self, policy: str) -> None:
        """Does nothing."""

    def snapshot(self, value: Any) -> Any:
        """Returns the value."""
        return value

    def floats(self, values: Sequence[Any]) -> list[float]:
        """Returns the values as floats."""
        return [float(value) for value in values]

    def tick(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Returns the differences."""
        return [after - before for before, after in pairwise(marks)]

    def has_lowered(self) -> None:
        """Returns None: nobody knows."""

    def may_count(self) -> bool:
        """Returns False: nothing is saved."""
        return False

    def saved_bytes(self) -> contextlib.AbstractContextManager[None]:
        """Counts nothing."""
        return contextlib.nullcontext()

    def peak_memory(self) -> None:
        """Returns None: there is no device."""

    def device(self) -> str:
        """Returns ""."""
        return ""

    def versions(self) -> dict[str, str]:
        """Returns nothing."""
        return {}


def torch_probe() -> Probe:
    """Returns the probe of PyTorch."""
    from halfstep.torch._measure import Probe as TorchProbe

    return TorchProbe()


def jax_probe() -> Probe:
    """Returns the probe of JAX."""
    from halfstep.jax._measure import Probe as Found

    return Found()


def keras_probe() -> KerasProbe:
    """Returns the probe of Keras."""
    from halfstep.keras._measure import Probe as Found

    return Found()


def processor_name() -> str:
    """Returns the name of the processor and how many cores this process may use."""
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    return f"{processor()} ({cores} cores)"
