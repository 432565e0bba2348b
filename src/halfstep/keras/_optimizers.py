"""The optimizers that a model holds, of which it may use some."""

from typing import Any

import keras

from halfstep.keras._readings import Values, by_variable, reading


def optimizers_of(model: Any) -> dict[str, Any]:
    """Returns the optimizer that a model was compiled with, and those that it has besides.

    Returns:
        Each under the name of its attribute, that of `compile` first.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> model.second = keras.optimizers.Adam()
        >>> [(name, type(each).__name__) for name, each in optimizers_of(model).items()]
        [('optimizer', 'SGD'), ('second', 'Adam')]
    """
    own = vars(model).items()
    found = {name: each for name, each in own if isinstance(each, keras.optimizers.Optimizer)}
    compiled = getattr(model, "optimizer", None)
    others = {name: each for name, each in found.items() if each is not compiled}
    return others if compiled is None else {"optimizer": compiled, **others}


def was_asked(optimizer: Any, values: Values = by_variable) -> bool:
    """Returns whether an optimizer was asked for a step, which waits for the device.

    Args:
        optimizer: It.
        values: Where the values of its variables are.

    Example:
        >>> was_asked(keras.optimizers.SGD())
        False
    """
    now = reading(optimizer, values)
    # Keras' own loss-scale optimizer counts no step that it skips, but lowers its scale.
    lowered = now.scale != getattr(optimizer, "initial_scale", now.scale)
    return lowered or bool(now.applied if now.asked is None else now.asked)
