"""One policy for every layer and model that is built from now on, safe by default.

A policy of Keras gives each layer one dtype, for the matrix product and the softmax after it alike.
While a policy with a 16-bit format is in force, this module makes three changes to Keras, each
undone by the next call of `set_global_policy`:

* Fragile operations (the tables of `_kept`) compute in float32 and hand their result on in the
  compute dtype, at the one place that all forms of an operation share: the function of the backend.
* What leaves a model that no other layer calls is float32. If it is the result of a fragile
  operation, it is the one from before rounding, so a loss meets the softmax in full.
* `Model.compile` scales the loss wherever a layer computes in float16.

No layer, activation or policy object changes, so configurations and files are those of plain Keras,
and models loaded from files, subclassed models and custom loops are treated like any other. The
other ways are narrower. Changing the dtype policy of the last layer makes its matrix product run in
float32, too, and is saved with it; a model of one's own does not tell which layer is its last.
Wrapping the activation of a layer replaces what its configuration names, and misses
`keras.ops.softmax` in a `call` of one's own. Replacing `keras.activations.softmax` misses the
layers that hold the function already.
"""

import itertools
import threading
from dataclasses import dataclass
from typing import Any

import keras

from halfstep.core import Policy, is_auto, overriding_policy
from halfstep.errors import UsageError
from halfstep.keras import _boundary, _kept, _scaling
from halfstep.keras._auto import chosen as auto
from halfstep.keras._patches import Undo
from halfstep.keras._policies import Chosen, is_low, read

_lock = threading.RLock()


@dataclass(frozen=True)
class _InForce:
    """A policy, and what undoes its changes of Keras."""

    chosen: Chosen
    undo: tuple[Undo, ...] = ()


_in_force: _InForce | None = None


def set_global_policy(policy: Any, *, safe: bool = True) -> None:
    """Makes every layer that is built from now on compute by a policy.

    Variables are float32 and operations run in the low format of a policy such as
    `mixed_float16`. Layers given a `dtype` of their own keep it. `float32` sets everything back to
    what it was. Which layer computes in what is decided when it is built, as in Keras; what is kept
    wide is decided when it runs, or is compiled to run: leave the policy in force while training.

    Args:
        policy: A name, a `halfstep.Policy` or its text, or a dtype policy or policy map of Keras.
            `auto` is what the device is fast in as a whole, which is measured if it is not known.
        safe: Whether outputs of models and fragile operations are kept in float32 and the loss is
            scaled wherever a layer computes in float16. False is exactly what Keras does.

    Raises:
        PolicyError: It is no policy, or none that Keras can express.
        UsageError: `safe` is neither True nor False.

    Example:
        >>> import keras
        >>> set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
        >>> outputs = model(keras.ops.ones((1, 4)))
        >>> model.layers[0].compute_dtype, keras.backend.standardize_dtype(outputs.dtype)
        ('bfloat16', 'float32')
        >>> set_global_policy("float32")
    """
    global _in_force
    if not isinstance(safe, bool):
        raise UsageError(
            f"set_global_policy needs safe=True or safe=False, got safe={safe!r}. Write safe=False"
            " for what plain Keras does."
        )
    wanted = overriding_policy() or policy
    asked = None if is_auto(wanted) else read(wanted)
    with _lock:
        for undo in reversed(_in_force.undo if _in_force else ()):
            undo()
        _in_force = None
        # Not before, since what was in force has a say in how operations run.
        chosen = asked or read(auto())
        keras.config.set_dtype_policy(chosen.keras_policy)
        low = safe and is_low(chosen.keras_policy)
        _in_force = _InForce(chosen, _installed(chosen.policy) if low else ())


def global_policy() -> Policy:
    """Returns the policy of the layers that are built from now on.

    Returns:
        The policy given to `set_global_policy`, or what Keras was told since. Of a policy map, that
        of its default; `keras.config.dtype_policy()` is the map.

    Example:
        >>> set_global_policy("mixed_bfloat16")
        >>> str(global_policy())
        'mixed_bfloat16'
        >>> set_global_policy("float32")
    """
    now = keras.config.dtype_policy()
    if _in_force is not None and _in_force.chosen.keras_policy is now:
        return _in_force.chosen.policy
    return read(now).policy


def _installed(policy: Policy) -> tuple[Undo, ...]:
    return tuple(
        itertools.chain(
            _kept.install(),
            _boundary.install(policy.output_dtype),
            _scaling.install(policy),
        )
    )
