"""Private names of libraries of layers, which are checked where one of them is first used."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from halfstep.errors import UnsupportedVersionError

# By the module that has them: what to call the library, its package, and the tried version.
_TRIED = {
    "flax.linen.module": ("Flax", "flax", "0.12.8"),
    "haiku._src.base": ("Haiku", "dm-haiku", "0.0.17"),
}


def loaded(module: str, *names: str) -> Any:
    """Returns objects of a module by their dotted paths, None where it is not loaded.

    Raises:
        UnsupportedVersionError: This version of the library has no such object.

    Example:
        >>> loaded("no_such_library", "thing") is None
        True
    """
    here = sys.modules.get(module)
    return None if here is None else [_found(here, module, path) for path in names]


def _found(here: Any, module: str, path: str) -> Any:
    try:
        for name in path.split("."):
            here = getattr(here, name)
    except AttributeError:
        raise UnsupportedVersionError(_message(module, path)) from None
    return here


def _message(module: str, path: str) -> str:
    library, package, tried = _TRIED[module]
    return (
        f"halfstep.jax needs a {library} like {tried}, got {_version(package)}, which lacks"
        f" {module}.{path}. Install {package}=={tried}, or a newer halfstep."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "one of an unknown version"
