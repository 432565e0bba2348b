"""Refuses to trace a layer that makes its parameters or changes its state meanwhile.

Linen and Haiku put those aside where they are made, so what was traced would stay there.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from halfstep.errors import UsageError
from halfstep.jax._libraries import loaded


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raises if the block leaves traced values in the module that is running.

    Raises:
        UsageError: It does.
    """
    before = _variables()
    yield
    known = set(map(id, before))
    if any(isinstance(each, jax.core.Tracer) and id(each) not in known for each in _variables()):
        raise UsageError(
            "autocast needs a function that makes no parameters and changes no state of a module"
            " that is running, got a layer of Linen or Haiku that does. Wrap what is called from"
            " outside: autocast(module.apply), or autocast(transformed.apply)."
        )


def _variables() -> list[Any]:
    return jax.tree.leaves([_of_linen(), _of_haiku()])


def _of_linen() -> Any:
    names = "_context.module_stack", "Scope.root", "Scope.variables"
    found = loaded("flax.linen.module", *names)
    module = found[0][-1] if found else None
    return None if module is None or module.scope is None else module.scope.root.variables()


def _of_haiku() -> Any:
    names = "inside_transform", "get_params", "get_current_state"
    inside, *held = loaded("haiku._src.base", *names) or [bool]
    return [each() for each in held] if inside() else None
