"""The update of `torch.amp.GradScaler`, in numpy."""

import numpy


class GradScalerReference:
    """A scale in float32 and the number of finite steps in a row."""

    def __init__(
        self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        self.scale = numpy.float32(init_scale)
        self.tracker = 0
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval

    def update(self, finite):
        if not finite:
            self.scale = self._times(self.backoff_factor)
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.growth_interval:
            grown = self._times(self.growth_factor)
            self.scale = grown if numpy.isfinite(grown) else self.scale
            self.tracker = 0

    def _times(self, factor):
        with numpy.errstate(over="ignore", under="ignore"):
            return numpy.float32(numpy.float64(self.scale) * factor)
