"""Tells of a region that is trained, but never called."""

import warnings
from typing import TYPE_CHECKING

from halfstep.core import levels_to_user

if TYPE_CHECKING:
    from halfstep.torch._region import Region


class UnusedRegionWarning(UserWarning):
    """An optimizer trains a model that was prepared but never called."""


def warn_of_no_use(region: "Region") -> None:
    """Warns where the model of a region was never called, but has gradients."""
    module = region._module()
    if module is None or all(each.grad is None for each in module.parameters()):
        return
    region._used = True
    text = (
        f"An optimizer of {region!r} steps, but the model was never called, so nothing of it ran "
        "in mixed precision. Call the model itself, not another method of it, or prepare the "
        "part that is called."
    )
    warnings.warn(UnusedRegionWarning(text), stacklevel=levels_to_user())
