"""What was measured to find a policy: where, of which policies, of which operations."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where something was measured.

    Args:
        device: The type of device, such as "cpu".
        name: What the device is called.
        threads: How many threads computed; 0 where that is not the device's to say.
        versions: The packages, each with its version.

    Example:
        >>> Machine("cpu", "AMD EPYC", threads=2).differences(Machine("cpu", "AMD EPYC", threads=4))
        ('threads 4, not 2',)
    """

    device: str
    name: str
    threads: int = 0
    versions: tuple[str, ...] = ()

    def differences(self, now: "Machine") -> tuple[str, ...]:
        """Returns in what another machine, or this one by now, is not the same.

        Example:
            >>> here = Machine("cpu", "AMD EPYC", versions=("torch 2.13.0",))
            >>> here.differences(Machine("cuda", "H200", versions=("torch 2.13.0",)))
            ('device cuda, not cpu', 'name H200, not AMD EPYC')
        """
        return tuple(self._differences(now))

    def _differences(self, now: "Machine") -> Iterator[str]:
        for name in ("device", "name", "threads"):
            if getattr(now, name) != getattr(self, name):
                yield f"{name} {getattr(now, name)}, not {getattr(self, name)}"
        for each in self.versions:
            package = each.split()[0]
            there = next((one for one in now.versions if one.split()[0] == package), each)
            if there != each:
                yield f"{there}, not {each.split()[-1]}"


@dataclass(frozen=True)
class Candidate:
    """A policy under which steps were timed.

    Args:
        policy: Its text.
        seconds: The median time of a step, forward and backward.
        spread: Half of the range of the middle half of the times, in seconds.
        saved_bytes: What was kept for backward.

    Example:
        >>> Candidate("float32", 0.012).seconds
        0.012
    """

    policy: str
    seconds: float
    spread: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """Calls of one operation that were alike, in float32 and in the compute dtype.

    Args:
        operation: Such as "aten::linear".
        module: The dotted path of the module; of several, the first.
        inputs: The shapes of its tensors, such as "8x4 4x2".
        count: How often it runs in a step.
        rule: What the rules say about it, "" where they say nothing.
        float32_seconds: How long a call takes in float32, forward and backward.
        low_seconds: How long it takes in the compute dtype, casts apart; inf where it cannot.
        low_error: The norm of what its results and gradients then differ by, over theirs.

    Example:
        >>> Measured("aten::mm", "head", "8x4 4x2", 1, "lower", 4e-6, 2e-6, 0.002).gain
        2.0
    """

    operation: str
    module: str
    inputs: str
    count: int
    rule: str
    float32_seconds: float
    low_seconds: float
    low_error: float

    @property
    def gain(self) -> float:
        """How many times as fast the compute dtype is, casts apart.

        Example:
            >>> Measured("aten::add", "", "8", 1, "", 2e-6, 4e-6, 0.0).gain
            0.5
        """
        return self.float32_seconds / self.low_seconds
