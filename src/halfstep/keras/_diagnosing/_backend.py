"""What differs between the backends in looking at a run, each in a module with the same names.

* `WORDS`: what is said for the backend's own names of operations.
* `CASTS`: the class of tensors whose operators cast a number before an operation sees it, or none.
* `watching(note)`: calls `note(name, inputs, outputs)` after every operation until the block ends.
* `whole()`: until the block ends, a function may run as a whole, compiled.
* `on_host(value)`: the numbers of a tensor as an array, None while it is being traced.
* `probe(value, note)`: the value itself, whose gradient is handed to `note` when it arrives.
* `gradients(loss, values)`: the gradients of `loss(values)`, None for values that it does not use.
"""

from importlib import import_module
from types import ModuleType

from halfstep.keras._stepping._backend import name


def here() -> ModuleType:
    """Returns the module for the backend that Keras runs on.

    Example:
        >>> here().WORDS["cast"]
        'cast'
    """
    return import_module(f"halfstep.keras._diagnosing._on_{name()}")
