"""Counts how often a function is traced and compiled."""

import jax


class Compiled:
    """A jitted function that knows how often it was traced and compiled."""

    def __init__(self, function):
        self.traces = 0

        def traced(*args):
            self.traces += 1
            return function(*args)

        self._jitted = jax.jit(traced)

    def __call__(self, *args):
        return self._jitted(*args)

    @property
    def compilations(self):
        return self._jitted._cache_size()
