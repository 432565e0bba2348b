"""Changes of a framework that last while somebody wants them, and leave no trace afterwards."""

import functools
from collections.abc import Callable
from typing import Any


def replace(
    owner: Any,
    name: str,
    around: Callable[..., Any],
    prepare: Callable[[Callable[..., Any]], object] = lambda wrapper: None,
) -> Callable[[], None]:
    """Lets every call of `owner.name(...)` become `around(original, ...)`.

    Args:
        owner: A module, a class or an object.
        name: The name of its function.
        around: What is called instead, with the function before the arguments.
        prepare: What else is to be done to what takes the place of the function.

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
    original = getattr(owner, name)
    # The cell of a closure has a content, and no names.
    inherited = name not in getattr(owner, "__dict__", (name,))
    active = True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if getattr(owner, name) is wrapper:
            delattr(owner, name) if inherited else setattr(owner, name, original)

    prepare(wrapper)
    setattr(owner, name, wrapper)
    return undo
