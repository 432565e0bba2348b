"""A global policy of Keras that nothing in a script takes away, in any thread."""

from collections.abc import Callable
from typing import Any

import keras

from halfstep.core import overriding_policy, replace
from halfstep.keras._patches import Undo
from halfstep.keras._private import found

_NAME = "dtype_policy"


def hold_policy() -> Undo:
    """Keeps the policy that is in force now, and returns what ends it.

    Keras keeps one policy per thread and forgets it in `keras.utils.clear_session()`. The held one
    takes the place of what is missing, and under `core.override_policy` of what the script sets.

    Example:
        >>> from halfstep.keras import set_global_policy
        >>> set_global_policy("mixed_bfloat16")
        >>> end = hold_policy()
        >>> keras.utils.clear_session()
        >>> keras.config.dtype_policy().name
        'mixed_bfloat16'
        >>> end()
        >>> set_global_policy("float32")
    """
    held = keras.config.dtype_policy()

    def get(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if name != _NAME:
            return original(name, *args, **kwargs)
        return held if overriding_policy() else original(name) or held

    return replace(found("backend.common.global_state"), "get_global_attribute", get)


def hold_auto(settle: Callable[[], object]) -> Undo:
    """Keeps the policy that is set when Keras first asks for one, and returns what ends it.

    Args:
        settle: Sets it.

    Example:
        >>> from halfstep.keras import set_global_policy
        >>> keras.utils.clear_session()
        >>> end = hold_auto(lambda: set_global_policy("mixed_bfloat16"))
        >>> keras.config.dtype_policy().name
        'mixed_bfloat16'
        >>> end()
        >>> set_global_policy("float32")
    """
    ends: list[Undo] = []

    def get(original: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        own = original(name, *args, **kwargs)
        if name != _NAME or (own and not overriding_policy()):
            return own
        end()
        settle()
        ends.append(hold_policy())
        return keras.config.dtype_policy()

    def end() -> None:
        while ends:
            ends.pop()()

    ends.append(replace(found("backend.common.global_state"), "get_global_attribute", get))
    return end
