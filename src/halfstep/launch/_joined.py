"""The probes of a script that trains with Keras, as one."""

from typing import Any

from halfstep.launch._lookings import Lookings
from halfstep.launch._probe import KerasProbe, Probe


class Joined:
    """The probe of Keras and that of another framework, which may be its backend.

    Keras is asked first; what has no side in Keras, such as a clock, is the other one's.

    Args:
        keras: The one of Keras.
        other: The other one, `NoProbe` if there is none.

    Example:
        >>> from types import SimpleNamespace
        >>> from halfstep.launch._probe import NoProbe
        >>> keras = SimpleNamespace(versions=lambda: {"keras": "3.15.0"})
        >>> joined = Joined(keras, NoProbe())
        >>> joined.versions(), joined.floats([1])
        ({'keras': '3.15.0'}, [1.0])
    """

    def __init__(self, keras: KerasProbe, other: Probe) -> None:
        self._keras, self._other = keras, other
        self.seed, self.watch, self.watch_kept = other.seed, other.watch, other.watch_kept
        self.snapshot, self.floats = other.snapshot, other.floats
        self.tick, self.seconds = other.tick, other.seconds
        self.may_count, self.saved_bytes = other.may_count, other.saved_bytes

    def look_closely(self) -> Any:
        """Returns what looks with both: each leaves alone what is the other one's."""
        return Lookings([self._other.look_closely(), self._keras.look_closely()])

    def set_policy(self, policy: str) -> None:
        """Lets scripts train under a policy, with either."""
        self._other.set_policy(policy)
        self._keras.set_policy(policy)

    def has_lowered(self) -> bool | None:
        """Returns whether either was to compute in low precision, None if Keras does not know."""
        return self._other.has_lowered() or self._keras.has_lowered()

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes in use on the device, from whichever tells."""
        return self._keras.peak_memory() or self._other.peak_memory()

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""
        return self._keras.device() or self._other.device()

    def versions(self) -> dict[str, str]:
        """Returns the names and versions of both."""
        return self._keras.versions() | self._other.versions()
