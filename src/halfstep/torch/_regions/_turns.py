"""When gradients may be applied within backward: once between two steps of their optimizer."""

from halfstep.errors import UsageError


class Turns:
    """Counts what ends a turn of one optimizer: its steps, and when gradients are cleared.

    Example:
        >>> turns = Turns()
        >>> turns.apply(), turns.step(), turns.apply()
        (0, None, 1)
        >>> turns.clear()
        Traceback (most recent call last):
        halfstep.errors.UsageError: zero_grad() needs gradients that ...
    """

    def __init__(self) -> None:
        self.now = 0
        self._applied = -1
        self._after_step = False

    def apply(self) -> int:
        """Notes that gradients are applied, and returns in which turn."""
        self._applied = self.now
        return self.now

    def step(self) -> None:
        """Ends a turn with a step."""
        self.now += 1
        self._after_step = True

    def clear(self) -> None:
        """Ends a turn by clearing gradients, which cannot take back what was applied.

        Whoever steps in each turn but this one has hardly skipped a step: more likely, another
        loss led through the region.
        """
        refused = self._after_step and self._applied == self.now
        self.now += 1
        self._after_step = False
        if refused:
            raise UsageError(
                "zero_grad() needs gradients that were not applied yet, got some that a region "
                "with release=True has applied since the latest step(). Where a backward is not to "
                "train the region, as that of a generator through its discriminator, wrap it in "
                "accumulate(optimizer), or freeze the region with requires_grad_(False); else call "
                "optimizer.step() after it."
            )
