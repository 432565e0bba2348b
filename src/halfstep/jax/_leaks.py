"""Refuses to trace a layer that makes its parameters or changes its state meanwhile.

Linen and Haiku put those aside where they are made, so what was traced would stay there.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax

from halfstep.errors import UsageError


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
    linen = sys.modules.get("flax.linen.module")
    module = linen._context.module_stack[-1] if linen is not None else None
    return None if module is None or module.scope is None else module.scope.root.variables()


def _of_haiku() -> Any:
    base = sys.modules.get("haiku._src.base")
    inside = base is not None and base.inside_transform()
    return [base.get_params(), base.get_current_state()] if base and inside else None
