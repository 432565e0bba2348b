"""A policy that wins over what a script asks for, in the whole process."""

import contextlib
from collections.abc import Iterator

from halfstep.core._policy import Policy

_overriding: Policy | None = None


@contextlib.contextmanager
def override_policy(policy: Policy | str) -> Iterator[Policy]:
    """Makes a policy win over what the script passes, in every thread, until the block ends.

    Args:
        policy: The policy, or its text form.

    Example:
        >>> with override_policy("mixed_bfloat16"):
        ...     print(overriding_policy())
        mixed_bfloat16
        >>> overriding_policy() is None
        True
    """
    global _overriding
    chosen, before = Policy.of(policy), _overriding
    _overriding = chosen
    try:
        yield chosen
    finally:
        _overriding = before


def overriding_policy() -> Policy | None:
    """Returns the policy that wins at the moment, or None.

    Example:
        >>> overriding_policy() is None
        True
    """
    return _overriding
