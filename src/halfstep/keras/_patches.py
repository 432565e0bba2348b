"""Changes of properties of Keras; for functions there is `halfstep.core.replace`."""

from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


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
