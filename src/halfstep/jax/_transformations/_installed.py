"""optax, which only the functions that build transformations need."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from halfstep.errors import MissingExtraError, UsageError


def optax_for(name: str) -> ModuleType:
    """Returns the module optax, which the function of this name needs.

    Raises:
        MissingExtraError: If it is not installed.

    Example:
        >>> optax_for("with_masters").__name__
        'optax'
    """
    if find_spec("optax") is None:
        raise MissingExtraError(
            f"halfstep.jax.{name} needs optax, and it is not installed. "
            "Run: pip install 'halfstep[optax]'"
        )
    return import_module("optax")


def checked_inner(name: str, inner: Any) -> Any:
    """Returns a transformation as one that takes further arguments.

    Args:
        name: The function that it was given to.
        inner: The transformation.

    Raises:
        UsageError: If it is none, such as the function that makes one.

    Example:
        >>> import optax
        >>> len(checked_inner("with_masters", optax.sgd(0.1)))
        2
    """
    optax = optax_for(name)
    if not all(callable(getattr(inner, part, None)) for part in ("init", "update")):
        called = f"{inner.__name__}(...)" if hasattr(inner, "__name__") else "optax.sgd(0.1)"
        raise UsageError(
            f"{name} needs a transformation, which has an init and an update, got {inner!r}."
            f" Write {name}({called})."
        )
    return optax.with_extra_args_support(inner)
