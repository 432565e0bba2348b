"""What applies gradients within backward, which no scaled loss may meet."""

import weakref
from typing import Any

from halfstep.errors import UsageError

released: "weakref.WeakSet[Any]" = weakref.WeakSet()


def refuse_released() -> None:
    """Raises an error if gradients could be applied before they are unscaled."""
    if released:
        raise UsageError(
            "GradScaler needs gradients that wait for step(), got regions with release=True, which "
            "would apply them while they are scaled, and before it is known that none overflows. "
            "Leave the scaler out and use policy='mixed_bfloat16', or release=False."
        )
