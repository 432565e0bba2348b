"""Changes of Keras that last while a policy wants them, and leave no trace afterwards."""

import functools
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


def replace(owner: Any, name: str, around: Callable[..., Any]) -> Undo:
    """Lets every call of `owner.name(...)` become `around(original, ...)`.

    Returns:
        What undoes it. If somebody else has replaced the function since, what they call stays,
        and does what the original does.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(double=lambda x: 2 * x)
        >>> undo = replace(owner, "double", lambda original, x: original(x) + 1)
        >>> owner.double(3)
        7
        >>> undo()
        >>> owner.double(3)
        6
    """
    original, inherited = getattr(owner, name), name not in vars(owner)
    active = True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(owner).get(name) is wrapper:
            delattr(owner, name) if inherited else setattr(owner, name, original)

    setattr(owner, name, wrapper)
    return undo


def replace_property(owner: type, name: str, around: Callable[[Any], Any]) -> Undo:
    """Lets a property of a class return `around(value)`.

    Returns:
        What undoes it.

    Example:
        >>> class Box:
        ...     size = property(lambda self: 2)
        >>> undo = replace_property(Box, "size", lambda size: size + 1)
        >>> Box().size
        3
        >>> undo()
        >>> Box().size
        2
    """
    original, own = getattr(owner, name), vars(owner).get(name)
    wrapper = property(lambda self: around(original.fget(self)))

    def undo() -> None:
        if vars(owner).get(name) is wrapper:
            delattr(owner, name) if own is None else setattr(owner, name, own)

    setattr(owner, name, wrapper)
    return undo
