"""A policy that wins over what a script asks for, in the whole process."""

import contextlib
from collections.abc import Iterator

from halfstep.core._auto_name import AUTO, Auto, is_auto
from halfstep.core._policy import Policy

_overriding: Policy | Auto | None = None


@contextlib.contextmanager
def override_policy(policy: Policy | str) -> Iterator[Policy | Auto]:
    """Makes a policy win over what the script passes, in every thread, until the block ends.

    Args:
        policy: The policy, or its text form; `auto` is one for each device.

    Example:
        >>> with override_policy("mixed_bfloat16"):
        ...     print(overriding_policy())
        mixed_bfloat16
        >>> overriding_policy() is None
        True
    """
    global _overriding
    before = _overriding
    chosen: Policy | Auto = AUTO if is_auto(policy) else Policy.of(policy)
    _overriding = chosen
    try:
        yield chosen
    finally:
        _overriding = before


def overriding_policy() -> Policy | Auto | None:
    """Returns the policy that wins at the moment, `auto` if that is not known yet, or None.

    Example:
        >>> overriding_policy() is None
        True
    """
    return _overriding
