"""The name that stands for the policy that a device is fast in, until it is known."""

from typing import Final, Literal, TypeGuard

Auto = Literal["auto"]
AUTO: Final = "auto"


def is_auto(value: object) -> TypeGuard[Auto]:
    """Returns whether somebody leaves the choice of a policy to the device.

    Example:
        >>> is_auto(" auto "), is_auto("mixed_bfloat16")
        (True, False)
    """
    return isinstance(value, str) and value.strip() == AUTO
