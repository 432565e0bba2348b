"""What each way of keeping weights, gradients and optimizer state costs, by arithmetic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PARTS = ("weights", "remainder", "gradients", "state")
# The optimizers of which torchao.optim has a version with 8-bit states.
EIGHT_BIT = {"Adam": "Adam8bit", "AdamW": "AdamW8bit"}

_FLOAT32_BYTES = 4
# How those versions keep one value of state: what is smaller or uneven stays in float32.
_BLOCK, _SMALLEST = 256, 4096
_CODE_BYTES = 1 + _FLOAT32_BYTES / _BLOCK
_CODEBOOK_BYTES = 256 * _FLOAT32_BYTES


@dataclass(frozen=True)
class Layout:
    """How weights, gradients and state are kept, in bytes per float32 parameter.

    Args:
        name: What it is called.
        weights: Of the parameters that the model computes with.
        remainder: Of what is missing in them and kept elsewhere.
        gradients: Of what stays of the gradients after a backward pass.
        policy: What a model trains under.
        masters: How the exact weights are kept.
        eight_bit: Whether the optimizer's state is in 8 bits.
        release: Whether gradients are applied and freed inside of the backward pass.
    """

    name: str
    weights: float
    remainder: float
    gradients: float
    policy: str = "mixed_bfloat16"
    masters: str = "cast"
    eight_bit: bool = False
    release: bool = False


LAYOUTS = (
    Layout("float32", 4, 0, 4, policy="float32"),
    Layout("cast masters", 4, 0, 4),
    Layout("split masters", 2, 2, 2, masters="split"),
    Layout("split +8-bit", 2, 2, 2, masters="split", eight_bit=True),
    Layout("split +release", 2, 2, 0, masters="split", release=True),
    Layout("split +8-bit +release", 2, 2, 0, masters="split", eight_bit=True, release=True),
)


@dataclass(frozen=True)
class Trained:
    """What one optimizer trains, and the state that it keeps for it.

    Args:
        optimizer: The name of its class.
        sizes: How many values each parameter has.
        dtypes: The dtypes of the parameters.
        unsplit: How many values stay in float32 where masters are split.
        per_value: Bytes of state for each value, None where they could not be found out.
        per_tensor: Bytes of state for each parameter, however large it is.
        reason: Why they could not be found out.
    """

    optimizer: str
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    unsplit: int = 0
    per_value: float | None = 0.0
    per_tensor: float = 0.0
    reason: str = ""

    @property
    def parameters(self) -> int:
        """How many values are trained."""
        return sum(self.sizes)


def predicted(layout: Layout, trained: Iterable[Trained]) -> Mapping[str, float]:
    """Returns the bytes of each part, for parameters that `unpredictable` has nothing against.

    Args:
        layout: How all is kept.
        trained: What each optimizer trains.

    Example:
        >>> adam = Trained("AdamW", sizes=(4096, 64), per_value=8.0)
        >>> predicted(LAYOUTS[2], [adam])
        {'weights': 8320, 'remainder': 8320, 'gradients': 8320, 'state': 33280.0}
    """
    several = list(trained)
    whole = sum(each.unsplit for each in several) if layout.masters == "split" else 0
    count = sum(each.parameters for each in several) - whole
    return {
        "weights": layout.weights * count + _FLOAT32_BYTES * whole,
        "remainder": layout.remainder * count,
        "gradients": layout.gradients * count + _FLOAT32_BYTES * whole * (not layout.release),
        "state": sum(_state(layout, each) for each in several),
    }


def unpredictable(layout: Layout, trained: Iterable[Trained]) -> str:
    """Returns why nothing can be predicted, "" where it can.

    Example:
        >>> unpredictable(LAYOUTS[3], [Trained("SGD", sizes=(8,))])
        'torchao.optim has no SGD with 8-bit states'
    """
    several = list(trained)
    narrow = sorted({dtype for each in several for dtype in each.dtypes} - {"float32"})
    unknown = [each.reason for each in several if each.per_value is None]
    names = {each.optimizer for each in several}
    wide, low = sorted(names - EIGHT_BIT.keys()), sorted(names & set(EIGHT_BIT.values()))
    reasons = (
        (low, f"the state of {', '.join(low)} is in 8 bits already"),
        (narrow, f"parameters are trained in {', '.join(narrow)}"),
        (unknown, "".join(unknown[:1])),
        (layout.eight_bit and wide, f"torchao.optim has no {', '.join(wide)} with 8-bit states"),
    )
    return next((reason for found, reason in reasons if found), "")


def _state(layout: Layout, trained: Trained) -> float:
    of_one = _in_eight_bits if layout.eight_bit else _as_it_is
    per_value = trained.per_value or 0.0
    values = sum(of_one(size, per_value) for size in trained.sizes)
    return values + trained.per_tensor * len(trained.sizes)


def _as_it_is(size: int, per_value: float) -> float:
    return size * per_value


def _in_eight_bits(size: int, per_value: float) -> float:
    if size < _SMALLEST or size % _BLOCK:
        return size * per_value
    return per_value / _FLOAT32_BYTES * (size * _CODE_BYTES + _CODEBOOK_BYTES)
