"""What a comparison of runs asks of Keras: seeds, the policy, what trained, memory."""

from collections.abc import Callable
from typing import Any

import keras

from halfstep.core import is_auto
from halfstep.keras._global import set_global_policy
from halfstep.keras._held import hold_auto, hold_policy
from halfstep.keras._loops import watch_loops
from halfstep.keras._machine import device, versions
from halfstep.keras._patches import Undo
from halfstep.keras._private import jax, tensorflow
from halfstep.keras._watch import Models, watch


class Probe:
    """The side of Keras in measuring a training script; its backend's own side may be another.

    Example:
        >>> probe = Probe()
        >>> probe.has_lowered() is None, "keras" in probe.versions()
        (True, True)
    """

    def __init__(self) -> None:
        self._models = Models()
        self._release: Undo = lambda: None

    def seed(self, seed: int) -> None:
        """Seeds the generators of Python, NumPy, Keras and the backend."""
        keras.utils.set_random_seed(seed)

    def watch(self) -> Undo:
        """Makes scripts that do not use halfstep visible, and returns what ends it."""
        ends = watch(self._models), watch_loops()

        def end() -> None:
            for each in ends:
                each()

        return end

    def look_closely(self) -> Any:
        """Returns what looks at the numbers of a step."""
        from halfstep.keras._looking import Looking

        return Looking()

    def set_policy(self, policy: str) -> None:
        """Makes every model that is built from now on train under a policy.

        What `auto` is is found out when Keras asks for it, since the script may still choose the
        devices.
        """
        self._release()
        if is_auto(policy):
            self._release = hold_auto(lambda: set_global_policy(policy))
            return
        set_global_policy(policy)
        self._release = hold_policy()

    def has_lowered(self) -> bool | None:
        """Returns whether a model that trained computes in low precision, None if none did."""
        return self._models.lowered

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes that the backend held on its accelerators, if it tells."""
        peak = _PEAKS.get(keras.config.backend(), lambda: 0)()
        return (peak, "allocated on the accelerator") if peak else None

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""
        return device()

    def versions(self) -> dict[str, str]:
        """Returns the versions of Keras and its backend."""
        return versions()


def _jax_peak() -> int:
    stats: list[dict[str, Any]] = [each.memory_stats() or {} for each in jax.local_devices()]
    return sum(each.get("peak_bytes_in_use", 0) for each in stats)


def _tensorflow_gpus() -> list[Any]:
    gpus: list[Any] = tensorflow.config.list_logical_devices("GPU")
    return gpus


def _tensorflow_peak() -> int:
    names = [each.name.removeprefix("/device:") for each in _tensorflow_gpus()]
    return sum(tensorflow.config.experimental.get_memory_info(name)["peak"] for name in names)


_PEAKS: dict[str, Callable[[], int]] = {"jax": _jax_peak, "tensorflow": _tensorflow_peak}
