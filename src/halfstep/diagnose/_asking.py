"""Which precision a script trains in, and whence it comes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_SHOWN = 4
_SCALER, _AUTOCAST = "GradScaler", "autocast"
_BY_POLICY = ("prepare", "set_global_policy")


class Own(NamedTuple):
    """What a script asks for itself.

    Args:
        how: By what: an autocast, a scaler, `prepare` or `set_global_policy`.
        form: The format of an autocast, or the text of a policy; empty for a scaler without a use.
        source: The line, as "file:line"; empty where it is not known.
        device: The type of device that an autocast is for.
        rules: The text of the rules of an autocast; PyTorch's own has none.
        step: How many steps there were before.

    Example:
        >>> own = Own("torch.autocast", "float16", "train.py:7")
        >>> str(own), own.casts, own.native
        ('float16 by torch.autocast in train.py:7', True, True)
    """

    how: str
    form: str = ""
    source: str = ""
    device: str = ""
    rules: str = ""
    step: int = 0

    def __str__(self) -> str:
        if self.scales:
            return f"scaled by {self._name}" if self.form else f"{self._name}, not in use"
        return f"{self.form} by {self._name}"

    @property
    def _name(self) -> str:
        return f"{self.how}{self.where}"

    @property
    def where(self) -> str:
        """Where it is asked for, to be put after it."""
        return f" in {self.source}" if self.source else ""

    @property
    def scales(self) -> bool:
        """Whether it is a scaler."""
        return self.how.endswith(_SCALER)

    @property
    def casts(self) -> bool:
        """Whether it is an autocast."""
        return self.how.endswith(_AUTOCAST)

    @property
    def native(self) -> bool:
        """Whether it is PyTorch's own."""
        return self.how.startswith("torch.")

    @property
    def has_policy(self) -> bool:
        """Whether it is a policy."""
        return self.how in _BY_POLICY


def own_text(asked: Sequence[Own], half: str = "") -> str:
    """Returns what a script trains in that asks for it itself.

    Args:
        asked: What it asks for.
        half: The format of 16 bits that it keeps parameters in, empty for none.

    Example:
        >>> own_text([Own("torch.amp.GradScaler", "in use", "train.py:3")])
        "float32, scaled by torch.amp.GradScaler in train.py:3 (the script's own)"
    """
    computing = _texts(each for each in asked if not each.scales)
    computing = computing or [f"{half} parameters" if half else "float32"]
    parts = _some([*computing, *_texts(each for each in asked if each.scales)])
    return f"{', '.join(parts)} (the script's own)"


def _texts(asked: Iterable[Own]) -> list[str]:
    """Returns what is asked for, in the lines in which the same is."""
    lines: dict[Own, list[str]] = {}
    for each in asked:
        lines.setdefault(Own(each.how, each.form), []).append(each.source)
    return [str(each._replace(source=" and ".join(_some(of)))) for each, of in lines.items()]


def _some(parts: list[str]) -> Iterator[str]:
    yield from parts[:_SHOWN]
    if parts[_SHOWN:]:
        yield f"and {len(parts) - _SHOWN} more"


def others_like(own: Own, asked: Iterable[Own]) -> list[str]:
    """Returns the other lines in which the same is asked for.

    Example:
        >>> first, second = (Own("torch.autocast", "float16", f"a.py:{line}") for line in (3, 7))
        >>> others_like(first, [first, second])
        ['a.py:7']
    """
    same = (each for each in asked if _nowhere(each) == _nowhere(own))
    return [each.source for each in same if each.source != own.source]


def _nowhere(own: Own) -> Own:
    return own._replace(source="", step=0)


def scaler_of(asked: Iterable[Own]) -> Own | None:
    """Returns the first scaler that a script uses, None without one.

    Example:
        >>> scaler_of([]) is None
        True
    """
    return next((each for each in asked if each.scales and each.form), None)


def autocast_of(asked: Iterable[Own], form: str) -> Own | None:
    """Returns the first autocast of a script, one in a format if there is such a one.

    Example:
        >>> both = [Own("torch.autocast", each) for each in ("float16", "bfloat16")]
        >>> autocast_of(both, "bfloat16").form
        'bfloat16'
    """
    found = [each for each in asked if each.casts]
    return next((each for each in found if each.form == form), (*found, None)[0])
