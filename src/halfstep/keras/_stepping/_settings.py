"""From the arguments of a loss-scale optimizer to a rule, and back to a configuration."""

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

from halfstep.core import LossScale
from halfstep.errors import ScaleError, UsageError

# Keras' words for what core calls by its own.
KERAS_NAMES = {"init_scale": "initial_scale", "growth_interval": "dynamic_growth_steps"}
_NAMES = {field: KERAS_NAMES.get(field, field) for field in LossScale().to_dict()}
DEFAULTS: dict[str, Any] = {
    **{_NAMES[field]: value for field, value in LossScale().to_dict().items()},
    "initial_scale": 2.0**15,
}


def rule_of(loss_scale: object, settings: dict[str, Any]) -> LossScale:
    """Returns the rule that the arguments describe.

    Args:
        loss_scale: A `LossScale` or its text, or None where the settings describe it.
        settings: The other arguments by their names in Keras.

    Example:
        >>> str(rule_of(None, {"initial_scale": 8.0, "dynamic_growth_steps": 2}))
        'dynamic(init_scale=8.0, growth_interval=2)'
        >>> str(rule_of("static(1024.0)", {}))
        'static(1024.0)'
    """
    given = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    if loss_scale is None:
        return _from_settings({**DEFAULTS, **given})
    if given:
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"LossScaleOptimizer needs either loss_scale or the single settings, got loss_scale="
            f"{loss_scale!r} and {shown}. Write all of them inside loss_scale."
        )
    return LossScale.of(loss_scale)


def _from_settings(settings: dict[str, Any]) -> LossScale:
    first = settings["initial_scale"]
    small = isinstance(first, numbers.Real) and 0.0 < float(first) < DEFAULTS["min_scale"]
    if small and settings["min_scale"] == DEFAULTS["min_scale"]:
        # Nobody asked for the default floor: a smaller initial scale brings its own.
        settings = {**settings, "min_scale": first}
    with _in_the_words_of_keras():
        return LossScale(**{field: settings[name] for field, name in _NAMES.items()})


@contextlib.contextmanager
def _in_the_words_of_keras() -> Iterator[None]:
    try:
        yield
    except ScaleError as error:
        text = str(error).replace("LossScale needs", "LossScaleOptimizer needs")
        text = text.replace("LossScale.static(...)", 'loss_scale="static(...)"')
        for ours, theirs in KERAS_NAMES.items():
            text = text.replace(ours, theirs)
        raise ScaleError(text) from None


def settings_of(rule: LossScale) -> dict[str, Any]:
    """Returns the two settings that Keras knows, and those of the others that are not the default.

    Example:
        >>> settings_of(LossScale(init_scale=8.0, hysteresis=2))
        {'initial_scale': 8.0, 'dynamic_growth_steps': 2000, 'hysteresis': 2}
    """
    settings = {_NAMES[field]: value for field, value in rule.to_dict().items()}
    return {
        name: settings[name]
        for name in (*KERAS_NAMES.values(), *settings)
        if name in KERAS_NAMES.values() or settings[name] != DEFAULTS[name]
    }


def checked_limit(max_consecutive_skips: Any) -> int | None:
    """Returns a limit of skipped steps if it is one.

    Example:
        >>> checked_limit(100)
        100
    """
    limit = max_consecutive_skips
    if limit is None:
        return None
    whole = isinstance(limit, numbers.Integral) and not isinstance(limit, bool)
    if whole and int(limit) >= 1:
        return int(limit)
    raise UsageError(
        f"LossScaleOptimizer needs max_consecutive_skips >= 1 or None, got {limit!r}. "
        "Write 100, say."
    )
