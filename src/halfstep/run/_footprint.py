"""What is known about the memory of one training, predicted and measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.run._layouts import PARTS, Trained


@dataclass(frozen=True)
class Kept:
    """What one layout costs.

    Args:
        name: The layout's.
        predicted: Bytes by part, None where they cannot be predicted.
        measured: Bytes by part, and what was counted besides; None where nothing was measured.
        unpredicted: Why nothing is predicted.
        unmeasured: Why nothing was measured.
    """

    name: str
    predicted: Mapping[str, float] | None = None
    measured: Mapping[str, Any] | None = None
    unpredicted: str = ""
    unmeasured: str = ""


@dataclass(frozen=True)
class Activations:
    """What one pass keeps for backward.

    Args:
        policy: What it ran under.
        bytes: How much, None where it was not counted.
        per_sample: How much more for each further sample, None where that is unknown.
        fixed: How much however few samples there are, such as copies of weights.
        reason: Why not.
    """

    policy: str
    bytes: int | None = None
    per_sample: float | None = None
    fixed: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Footprint:
    """What training a model or a script keeps in memory.

    Args:
        target: What was measured, as the user wrote it.
        trained: What each optimizer trains.
        layouts: What each layout costs.
        activations: What each policy keeps for backward.
        batch: How many samples a pass has, None where it is unknown.
        steps: How many steps were taken before it was measured.
        error: Why nothing is known.
        device: What it computed on.
        versions: (name, version) of Python and the libraries.
    """

    target: str
    trained: tuple[Trained, ...] = ()
    layouts: tuple[Kept, ...] = ()
    activations: tuple[Activations, ...] = ()
    batch: int | None = None
    steps: int = 0
    error: str = ""
    device: str = ""
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> int:
        """How many values are trained.

        Example:
            >>> Footprint("train.py", (Trained("SGD", (8, 2)), Trained("SGD", (1,)))).parameters
            11
        """
        return sum(each.parameters for each in self.trained)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers, each once."""
        return tuple(dict.fromkeys(each.optimizer for each in self.trained))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON types."""
        return asdict(self) | {
            "parameters": self.parameters,
            "versions": dict(self.versions),
        }


def total(parts: Mapping[str, float]) -> float:
    """Returns the bytes of all parts.

    Example:
        >>> total({"weights": 8, "remainder": 0, "gradients": 8, "state": 16, "others": 4})
        32
    """
    return sum(parts[part] for part in PARTS)
