"""optax, which only the functions that build transformations need."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from halfstep.errors import MissingExtraError


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
